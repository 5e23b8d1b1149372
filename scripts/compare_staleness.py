"""Compares rewards, waiting and traffic of `rollout.staleness` 0, 1 and 2 with two servers.

    python scripts/compare_staleness.py                     a small decoder, built-in task, four seeds
    python scripts/compare_staleness.py --staleness 0 2 --seeds 1 --steps 4 --words model=hf model.path=FOLDER ...

All runs begin with the same weights, after supervised steps. A server keeps running and takes the weights of every run. Printed for each
staleness: the mean reward of sampled answers after the last step with a 95 % interval over seeds, the seconds of a step, the fraction of the
run's time in which the trainer does not wait for answers and in which the servers compute, the age of the weights, the divergence between
drawing and training model, and the bytes of weights per server and version as a multiple of the parameters' bytes.
"""

import argparse
import json
import math
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import ROOT, append_rows, parser_of

RUN = (
    *("task=grpo", "model=nano", "launch.device=cpu", "launch.ranks=1", "launch.threads=1", "logger=disabled"),
    *("rollout.prompts=8", "rollout.group_size=8", "train.global_batch_size=64", "train.micro_batch_size=32"),
    *("scheduler=constant", "scheduler.warmup_steps=0", "rollout.identity=corrected", "rollout.engine=generator"),
    *("rollout.stop_equal_steps=null", "rollout.show_every=0"),
)  # fmt: skip
TRAINS = ("optimizer.lr=1e-3", "checkpoint=none")
FIRST = ("train.steps=1", "warm_start.steps=150", "checkpoint=periodic", "checkpoint.every=1", "optimizer.lr=1e-9")
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 8: 2.36}  # of Student's distribution, by the number of seeds
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--staleness", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--base", type=Path, help="a run whose weights all runs begin with, by default a new one")
    parser.add_argument("--words", nargs=argparse.REMAINDER, default=[], help="further words of every command line")
    parser.add_argument("--json", type=Path, help="append the results to this file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, rows = Path(scratch), []
        base = given.base or folder / "base"
        if given.base is None:
            trained(base, *FIRST, *given.words)
        with serving(base, folder=folder, count=given.servers) as urls:
            for seed in range(given.seeds):  # staleness within seeds, so that other work of the machine meets all alike
                for staleness in given.staleness:
                    words = (
                        f"rollout.staleness={staleness}",
                        f"train.seed={seed}",
                        f"train.steps={given.steps}",
                        *TRAINS,
                    )
                    where = (f"warm_start.path={base}", "warm_start.steps=0", f"rollout.servers=[{','.join(urls)}]")
                    row = {"staleness": staleness, "seed": seed}
                    row |= measured(
                        folder / f"{seed}-{staleness}", *where, *words, *given.words, staleness=staleness, urls=urls
                    )
                    print(json.dumps(row), flush=True)
                    rows.append(row)
        for staleness in given.staleness:
            print(described(staleness, rows=[row for row in rows if row["staleness"] == staleness]))
        if given.json:
            append_rows(given.json, rows)


def trained(folder: Path, *words: str) -> str:
    """The output of a run. Raises RuntimeError if it fails."""
    command = [sys.executable, str(ROOT / "run.py"), *RUN, f"hydra.run.dir={folder}", *words]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-3000:])
    return done.stdout


def measured(folder: Path, *words: str, staleness: int, urls: Sequence[str]) -> dict[str, float]:
    """One run and the servers during its steps: values of `described`."""
    before = sum(map(computed, urls))
    text = trained(folder, *words)
    busy = sum(map(computed, urls)) - before
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    [(waited, whole)] = [map(float, one) for one in re.findall(r"waited ([\d.]+) s of ([\d.]+) s for answers", text)]
    sent = [float(size) for size in re.findall(r"failed, ([\d.]+) MiB of weights", text)]
    parameters = sum(
        math.prod(shape) * 4
        for shape in json.loads(urllib.request.urlopen(f"{urls[0]}/v1/weights").read())["parameters"].values()
    )
    versions = len(rows) + 1 - staleness  # the first, those after each step, and none for rollouts after the last one

    def mean(name: str) -> float:
        return sum(row[name] for row in rows) / len(rows)

    return {
        "reward_before": summary["reward_before"],
        "reward_after": summary["reward_after"],
        "seconds_per_step": whole / len(rows),
        "trainer": 1 - waited / whole,
        "servers": busy / len(urls) / whole,
        "age": mean("rollout_staleness"),
        "k3": mean("rollout_k3"),
        "outside": mean("rollout_outside"),
        "bytes_per_version": sum(sent) * 2**20 / len(sent) / versions,
        "parameter_bytes": parameters,
    }


def computed(url: str) -> float:
    """Seconds that a server's engine has computed."""
    text = urllib.request.urlopen(f"{url}/metrics").read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if re.match(r"ztk_seconds_total\b", line))


def described(staleness: int, *, rows: Sequence[dict[str, float]]) -> str:
    """A line of a table."""
    rewards = [row["reward_after"] for row in rows]
    mean, n = sum(rewards) / len(rewards), len(rewards)
    spread = math.sqrt(sum((one - mean) ** 2 for one in rewards) / (n - 1)) if n > 1 else math.nan
    half = T_95.get(n, 1.96) * spread / math.sqrt(n)
    means = {name: sum(row[name] for row in rows) / n for name in rows[0]}
    return (
        f"| {staleness} | {mean:.3f} ± {half:.3f} | {means['seconds_per_step']:.2f} | {means['trainer']:.2f} | {means['servers']:.2f} "
        f"| {means['age']:.2f} | {means['k3']:.1e} | {means['outside']:.3f} | {means['bytes_per_version'] / means['parameter_bytes']:.3f} |"
    )


@contextmanager
def serving(model: Path, *, folder: Path, count: int) -> Iterator[list[str]]:
    """Addresses of servers of the model's shape."""
    processes, urls = [], []
    try:
        for number in range(count):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            words = (
                f"inference.model={model}",
                f"serve.port={port}",
                f"serve.weights_path={folder}",
                "launch.threads=1",
            )
            command = [
                sys.executable,
                str(ROOT / "run.py"),
                "task=serve",
                *words,
                f"hydra.run.dir={folder}/server{number}",
            ]
            out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            processes.append(subprocess.Popen(command, env=ENVIRONMENT, **out))
            urls.append(f"http://127.0.0.1:{port}")
        for process in processes:
            while not re.search(r"answers on http", line := process.stdout.readline()):
                if not line and process.poll() is not None:
                    raise RuntimeError("a server did not start")
            threading.Thread(target=process.stdout.read, daemon=True).start()
        yield urls
    finally:
        for process in processes:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.0f} s")
