"""One rank of `python -m ztk.calibrate`, started as `python -m ztk.calibrate.rank DEVICE FOLDER DRAFT`. Rank 0 writes the file DRAFT."""

import datetime
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from ztk.calibrate.measure import METHODS, combine, measure
from ztk.core.launch import failure_of, write_failure
from ztk.core.runtime import Process


def main() -> None:
    """Measures. An error goes into a file, where the process that started the ranks finds it."""
    device, folder, draft = sys.argv[1:]
    rank = int(os.environ["RANK"])
    try:
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        process = Process.start(device=device, timeout_seconds=100.0)
        ranks = process.comm.gather_objects(measure(process, folder=folder))
        if rank == 0:
            Path(draft).write_text(json.dumps(describe(ranks, device=process.device)), encoding="utf-8")
        process.stop()
    except Exception as error:
        write_failure(failure_of(error, rank=rank), output_dir=Path(draft).parent)
        os._exit(1)  # no teardown: it could wait for a peer forever


def describe(ranks: list[dict[str, float]], *, device: torch.device) -> dict:
    """Returns the content of the hardware file."""
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    hardware = combine(ranks, source=f"measured on {date}")
    values = {key: value for key, value in asdict(hardware).items() if value is not None}
    return {
        "machine": {
            "node": platform.node(),
            "device": name,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        },
        "hardware": values,
        "sources": {key: f"measured on {date}: {how}" for key, how in METHODS.items()},
    }


if __name__ == "__main__":
    main()
