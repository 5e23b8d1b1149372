"""`completions.jsonl` of the run folder, and a parquet file of its lines: all answers of all rollouts, as text, with rewards, length and
divergence.
"""

import importlib
import json
import math
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.episodes import of_episode
from experiments.rollout_run import Run
from ztk.rl.rollout import Samples


def drop_later(path: Path, *, step: int) -> None:
    """Drops the lines of a file with steps above `step`, which a resumed run will write again, and an incomplete last line."""
    if path.exists():
        kept = [line for line in path.read_bytes().split(b"\n") if line and _step_of(line) <= step]
        path.write_bytes(b"".join(line + b"\n" for line in kept))


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
        if run.episodes:
            own |= {"prompt": run.prompts.prompt_of(samples, row=row)} | of_episode(run.episodes[row])
        records.append(own | logged | own)  # own values take precedence over columns of `log_extra`
    return records


class Completions:
    """Writes the file, on rank 0."""

    def __init__(self, run: Run, *, first_step: int) -> None:
        """Drops the rows that a run resumed at `first_step` will write again."""
        self._path = Path(run.config.output_dir) / "completions.jsonl"
        self._writes = run.process.rank == 0
        name = run.config.rollout.completions_file
        self._table = None if name is None else Path(run.config.output_dir, name)
        if self._writes:
            drop_later(self._path, step=first_step)

    def close(self) -> None:
        """Writes the lines as parquet, if `rollout.completions_file` names a file. Columns that a line lacks are null in it."""
        if self._writes and self._table is not None and self._path.exists():
            lines = importlib.import_module("pyarrow.json").read_json(self._path)
            importlib.import_module("pyarrow.parquet").write_table(lines, self._table)

    def write(self, run: Run, *, step: int, samples: Samples, kl: Tensor | None) -> list[dict[str, Any]]:
        """Writes the answers of all ranks, and returns them. A collective call."""
        own = answer_records(run, step=step, samples=samples, kl=kl, rows=range(len(samples)))
        numbers = samples.numbers.tolist()
        gathered = run.process.mesh.gather_objects(list(zip(numbers, own, strict=True)))
        records = [
            record for _, record in sorted((pair for rank in gathered for pair in rank), key=lambda pair: pair[0])
        ]
        if self._writes:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(record, default=str) + "\n" for record in records)
        return records
