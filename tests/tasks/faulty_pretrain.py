"""The real pretraining program with one fault planted in one rank.

`FAULT` in the environment: {"rank": 1, "where": "forward", "count": 20, "how": "kill"}; `count` is which call of that place fails.
"""

import json
import os
import signal
import time
from pathlib import Path

from ztk.core.runtime import Process
from ztk.experiments import pretrain
from ztk.nn import Decoder
from ztk.optim import FlatOptimizer


def main(config) -> None:
    fault = json.loads(os.environ["FAULT"])
    struck = Path(config.output_dir, "struck").exists()  # a run that is started again is struck once
    if int(os.environ["RANK"]) == fault["rank"] and not struck:
        plant(fault, folder=Path(config.output_dir))
    Path(config.output_dir, f"pid{os.environ['RANK']}").write_text(str(os.getpid()))
    pretrain.main(config)


def plant(fault: dict, *, folder: Path) -> None:
    left = {"calls": fault["count"]}

    def strike() -> bool:
        left["calls"] -= 1
        if left["calls"]:
            return False
        Path(folder, "struck").write_text(str(time.time()))
        if fault["how"] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault["how"] == "raise":
            raise ArithmeticError("planted")
        return True

    match fault["where"]:
        case "forward":
            forward = Decoder.forward

            def faulty(self, tokens, targets=None):
                out = forward(self, tokens, targets)
                return out * float("nan") if strike() else out

            Decoder.forward = faulty
        case "backward":
            start = Process.start

            def started(**options):
                process = start(**options)
                process.comm.before = lambda label: strike() if "reduce_scatter" in label else None
                return process

            Process.start = staticmethod(started)
        case "optimizer":
            step = FlatOptimizer.step
            FlatOptimizer.step = lambda self, *args, **options: (strike(), step(self, *args, **options))
        case "checkpoint":
            fsync = os.fsync
            os.fsync = lambda descriptor: (strike(), fsync(descriptor))
