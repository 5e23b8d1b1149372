"""`samples.jsonl` and `completions.jsonl` of the run folder, and a parquet file of the latter: answers as text, with rewards, length and
divergence.
"""

import importlib
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ztk.experiments.episodes import of_episode
from ztk.experiments.policy_run import Run
from ztk.report import Reporter
from ztk.report.folder import LineFile
from ztk.rl.rollout import Samples

NUM_SHOWN = 4  # texts per step


class Lines:
    """A file of JSON lines that a run appends to."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        """Drops the lines with steps above `first_step`, which a resumed run will write again, and an incomplete last line."""
        self.path, self._file = path, LineFile(path)
        if path.exists():
            kept = [line for line in path.read_bytes().split(b"\n") if line and _step_of(line) <= first_step]
            path.write_bytes(b"".join(line + b"\n" for line in kept))

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Appends records."""
        self._file.write(json.dumps(record, default=str) for record in records)
        if self._file.notice is not None:
            warnings.warn(self._file.notice, RuntimeWarning, stacklevel=2)
            self._file.notice = None

    def close(self) -> None:
        """Writes the lines that a full disk did not take, or warns that they are lost."""
        try:
            self._file.close()
        except OSError as error:
            warnings.warn(f"{self.path}: lacks its last lines: {error}", RuntimeWarning, stacklevel=2)


def _step_of(line: bytes) -> float:
    try:
        return json.loads(line)["step"]
    except ValueError:
        return math.inf


def answer_records(run: Run, *, step: int, samples: Samples, kl: Tensor | None, rows: range) -> list[dict[str, Any]]:
    """Returns records of some of this rank's answers, with the rewards of every function of `reward.functions` and the columns that
    functions log.
    """
    found, functions = run.rewarded, run.prompts.rewards
    names = functions.names if functions is not None and run.config.reward.functions else ()
    records, lengths = [], samples.answer_mask.sum(1)
    for row in rows:
        logged: dict[str, Any] = {}
        if found is not None:
            values = found.values[row].tolist()
            logged = {name: column[row] for name, column in found.extra.items()}
            logged |= {
                f"rewards.{name}": None if math.isnan(value) else value
                for name, value in zip(names, values, strict=False)
            }
        own = {
            "step": step,
            "prompt": run.prompts[int(samples.prompts[row])].text,
            "answer": run.prompts.drawn(samples, row=row),
            "reward": float(samples.rewards[row]) if samples.included[row] else None,
            "length": int(lengths[row]),
            "kl": None if kl is None else float(kl[row]),
            "finished": bool(samples.finished[row]),
        }
        if samples.late is not None:
            own |= {"late": bool(samples.late[row])}
        if run.episodes:
            own |= {"prompt": run.prompts.prompt_of(samples, row=row)} | of_episode(run.episodes[row])
        records.append(own | logged)
    return records


class Texts:
    """The texts of the run folder, with reward, length and KL: some of every rollout in `samples.jsonl`, and with rollout.save_completions
    all of them in `completions.jsonl`. Rank 0 writes.
    """

    def __init__(self, run: Run, *, first_step: int) -> None:
        """Drops the rows that a run resumed at `first_step` will write again."""
        folder, rollout = Path(run.config.output_dir), run.config.rollout
        self._saves, name = bool(rollout.save_completions), rollout.completions_file
        self._table = None if name is None else folder / name
        self._samples = self._completions = None
        if run.process.rank == 0:
            self._samples = Lines(folder / "samples.jsonl", first_step=first_step)
            if self._saves:
                self._completions = Lines(folder / "completions.jsonl", first_step=first_step)

    def close(self) -> None:
        """Writes all lines as parquet, if `rollout.completions_file` names a file. Columns that a line lacks are null in it."""
        for opened in filter(None, (self._samples, self._completions)):
            opened.close()
        lines = self._completions
        if lines is not None and self._table is not None and lines.path.exists():
            table = importlib.import_module("pyarrow.json").read_json(lines.path)
            importlib.import_module("pyarrow.parquet").write_table(table, self._table)

    def report(self, run: Run, *, step: int, samples: Samples, kl: Tensor | None, reporter: Reporter) -> None:
        """Writes the answers of a rollout, and shows some as `rollout.show_every` has it. step: the first one that learns from them. A
        collective call.
        """
        completions = self.write_all(run, step=step, samples=samples, kl=kl)
        if _is_shown(step, updates=run.buffer.updates, every=run.config.rollout.show_every):
            records = self.write(run, step=step, samples=samples, kl=kl)
            reporter.say(shown(records, step=step))
            reporter.texts(completions or records, step=step)

    def write_all(self, run: Run, *, step: int, samples: Samples, kl: Tensor | None) -> list[dict[str, Any]]:
        """Writes every answer of all ranks, if the run keeps them, and returns them. A collective call then."""
        if not self._saves:
            return []
        own = answer_records(run, step=step, samples=samples, kl=kl, rows=range(len(samples)))
        gathered = run.process.mesh.gather_objects(list(zip(samples.numbers.tolist(), own, strict=True)))
        pairs = sorted((pair for rank in gathered for pair in rank), key=lambda pair: pair[0])
        records = [record for _, record in pairs]
        if self._completions is not None:
            self._completions.write(records)
        return records

    def write(self, run: Run, *, step: int, samples: Samples, kl: Tensor | None) -> list[dict[str, Any]]:
        """Writes one text for each of the rollout's first prompts, and returns them."""
        rows = range(0, len(samples), run.config.rollout.group_size)[:NUM_SHOWN]
        records = answer_records(run, step=step, samples=samples, kl=kl, rows=rows)
        if self._samples is not None:
            self._samples.write(records)
        return records


def shown(records: list[dict[str, Any]], *, step: int) -> str:
    """Formats the texts for the screen."""
    lines = [f"step {step}: texts"]
    for record in records:
        near = "" if record["kl"] is None else f"  kl {record['kl']:.3f}"
        lines.append(
            f"  reward {record['reward']}  length {record['length']}{near}  {record['prompt']!r} -> {record['answer']!r}"
        )
    return "\n".join(lines)


def _is_shown(step: int, *, updates: int, every: int) -> bool:
    """Returns whether to show texts of a rollout for `updates` steps from `step` on: if one of them is a multiple of `every`, or 1."""
    return bool(every) and (step == 1 or (step + updates - 1) // every > (step - 1) // every)
