"""python -m ztk.calibrate [--ranks N] [--device cpu|cuda] [--folder FOLDER] [--to FILE]: measures this machine in two minutes.

Writes the file that `hardware=here` of task=plan and `ztk.Hardware.here()` read. The machine should be idle meanwhile.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from ztk.core.launch import RankError, run_ranks
from ztk.core.policies.hardware import measured_path, write_measured
from ztk.core.policies.machine import Machine

RANKS_WITHOUT_GPU = 2  # the same as the default of a run


def main(arguments: list[str] | None = None) -> int:
    """Runs the command. Returns the exit code: 1 if the machine cannot be measured, 2 if the arguments do not fit it."""
    parser = argparse.ArgumentParser(prog="python -m ztk.calibrate", description=__doc__.partition(":")[2].strip())
    parser.add_argument(
        "--ranks", type=int, help="ranks that measure at the same time (default: one per GPU; 2 on a CPU)"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="default: cuda if there is a GPU")
    parser.add_argument(
        "--folder", default=".", help="a folder on the disk of offload.nvme_path (default: the current folder)"
    )
    parser.add_argument("--to", help="output file (default: ztk/hardware.json below $XDG_CACHE_HOME or ~/.cache)")
    given = parser.parse_args(arguments)
    machine = Machine.here()
    device = given.device or ("cuda" if machine.gpus else "cpu")
    ranks = given.ranks if given.ranks is not None else machine.gpus if device == "cuda" else RANKS_WITHOUT_GPU
    if ranks < 1 or (device == "cuda" and ranks > machine.gpus):
        allowed = f"1 to {machine.gpus}" if device == "cuda" and machine.gpus else "1 or more, with --device cpu"
        print(f"--ranks {ranks}: must be {allowed}", file=sys.stderr)
        return 2
    return calibrate(ranks=ranks, device=device, folder=given.folder, to=given.to, cores=machine.cores)


def calibrate(*, ranks: int, device: str, folder: str, to: str | None, cores: int) -> int:
    """Measures, prints the result and writes it to a file. Returns the exit code."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ztk-calibrate-") as place:
        draft = Path(place, "hardware.json")
        command = [sys.executable, "-m", "ztk.calibrate.rank", device, str(Path(folder).absolute()), str(draft)]
        try:
            run_ranks(command, ranks=ranks, threads=max(1, cores // ranks), output_dir=place)
        except RankError as error:
            print(f"ztk: {str(error).replace('offload.nvme_path', '--folder')}", file=sys.stderr)
            return 1
        content = json.loads(draft.read_text(encoding="utf-8"))
    path = write_measured(content, file=None if to is None else measured_path(to))
    for name, value in content["hardware"].items():
        print(f"{name:<22}{_written(value):<24}{content['sources'].get(name, '')}")
    print(f"{path}: written in {time.perf_counter() - started:.0f} s")
    return 0


def _written(value: str | float | dict) -> str:
    if isinstance(value, dict):
        return f"of {len(value)} kinds of work"
    return value if isinstance(value, str) else f"{value:.6g}"


if __name__ == "__main__":
    sys.exit(main())
