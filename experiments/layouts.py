"""`task=plan plan.search=true`: ranks the layouts of a run.

`search.json` and `search.csv` in the run folder have the numbers of the table.
"""

import csv
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ztk.config import Config, ConfigError, compose
from ztk.core.policies.compact import master_of
from ztk.core.policies.hardware import FLOAT8
from ztk.core.policies.model import ModelInit
from ztk.core.policies.plan import rank_counts
from ztk.core.policies.runs import is_hugging_face
from ztk.experiments import policies
from ztk.experiments.pretrain import build_model
from ztk.hf.counts import ModelCounts, count_model
from ztk.optim import flat_optimizer
from ztk.planner import Plan, Price, Search, Workload, search
from ztk.report.folder import write_json

TRACED = 8
_ONLY_PIPELINES = ("schedule", "virtual_stages", "partition", "max_local_gradients", "dynamic_shapes")
_REPLACED = (
    "zero",
    "offload",
    "offload.optimizer_fraction",
    "recompute",
    "topology",
    "train.accumulation_steps",
    "train.global_batch_size",
)


def find_layouts(
    config: Config,
    *,
    given: Mapping[str, str],
    make_plan: Callable[[Config], Plan],
    folders: Sequence[str | os.PathLike] = (),
) -> Search:
    """Ranks the layouts of the run `config` with the command line `given`, prints them and writes them into its folder.

    The search replaces the options of zero, offload, recompute and topology, and the degrees, for each number of ranks in `plan.ranks`.
    Other keys of the command line are kept. folders: given by `--config-dir`.
    """
    counts = [config.launch.ranks] if config.plan.ranks is None else rank_counts(config.plan.ranks)
    work = workload(config)
    searches = [
        _search(config, given=given, make_plan=make_plan, folders=folders, work=replace(work, ranks=count))
        for count in counts
    ]
    found = replace(
        functools.reduce(Search.together, searches),
        price=Price(tokens=config.plan.tokens, budget_hours=config.plan.budget_hours),
    )
    print("\n".join(found.lines()))
    rows = found.rows()
    folder = Path(config.output_dir)
    write_json(folder / "search.json", values={"layouts": found.layouts, "dropped": found.dropped, "found": rows})
    with open(folder / "search.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]) if rows else ["rank"])
        writer.writeheader()
        writer.writerows(rows)
    return found


def _search(
    config: Config,
    *,
    given: Mapping[str, str],
    make_plan: Callable[[Config], Plan],
    folders: Sequence[str | os.PathLike],
    work: Workload,
) -> Search:
    """Searches the layouts for `work.ranks`."""
    given = {**given, "launch.ranks": str(work.ranks)}

    def replan(overrides: tuple[str, ...]) -> Plan | str:
        words = searched(config, given=given, overrides=overrides)
        try:
            return make_plan(compose(*words, output_dir=config.output_dir, folders=folders))
        except ConfigError as error:
            return error.faults[0]
        except ValueError as error:  # the trace found a module that cannot be cut
            return str(error)

    count = TRACED if config.plan.traced is None else config.plan.traced
    return search(replan, work=work, traced=count)


def searched(config: Config, *, given: Mapping[str, str], overrides: tuple[str, ...]) -> list[str]:
    """Returns the command line of a layout: `given` with `overrides` in place of its own layout, and the same global batch."""
    chosen = dict(override.split("=", maxsplit=1) for override in overrides)
    degrees = {f"topology.{name}" for name in ("data", "pipeline", "tensor", "sequence", "context", "expert")}
    kept = {key: value for key, value in given.items() if key not in degrees and key not in _REPLACED}
    if "topology.pipeline" not in chosen:
        kept = {key: value for key, value in kept.items() if key.removeprefix("topology.") not in _ONLY_PIPELINES}
    if "topology.tensor" not in chosen:
        kept = {key: value for key, value in kept.items() if key not in ("topology.sequence_parallel", "topology.plan")}
    kept = {key: value for key, value in kept.items() if not key.startswith("plan.")}
    values = kept | {"train.global_batch_size": str(config.train.global_batch_size)} | chosen
    return [f"{key}={value}" for key, value in values.items()]


def workload(config: Config) -> Workload:
    """Returns the inputs of the arithmetic model."""
    model, counts = config.model, _counted(config)
    hardware = policies.hardware(config)
    assert hardware is not None, "ztk.config refuses a search without hardware"
    precision, optimizer = policies.precision_policy(config), policies.optimizer_policy(config)
    states = flat_optimizer(optimizer, master=master_of(optimizer.states, master=precision.master)).format
    itemsize, trained = precision.dtype.itemsize, counts.trained / counts.parameters
    reduced = torch.float32 if precision.reduce_dtype is None else precision.reduce_dtype  # of several micro-batches
    dtype = str(precision.dtype).removeprefix("torch.")
    assert config.train.global_batch_size is not None and config.launch.ranks is not None, "settled"
    return Workload(
        ranks=config.launch.ranks,
        hardware=hardware,
        parameters=counts.parameters,
        expert_parameters=counts.expert_parameters,
        expert_choices=counts.expert_choices,
        experts=model.experts or 0,
        layers=model.layers,
        dim=model.dim,
        heads=model.heads,
        kv_heads=model.kv_heads,
        vocabulary=model.vocab_size,
        flops=counts.flops,
        seq_len=config.data.seq_len,
        micro_batch=config.train.micro_batch_size,
        global_batch=config.train.global_batch_size,
        parameter_bytes=itemsize,
        gradient_bytes=precision.gradient_dtype.itemsize * trained,
        accumulated_bytes=reduced.itemsize * trained,
        optimizer_bytes=states.bytes_per_element(has_master=precision.dtype is not states.master) * trained,
        dtype=dtype,
        linear_dtype=dtype if precision.float8 is None else FLOAT8,
    )


def _counted(config: Config) -> ModelCounts:
    """Counts ztk's own decoder by its formulas, and a transformers model by its modules."""
    if is_hugging_face(config.model):
        plain = replace(config.model, init=ModelInit.random, kernels=False)
        model, _ = build_model(replace(config, model=plain))
        return count_model(model, seq_len=config.data.seq_len, experts=config.model.experts or 0)
    model = policies.decoder_config(config)
    sparse = sum(model.has_experts(block) for block in range(model.layers))
    return ModelCounts(
        parameters=model.parameter_count(),
        trained=model.parameter_count(),
        expert_parameters=sparse * model.experts * 3 * model.dim * model.expert_hidden_dim,
        expert_choices=sparse * model.experts_per_token,
        flops=model.flops_per_token(config.data.seq_len),
    )
