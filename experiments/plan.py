"""Estimates the memory and the traffic of a run: the program of `python run.py task=plan`, on one process for any `launch.ranks`.

`plan.json` in the run folder has the numbers of the table.
"""

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

from ztk import kernels
from ztk.config import Config, compose, folders_of_run, hardware_values
from ztk.core.policies.hardware import Hardware
from ztk.experiments import policies
from ztk.experiments.layouts import find_layouts
from ztk.experiments.pretrain import build_model
from ztk.experiments.work import model_flops, planned_batch, tokens_of_step, without_values
from ztk.planner import Fix, Plan, Price, RolloutPlan, RolloutWork, fixes, plan, plan_rollout
from ztk.planner.result import size as written
from ztk.report import RunFolder
from ztk.report.folder import write_json

SHOWN = 5  # number of fixes
PLANNED_TASKS = ("pretrain", "plan")


def main(config: Config) -> None:
    """Plans the pretraining run of `config`, prints the table and writes it. Raises ValueError for a model that cannot be planned."""
    kernels.set_backend(config.kernels.backend)
    started = time.perf_counter()
    made = make_plan(config)
    print(made)
    price = Price(tokens=config.plan.tokens, budget_hours=config.plan.budget_hours)
    for line in price.lines(made):
        print(line)
    rollout = rollout_of(config, made=made)
    for line in () if rollout is None else rollout.lines():
        print(line)
    if config.plan.search:
        find_layouts(config, given=given_overrides(config), make_plan=make_plan, folders=folders_of_run())
    is_lacking = made.fits is False and not config.plan.search
    found = find_fixes(config) if is_lacking else []
    own = {} if rollout is None else rollout.row()
    values = made.as_dict() | price.row(made) | own | {"plan_seconds": time.perf_counter() - started}
    if is_lacking:
        print_fixes(found)
        values["fixes"] = [" ".join(fix.overrides) for fix in found]
    folder = RunFolder(config.output_dir)
    write_json(folder.path / "plan.json", values=values)
    shared = ("world_size", "parameters", *(f"peak_memory.{tier}_bytes" for tier in ("device", "host", "nvme")))
    folder.write_summary({"status": "done", "error": None, "steps": 0} | {key: values[key] for key in shared})


def try_plan(config: Config, *, hardware: Hardware | None = None) -> Plan | str:
    """Plans any run like `make_plan`. Returns the reason if it cannot be planned."""
    if config.task.name not in PLANNED_TASKS:
        return f"task={config.task.name} is not planned"
    if config.zero.engine.value != "ztk":
        return "only ztk's own engine is planned"
    kernels.set_backend(config.kernels.backend)
    try:
        return make_plan(config, hardware=hardware)
    except ValueError as error:
        return str(error)


def make_plan(config: Config, *, hardware: Hardware | None = None) -> Plan:
    """Plans the run of `config`. hardware: defaults to the configuration's. Raises ValueError as `ztk.plan`."""
    made = plan(
        lambda: without_values(config, build=_model),
        batch=planned_batch(config, build=_model),
        world_size=config.launch.ranks,
        topology=policies.topology(config),
        optimizer=policies.planned_policy(config),
        precision=policies.precision_policy(config),
        zero=policies.zero_policy(config),
        offload=policies.offload_policy(config),
        tensor=policies.tensor_policy(config),
        recompute=policies.recompute_policy(config),
        pipeline=policies.pipeline_policy(config),
        ema=policies.ema_policy(config),
        accumulation_steps=config.train.accumulation_steps,
        hardware=hardware or policies.hardware(config),
        peer=policies.peer(config),
    )
    dtype = str(policies.precision_policy(config).dtype).removeprefix("torch.")
    return replace(made, tokens=tokens_of_step(config), model_flops=model_flops(config, build=_model), dtype=dtype)


def rollout_of(config: Config, *, made: Plan) -> RolloutPlan | None:
    """Returns the plan of the rollouts that `plan.answers` asks for, or None. Raises ValueError for `plan.server_hardware` that is none."""
    given, model, trainer = config.plan, config.model, made.hardware
    if given.answers is None or trainer is None:
        return None
    prompt_tokens = given.prompt_tokens or 0.0
    answer_tokens = config.data.seq_len - prompt_tokens if given.answer_tokens is None else given.answer_tokens
    if answer_tokens <= 0:
        raise ValueError(
            f"plan.prompt_tokens={prompt_tokens:g}: leaves no room for answers in data.seq_len={config.data.seq_len}"
        )
    weight_bytes = policies.precision_policy(config).dtype.itemsize
    own = trainer if given.server_hardware is None else Hardware(**hardware_values(given.server_hardware))
    return plan_rollout(
        made,
        work=RolloutWork(
            answers=given.answers,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            scoring_models=2.0 if given.scoring_models is None else given.scoring_models,
            cache_bytes=2 * model.layers * (model.kv_heads or model.heads) * (model.dim // model.heads) * weight_bytes,
            sequences=given.server_sequences or 64,
        ),
        servers=given.servers or 1,
        devices=given.server_devices or 1,
        hardware=own,
        weight_bytes=weight_bytes,
    )


def _model(config: Config) -> nn.Module:
    return build_model(config)[0]


def find_fixes(config: Config) -> list[Fix]:
    """Finds the smallest sets of overrides with which this run fits, by planning each."""
    given = given_overrides(config)
    print("  looking for the smallest change that fits, by planning each")

    def replan(overrides: tuple[str, ...]) -> Plan | None:
        values = given | dict(override.split("=", maxsplit=1) for override in overrides)
        words = [f"{key}={value}" for key, value in values.items()]
        try:
            return make_plan(compose(*words, output_dir=config.output_dir, folders=folders_of_run()))
        except ValueError:  # refused, or the model cannot be cut that way
            return None

    return fixes(replan, levers=list(levers(config, given=given)))


def given_overrides(config: Config) -> dict[str, str]:
    """Returns the command line of the run, without Hydra's own words."""
    recorded = json.loads(Path(config.output_dir, "overrides.json").read_text(encoding="utf-8"))
    return {key: value for key, value in recorded.items() if not key.startswith("hydra.")}


def levers(config: Config, *, given: Mapping[str, str]) -> Iterator[list[tuple[str, ...]]]:
    """Yields the changes that may make the run fit. In each list, the change that saves the most memory is last."""
    if config.zero.stage < 3:
        yield [(f"zero=stage{stage}",) for stage in range(config.zero.stage + 1, 4)]
    if config.recompute.mode == "none":
        yield [("recompute=selective",), ("recompute=full",)]
    if config.offload.optimizer == "none":
        yield [("offload=cpu", "offload.optimizer_fraction=0.5"), ("offload=cpu",)]
    elif config.offload.optimizer == "cpu":  # main memory may be too small
        yield [("offload=nvme",)]
    if smaller := list(_smaller_batches(config, given=given)):
        yield smaller


def _smaller_batches(config: Config, *, given: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """Yields smaller and more micro-batches with the same global batch."""
    size, forwards = config.train.micro_batch_size, config.train.accumulation_steps
    part = 2
    while size % part == 0:
        micro = f"train.micro_batch_size={size // part}"
        yield (micro,) if "train.global_batch_size" in given else (micro, f"train.accumulation_steps={forwards * part}")
        part *= 2


def print_fixes(found: list[Fix]) -> None:
    """Prints the fixes, fastest first."""
    if not found:
        print(
            "  no three of zero, recompute, offload and a smaller micro-batch make it fit: use more ranks or a smaller model"
        )
        return
    print("  it fits with one of these, the cheapest step first:")
    for fix in found[:SHOWN]:
        assert fix.plan.margin_bytes is not None
        left = f"{written(fix.plan.margin_bytes)} left"
        print(f"    {' '.join(fix.overrides):<60} {fix.plan.step_words} a step, {left}")
