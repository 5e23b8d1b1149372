"""A script of your own in Ray Train's workers: ZeRO stage 3, a checkpoint every ten steps, and a restart after a worker was lost.

pip install "ray[train]"
python examples/cluster/ray_train.py /shared/run 8
"""

import argparse
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import ztk
from ztk.checkpoint import Saver, load_newest


def train(settings: dict[str, Any]) -> None:
    """Runs on every worker."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    engine = ztk.parallelize(
        model,
        process=ztk.Process.start(device=settings["device"]),
        optimizer=ztk.OptimizerPolicy(name="adamw", lr=1e-2),
        zero=ztk.ZeroPolicy(stage=3),
    )
    loaded = load_newest(engine, folder=settings["folder"])
    if loaded is not None and engine.process.rank == 0:
        print(f"continues after step {loaded.step}", flush=True)
    with Saver(engine, folder=settings["folder"]) as saver:
        while engine.global_steps < settings["steps"]:
            seed = 1000 * engine.global_steps + engine.process.rank
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)).to(engine.process.device)
            loss = (engine(inputs) - inputs.sum(1, keepdim=True)).square().mean()
            engine.backward(loss)
            engine.step()
            if engine.global_steps % 10 == 0:
                saver.save()
                ray.train.report({"step": engine.global_steps, "loss": float(loss)})  # waits for all workers
            if engine.global_steps == settings["steps"] and engine.process.rank == 0:
                print(f"done: loss {float(loss)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="shared by all machines")
    parser.add_argument("workers", type=int)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    folder = given.folder.absolute()
    trainer = TorchTrainer(
        train,
        train_loop_config={"folder": str(folder / "checkpoints"), "steps": given.steps, "device": given.device},
        scaling_config=ScalingConfig(num_workers=given.workers, use_gpu=given.device == "cuda"),
        run_config=RunConfig(
            name=folder.name, storage_path=str(folder.parent), failure_config=FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
