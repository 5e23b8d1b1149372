"""What a run's steps compute, and what its devices could: the numbers behind MFU and HFU, of plans and of runs."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from experiments import policies
from experiments.streams import model_call
from experiments.user_objects import own_data
from ztk.config import Config, is_own
from ztk.core.policies.hardware import read_measured
from ztk.core.policies.model import ModelInit
from ztk.core.policies.peaks import peak_rate
from ztk.core.policies.runs import is_hugging_face
from ztk.core.policies.utilization import AGAIN, Work
from ztk.core.runtime import Process
from ztk.data import Batch, Share
from ztk.parallel.recompute import RecomputeMode

Build = Callable[[Config], nn.Module]  # the model of a run, on the meta device where it has no values of its own


def step_work(config: Config, *, process: Process, build: Build) -> Work | None:
    """On rank 0, which reports. None: the peak of the device is not known, or the model's operations are not."""
    if process.rank != 0 or is_own(config, section="data"):
        return None
    dtype = str(policies.precision_policy(config).dtype).removeprefix("torch.")
    rate, source = _peak(config, process=process, dtype=dtype)
    model = model_flops(config, build=build) if rate else 0
    if rate is None or not model:
        return None
    return Work(
        model_flops=model,
        hardware_flops=_hardware_flops(config, build=build, model=model),
        devices=process.world_size,
        rate=rate,
        source=source,
    )


def model_flops(config: Config, *, build: Build) -> int:
    """Operations of the model in a step, over all devices, as MFU counts them; 0: they cannot be counted.

    Of ztk's decoder and of models of transformers by their formulas, of an own model by tracing it.
    """
    if is_own(config, section="model"):
        return _traced(config, build=build)[0]
    if is_hugging_face(config.model):
        from ztk.hf.counts import count_model  # here: imports transformers

        model = without_values(config, build=build)
        per_token = count_model(model, seq_len=config.data.seq_len, experts=config.model.experts or 0).flops
    else:
        per_token = policies.decoder_config(config).flops_per_token(config.data.seq_len)
    return 0 if is_own(config, section="data") else per_token * tokens_of_step(config)


def tokens_of_step(config: Config) -> int:
    """Over all devices; 0 of own data, whose items have no known number of tokens."""
    assert config.train.global_batch_size is not None, "settled"
    return 0 if is_own(config, section="data") else config.train.global_batch_size * config.data.seq_len


def _hardware_flops(config: Config, *, build: Build, model: int) -> int | None:
    """As HFU counts them. Traced where activations are recomputed, and for own models."""
    if is_own(config, section="model") or policies.recompute_policy(config).mode is not RecomputeMode.none:
        return _traced(config, build=build)[1] or None
    attention = 12 * config.model.layers * config.model.dim * config.data.seq_len * tokens_of_step(config)
    return model + round(AGAIN * attention)


def _traced(config: Config, *, build: Build) -> tuple[int, int]:
    """Operations of the model and of the devices in a step; zeros for a model that cannot be traced, as one that reads values of its tensors.
    The constructor of an own model draws from torch's generators, which the run goes on with."""
    from ztk.planner import count_operations  # here: most runs count by formulas

    try:
        with torch.random.fork_rng():
            found = count_operations(
                lambda: without_values(config, build=build),
                batch=planned_batch(config),
                recompute=policies.recompute_policy(config),
            )
    except Exception:  # noqa: BLE001 - of an own model; nobody needs its operations to train it
        return 0, 0
    assert config.train.global_batch_size is not None, "settled"
    forwards = config.train.global_batch_size // config.train.micro_batch_size
    return found.model * forwards, found.hardware * forwards


def _peak(config: Config, *, process: Process, dtype: str) -> tuple[float | None, str]:
    """Operations per second of one device, and where the number is from: `hardware`, else the data sheet of the GPU, else what
    `python -m ztk.calibrate` measured of this CPU, whose ranks share it."""
    given = config.hardware
    if process.device.type == "cuda":
        asked = {"bfloat16": given.bf16_rate, "float16": given.fp16_rate, "float32": given.fp32_rate}[dtype]
        name = torch.cuda.get_device_name(process.device)
        return asked or peak_rate(name, dtype=dtype), f"hardware={given.name}" if asked else f"data sheet, {name}"
    try:
        measured = read_measured(given.file)
    except ValueError:
        return None, ""
    rates = {"bfloat16": "bf16_rate", "float16": "fp16_rate"}
    of_machine = measured[rates.get(dtype, "fp32_rate")] * measured["ranks_per_node"]
    return of_machine / process.local_world_size, f"this CPU, {measured.get('source', 'measured')}"


def planned_batch(config: Config) -> tuple:
    """The arguments of the model for one micro-batch."""
    if is_own(config, section="data"):
        share = Share(micro_batch=config.train.micro_batch_size)
        batch = own_data(config, share=share)[0].next_batch()
    else:
        tokens = torch.empty(config.train.micro_batch_size, config.data.seq_len, dtype=torch.int64)
        batch = Batch(tokens=tokens, targets=tokens)
    return model_call(batch, takes_batches=is_own(config, section="model"), device=torch.device("cpu")).args


def without_values(config: Config, *, build: Build) -> nn.Module:
    """The model of the run without values, also of its folder."""
    if config.model.path is None:
        return build(config)
    with torch.device("cpu"):  # what `model.kernels` replaces is tried on samples, with the values of buffers
        model = build(replace(config, model=replace(config.model, init=ModelInit.random)))
    for module in model.modules():
        module._buffers.update({name: b if b is None else b.to("meta") for name, b in module._buffers.items()})
    return model
