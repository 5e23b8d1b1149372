"""A program without a model: prints its rank, and fails on demand. A step takes 50 ms."""

import json
import os
import signal
import time
from pathlib import Path


def main(config) -> None:
    rank = int(os.environ["RANK"])
    out = Path(config.output_dir)
    print(f"rank {rank} of {os.environ['WORLD_SIZE']} with {os.environ['OMP_NUM_THREADS']} threads", flush=True)
    Path(out, f"pid{rank}").write_text(str(os.getpid()))
    plan = json.loads(os.environ.get("FAKE_TASK", "{}"))
    for file, text in plan.get("writes", {}).items():
        Path(file).write_text(text)
    for step in range(config.train.steps):
        if (
            plan.get("rank") == rank
            and plan.get("step") == step
            and plan.get("stage", config.zero.stage) == config.zero.stage
        ):
            fail(plan["how"])
        if plan.get("peer") == rank and step > plan["step"] + 1:
            raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
        time.sleep(0.05)
    if rank == 0:
        summary = {"status": "done", "error": None, "steps": config.train.steps, "final_loss": 1.5 + config.zero.stage}
        Path(out, "summary.json").write_text(json.dumps(summary))


def fail(how: str) -> None:
    if how == "raise":
        raise ValueError("boom")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(7)
    if how == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
