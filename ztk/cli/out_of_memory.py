"""python -m ztk.cli.out_of_memory FOLDER RANK: compares the planned memory of a run that ran out of memory with the rank's tensors.

`print_plan` starts this in a separate process, because the process that started the ranks does not import torch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from ztk.core.launch import memory_path, python_path

SECONDS = 300.0  # time limit of the plan


def print_plan(folder: str | os.PathLike, *, rank: int) -> None:
    """Prints the comparison if `rank` has recorded its tensors.

    Problems are reported in one line, because the run's own error matters more.
    """
    if not memory_path(folder, rank=rank).is_file():
        return
    command = [sys.executable, "-m", "ztk.cli.out_of_memory", os.fspath(folder), str(rank)]
    environment = os.environ | {"PYTHONPATH": python_path()}
    sys.stdout.flush()
    try:
        done = subprocess.run(command, env=environment, timeout=SECONDS, check=False, capture_output=True, text=True)
        text = done.stdout if done.returncode == 0 else f"no plan to compare with: {_last(done.stderr)}\n"
    except (OSError, subprocess.SubprocessError) as error:
        text = f"no plan to compare with: {error}\n"
    print("".join(f"ztk: {line}\n" for line in text.splitlines()), end="", file=sys.stderr, flush=True)


def _last(text: str) -> str:
    return (text.strip().splitlines() or ["no reason given"])[-1]


def main() -> None:
    """Prints the table and writes it into the folder."""
    from ztk.config import from_yaml
    from ztk.worker import import_task

    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    measured = json.loads(memory_path(folder, rank=rank).read_text(encoding="utf-8"))
    program = import_task("ztk.experiments.out_of_memory")
    config = from_yaml((folder / "config.yaml").read_text(encoding="utf-8"))
    text = "\n".join(program.lines(config, rank=rank, measured=measured))
    (folder / "out_of_memory.txt").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
