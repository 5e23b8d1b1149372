"""What a run would need and move: the program of `python run.py task=plan`, on one process, whatever `launch.ranks` says.

`plan.json` in the run folder has the numbers of the table.
"""

import time

import torch

from experiments import policies
from experiments.pretrain import build_model
from ztk import kernels
from ztk.config import Config
from ztk.planner import Plan, plan
from ztk.report import RunFolder
from ztk.report.folder import write_json


def main(config: Config) -> None:
    """Plans the pretraining run of `config`, prints the table and writes it. Raises ValueError for a model that cannot be planned."""
    kernels.set_backend(config.kernels.backend)
    started = time.perf_counter()
    made = make_plan(config)
    folder = RunFolder(config.output_dir)
    values = made.as_dict() | {"plan_seconds": time.perf_counter() - started}
    write_json(folder.path / "plan.json", values=values)
    shared = ("world_size", "parameters", *(f"peak_memory.{tier}_bytes" for tier in ("device", "host", "nvme")))
    folder.write_summary({"status": "done", "error": None, "steps": 0} | {key: values[key] for key in shared})
    print(made)


def make_plan(config: Config) -> Plan:
    """The plan of the run that `config` describes. Raises ValueError as `ztk.plan` does."""
    shape = (config.train.micro_batch_size, config.data.seq_len)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    return plan(
        lambda: build_model(config)[0],
        batch=(tokens, tokens),
        world_size=config.launch.ranks,
        topology=policies.topology(config),
        optimizer=policies.optimizer_policy(config),
        precision=policies.precision_policy(config),
        zero=policies.zero_policy(config),
        offload=policies.offload_policy(config),
        tensor=policies.tensor_policy(config),
        recompute=policies.recompute_policy(config),
        accumulation_steps=config.train.accumulation_steps,
    )
