"""Operations of a run's steps and peak rates of its devices, from which plans and runs compute MFU and HFU."""

import warnings
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from ztk.config import Config, is_own
from ztk.core.policies.hardware import read_measured
from ztk.core.policies.model import ModelInit
from ztk.core.policies.peaks import peak_rate
from ztk.core.policies.runs import is_hugging_face
from ztk.core.policies.utilization import AGAIN, Work
from ztk.core.runtime import Process
from ztk.data import Batch, Share
from ztk.experiments import policies
from ztk.experiments.streams import model_call
from ztk.experiments.user_objects import own_data
from ztk.parallel.recompute import RecomputeMode

Build = Callable[[Config], nn.Module]  # builds the model of a run, on the meta device unless it has its own values


def step_work(config: Config, *, process: Process, build: Build) -> Work | None:
    """Returns the work of a step on rank 0, which reports it.

    None on other ranks, and if the device's peak or the operations are unknown.
    """
    if process.rank != 0 or is_own(config, section="data"):
        return None
    rate, source = _peak(config, process=process)
    if rate is None:
        return None
    model, hardware = step_flops(config, build=build)
    if not model:
        return None
    return Work(model_flops=model, hardware_flops=hardware, devices=process.world_size, rate=rate, source=source)


def step_flops(config: Config, *, build: Build) -> tuple[int, int | None]:
    """Returns the operations of a step over all devices for MFU and for HFU; 0 and None for a model that cannot be traced.

    Formulas cover ztk's decoder and transformers models. User models and recomputed blocks are traced.
    """
    if is_own(config, section="model"):
        return _traced(config, build=build)
    model = model_flops(config, build=build)
    if policies.recompute_policy(config).mode is not RecomputeMode.none:
        return model, _traced(config, build=build)[1]
    attention = 12 * config.model.layers * config.model.dim * config.data.seq_len * tokens_of_step(config)
    return model, model + round(AGAIN * attention)


def model_flops(config: Config, *, build: Build) -> int:
    """Returns the model's operations in a step over all devices for MFU; 0 if they cannot be counted."""
    if is_own(config, section="model"):
        return _traced(config, build=build)[0]
    if not config.data.seq_len:
        return 0
    if is_hugging_face(config.model):
        from ztk.hf.counts import count_model  # imported late: imports transformers

        model = without_values(config, build=build)
        per_token = count_model(model, seq_len=config.data.seq_len, experts=config.model.experts or 0).flops
    else:
        per_token = policies.decoder_config(config).flops_per_token(config.data.seq_len)
    return per_token * tokens_of_step(config)


def tokens_of_step(config: Config) -> int:
    """Returns the tokens of a step over all devices; 0 with data of the user's that has no `data.seq_len`."""
    assert config.train.global_batch_size is not None, "settled"
    return config.train.global_batch_size * config.data.seq_len


def _traced(config: Config, *, build: Build) -> tuple[int, int | None]:
    """See `step_flops`. The trace does not change torch's generators, which the constructor of a user's model may use."""
    from ztk.planner import count_operations  # imported late: most runs count by formulas

    try:
        with torch.random.fork_rng():
            found = count_operations(
                lambda: without_values(config, build=build),
                batch=planned_batch(config, build=build),
                recompute=policies.recompute_policy(config),
            )
    except Exception as error:  # noqa: BLE001 - the user's code runs on tensors without values, and trains without this count
        missing = "MFU and HFU" if is_own(config, section="model") else "HFU"
        warnings.warn(
            f"the run reports no {missing}: counting failed with {type(error).__name__}: {error}", stacklevel=2
        )
        return 0, None
    batch, traced = config.train.global_batch_size, config.train.micro_batch_size
    assert batch is not None, "settled"
    return found.model * batch // traced, found.hardware * batch // traced


def _peak(config: Config, *, process: Process) -> tuple[float | None, str]:
    """Returns the operations per second of one device in the compute dtype, and the source of the number.

    The source is `hardware`, else the data sheet of the GPU. On a CPU, which ranks share, it is the measurement of `python -m
    ztk.calibrate`.
    """
    given, dtype = config.hardware, str(policies.precision_policy(config).dtype).removeprefix("torch.")
    key = {"bfloat16": "bf16_rate", "float16": "fp16_rate"}.get(dtype, "fp32_rate")
    if process.device.type == "cuda":
        if (rate := getattr(given, key)) is not None:
            return rate, f"hardware={given.name}" if given.name else f"hardware.{key}"
        name = torch.cuda.get_device_name(process.device)
        return peak_rate(name, dtype=dtype), f"data sheet, {name}"
    try:
        measured = read_measured(given.file)
    except ValueError:
        return None, ""
    of_machine = measured[key] * measured["ranks_per_node"]
    return of_machine / process.local_world_size, f"this CPU, {measured.get('source', 'measured')}"


def planned_batch(config: Config, *, build: Build) -> tuple:
    """Returns the model's arguments for one micro-batch."""
    takes_batches = False
    if is_own(config, section="model"):
        with torch.device("meta"):
            takes_batches = bool(getattr(without_values(config, build=build), "takes_batches", False))
    if is_own(config, section="data"):
        share = Share(micro_batch=config.train.micro_batch_size)
        batch = own_data(config, share=share)[0].next_batch()
    else:
        tokens = torch.empty(config.train.micro_batch_size, config.data.seq_len, dtype=torch.int64)
        batch = Batch(tokens=tokens, targets=tokens)
    return model_call(batch, takes_batches=takes_batches, device=torch.device("cpu")).args


def without_values(config: Config, *, build: Build) -> nn.Module:
    """Returns the run's model on the meta device. A transformers model is built without reading its folder's weights."""
    if config.model.path is None:
        return build(config)
    with torch.device("cpu"):  # `model.kernels` compares its replacements on samples, which need the values of buffers
        model = build(replace(config, model=replace(config.model, init=ModelInit.random)))
    for module in model.modules():
        module._buffers.update({name: b if b is None else b.to("meta") for name, b in module._buffers.items()})
    return model
