"""Converts ds_config.json to the command line of `run.py`, and back. `ztk.cli.convert` is the command."""

import dataclasses
from collections.abc import Mapping

from ztk.core.policies.key import written
from ztk.core.policies.optimizer import TORCH
from ztk.core.precision.policy import DTYPES
from ztk.deepspeed.config import Settings
from ztk.deepspeed.config.zero import STAGE3

_WORD_OF = {dtype: word for word, dtype in DTYPES.items()}
# Top-level keys that become words of run.py, or have no effect there.
_SAID = frozenset(
    (
        *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
        *("zero_optimization", "optimizer", "scheduler", "fp16", "bf16", "bfloat16", "communication_data_type"),
        *("data_types", "aio", "torch_autocast", "log_level", "timers"),
    )
)
_RECORD = "run.py writes every step to metrics.jsonl and to wandb (logger=online)"
_INSTEAD = {
    **dict.fromkeys(("tensorboard", "csv_monitor", "wandb"), _RECORD),
    "flops_profiler": "run.py does not count operations",
    "comms_logger": "run.py writes the bytes of every kind of collective for every step",
    "wall_clock_breakdown": "run.py writes the seconds of every phase for every step",
    "memory_breakdown": "run.py writes the bytes per tier for every step",
    "steps_per_print": "train.log_every is the interval of rows",
    "dump_state": "run.py writes config.yaml",
    "dataloader_drop_last": "run.py's batches are always full",
    "activation_checkpointing": "choose recompute=full or another for run.py's models",
    "tensor_parallel": "choose a topology, such as topology=tp2",
    "pipeline": "choose a topology, such as topology=pp2",
    **dict.fromkeys(("expert_parallel", "moe", "moe_expert_parallel_size"), "choose a topology, such as topology=ep2"),
    "checkpoint": "choose checkpoint=periodic",
}
_SHIFT = "DeepSpeed makes one update before the first step of this schedule; run.py starts with the first step"


# Keys of run.py -> their names in a ds_config, for schedules with DeepSpeed's defaults.
_RANGE_TEST = {
    "step_size": ("lr_range_test_step_size", 2000),
    "step_rate": ("lr_range_test_step_rate", 1.0),
    "staircase": ("lr_range_test_staircase", False),
}
_ONE_CYCLE = {
    "rise_steps": ("cycle_first_step_size", 2000),
    "fall_steps": ("cycle_second_step_size", None),
    "rise_stairs": ("cycle_first_stair_count", 0),
    "fall_stairs": ("cycle_second_stair_count", None),
}


@dataclasses.dataclass(kw_only=True)
class Overrides:
    """words: `key=value` of run.py. notes: settings of the configuration without a key in run.py."""

    words: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)

    def add(self, pairs: Mapping[str, object]) -> None:
        """Adds keys of run.py with their values."""
        self.words += [f"{key}={written(value)}" for key, value in pairs.items()]


def to_overrides(settings: Settings, *, ranks: int | None = None, keeps_global_batch: bool = False) -> Overrides:
    """Returns the run that `settings` describes, without model, data and length.

    keeps_global_batch: keeps a given train_batch_size on any number of ranks. Otherwise the number of micro-batches per step is kept.
    """
    out = Overrides(notes=[*settings.notes])
    if ranks is not None:
        out.add({"launch.ranks": ranks})
    out.add({"train.micro_batch_size": settings.batch.micro})
    if keeps_global_batch and "train_batch_size" in settings.given:
        out.add({"train.global_batch_size": settings.batch.train})
    else:
        out.add({"train.accumulation_steps": settings.batch.accumulation})
    _unsaid(settings, out=out)
    _zero(settings, out=out)
    _offload(settings, out=out)
    _precision(settings, out=out)
    _optimizer(settings, out=out)
    _schedule(settings, out=out)
    return out


def _unsaid(settings: Settings, *, out: Overrides) -> None:
    """Notes sections that run.py implements in another way, or not at all."""
    told = {note.partition(":")[0].partition(".")[0] for note in settings.notes}
    for key, value in settings.given.items():
        is_off = value in (None, False) or (isinstance(value, dict) and value.get("enabled") is False)
        if key not in _SAID and key not in told and not is_off:
            out.notes.append(f"{key}: {_INSTEAD.get(key, 'run.py has no key for it')}")
    if settings.autocast is not None:
        word = _WORD_OF[settings.autocast]
        out.notes.append(f"torch_autocast: run.py computes in one dtype; choose precision={word}")
    said = {
        "bf16.bf16_master_weights_and_grads: run.py rounds bf16 masters stochastically; choose precision.master": (
            settings.precision.bf16_master
        ),
        "bf16.bf16_optimizer_states: run.py rounds AdamW's second moment stochastically; choose optimizer.states=bf16": (
            settings.precision.bf16_states
        ),
        "managed_gradient_accumulation: run.py counts micro-batches by train.accumulation_steps": (
            not settings.managed_gradient_accumulation
        ),
        "optimizer.params.bias_correction: run.py always corrects the bias": (
            settings.optimizer is not None and not settings.optimizer.bias_correction
        ),
        "zero_optimization.leaf_module: run.py gathers its models by full layers": bool(settings.leaves.wanted),
    }
    out.notes += [note for note, holds in said.items() if holds]


def _zero(settings: Settings, *, out: Overrides) -> None:
    zero = settings.zero
    out.add({"zero": f"stage{zero.stage}", "zero.bucket_size": zero.bucket_size})
    if zero.quantized_gradients:
        out.add({"zero.quantized_gradients": True})
    if zero.stage < 3:
        return
    out.add({f"zero.{name}": getattr(zero, name) for name in STAGE3.values()})
    if zero.quantized_weights:
        out.add({"zero.quantized_weights": True})
    if zero.quantized_nontrainable_weights:
        out.notes.append(
            "zero_optimization.zero_quantized_nontrainable_weights: run.py gathers frozen parameters as they are; "
            "zero.quantized_weights=true gathers all as int8"
        )
    if zero.hpz_partition_size > 1:
        out.add({"zero.hpz_partition_size": zero.hpz_partition_size})


def _offload(settings: Settings, *, out: Overrides) -> None:
    offload = settings.offload
    group = "nvme" if offload.uses_nvme else "cpu" if "cpu" in (offload.optimizer, offload.parameters) else "none"
    out.add({"offload": group})
    if group == "none":
        return
    out.add({"offload.optimizer": offload.optimizer})
    if offload.optimizer_fraction < 1:
        out.add({"offload.optimizer_fraction": offload.optimizer_fraction})
    if settings.zero.stage == 3:
        out.add({"offload.parameters": offload.parameters})
    if group == "nvme":
        out.add({f"offload.{name}": getattr(offload, name) for name in ("nvme_path", "block_bytes", "threads")})


def _precision(settings: Settings, *, out: Overrides) -> None:
    precision, scale = settings.precision, settings.precision.loss_scale
    assert scale is not None, "settings have a loss scale for every dtype"
    out.add({"precision": _WORD_OF[precision.dtype]})
    if precision.reduce_dtype is not None:
        out.add({"precision.reduce_dtype": _WORD_OF[precision.reduce_dtype]})
    if precision.dtype is not DTYPES["fp16"]:  # torch_autocast alone scales the loss
        return
    names = ("dynamic", "initial", *(("window", "hysteresis", "floor") if scale.dynamic else ()))
    out.add({f"precision.loss_scale.{name}": getattr(scale, name) for name in names})
    if scale.consecutive_hysteresis:
        out.notes.append("fp16.consecutive_hysteresis: run.py has no key for it")


def _optimizer(settings: Settings, *, out: Overrides) -> None:
    policy = settings.optimizer
    if policy is not None and policy.name == TORCH:
        raise ValueError(
            f"optimizer.type={settings.given['optimizer']['type']}: run.py has no such optimizer; use AdamW, Adam, SGD, Lion or "
            "Lamb"
        )
    if settings.skip_unused:
        out.add({"optimizer.skip_unused": True})
    if policy is None:
        out.notes.append("optimizer: the configuration names none; run.py takes its own")
        out.add({"optimizer.clip_grad_norm": settings.gradient_clipping})
        return
    out.add({"optimizer": policy.name, "optimizer.lr": _peak(settings), "optimizer.weight_decay": policy.weight_decay})
    if policy.betas is not None:
        out.add({"optimizer.betas": list(policy.betas)})
    own = {"lamb": ("min_coeff", "max_coeff"), "sgd": ("momentum", "nesterov")}.get(policy.name, ())
    names = (*(("eps",) if policy.eps is not None else ()), *own, "clip_grad_norm")
    out.add({f"optimizer.{name}": getattr(policy, name) for name in names})
    if policy.weight_decay:
        out.notes.append("weight_decay: DeepSpeed decays every parameter, run.py those with two or more dimensions")


def _peak(settings: Settings) -> float:
    """Returns the learning rate at a schedule multiplier of 1."""
    params = settings.schedule.params if settings.schedule else {}
    assert settings.optimizer is not None
    default = 0.001 if settings.schedule and settings.schedule.type == "WarmupDecayLR" else settings.optimizer.lr
    if settings.schedule and settings.schedule.type == "LRRangeTest":
        return _one(params.get("lr_range_test_min_lr", 1e-3))
    return _one(params.get("warmup_max_lr") or params.get("cycle_max_lr") or default)


def _one(rate: object) -> float:
    return rate[0] if isinstance(rate, list) else rate


def _schedule(settings: Settings, *, out: Overrides) -> None:
    choice = settings.schedule
    if choice is None:
        out.add({"scheduler": "constant", "scheduler.warmup_steps": 0})
        return
    params = choice.params
    if any(isinstance(value, list) for value in params.values()):
        out.notes.append(
            f"scheduler.params: run.py has one rate for all parameters; the first of {choice.type}'s is taken"
        )
    peak = _peak(settings) if settings.optimizer else _one(params.get("warmup_max_lr") or 1e-3)
    if choice.type == "LRRangeTest":
        out.add({"scheduler": "range_test", **_read(_RANGE_TEST, params=params)})
    elif choice.type == "OneCycle":
        _one_cycle(params, out=out)
    else:
        _warmup(choice.type, params=params, peak=peak, out=out)


def _read(names: Mapping[str, tuple[str, object]], *, params: dict) -> dict[str, object]:
    return {f"scheduler.{ours}": params.get(theirs, usual) for ours, (theirs, usual) in names.items()}


def _one_cycle(params: dict, *, out: Overrides) -> None:
    decay, interval = params.get("decay_lr_rate", 0.0), params.get("decay_step_size", 0)
    start = _one(params["cycle_min_lr"]) / _one(params["cycle_max_lr"])
    out.add({"scheduler": "one_cycle", "scheduler.start": start, **_read(_ONE_CYCLE, params=params)})
    out.add(
        {
            "scheduler.decay_rate": decay if interval else 0.0,
            "scheduler.decay_interval": interval if decay else 0,
        }
    )
    if params.get("cycle_momentum", True):
        out.notes.append("scheduler.params.cycle_momentum: run.py leaves the betas alone")


def _warmup(kind: str, *, params: dict, peak: float, out: Overrides) -> None:
    cosine = kind == "WarmupCosineLR"
    low = params.get("warmup_min_ratio", 0.0) if cosine else _one(params.get("warmup_min_lr", 0.0)) / peak
    name = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}[kind]
    out.add(
        {
            "scheduler": name,
            "scheduler.warmup_steps": max(2, params.get("warmup_num_steps", 1000)),
            "scheduler.warmup_shape": params.get("warmup_type", "log"),
            "scheduler.warmup_start": low,
        }
    )
    if kind != "WarmupLR":
        final = params.get("cos_min_ratio", 0.0001) if cosine else low
        out.add({"scheduler.final": final, "scheduler.total_steps": params["total_num_steps"]})
    out.notes.append(f"scheduler: {_SHIFT}")


# Back


def to_ds_config(config: Mapping) -> dict:
    """Converts a run of `run.py`, given as nested values of its resolved configuration, to a ds_config.

    Raises ValueError for settings that DeepSpeed does not have.
    """
    zero, train, optimizer = config["zero"], config["train"], config["optimizer"]
    if zero["engine"] != "ztk":
        raise ValueError(f"zero={zero['engine']}: a peer has no ds_config; choose zero=stage0 to stage3")
    if config.get("ema", {}).get("decay"):
        raise ValueError(
            f"ema.decay={config['ema']['decay']}: a ds_config has no moving average; keep it in the script, and use ema.decay=0"
        )
    _refuse_ragged_batch(train, replicas=config["topology"]["data"])
    made = {
        "train_micro_batch_size_per_gpu": train["micro_batch_size"],
        "gradient_accumulation_steps": train["accumulation_steps"],
        "gradient_clipping": optimizer["clip_grad_norm"],
        "zero_optimization": {"stage": zero["stage"], "reduce_bucket_size": zero["bucket_size"]},
        "optimizer": _ds_optimizer(optimizer),
        **({"skip_unused": True} if optimizer.get("skip_unused") else {}),
        **_ds_precision(config["precision"]),
        **_ds_schedule(config["scheduler"], steps=train["steps"], lr=optimizer["lr"]),
        **_ds_topology(config["topology"]),
    }
    if zero["stage"] == 3:  # None means depending on the model's size, which DeepSpeed does not have
        made["zero_optimization"] |= {theirs: zero[ours] for theirs, ours in STAGE3.items() if zero[ours] is not None}
    plus_plus = ("quantized_weights", "quantized_gradients", "hpz_partition_size")
    made["zero_optimization"] |= {f"zero_{name}": zero[name] for name in plus_plus if zero.get(name)}
    offload = config["offload"]
    for key, place in (("offload_optimizer", offload["optimizer"]), ("offload_param", offload["parameters"])):
        if place not in ("none", "auto"):
            path = {"nvme_path": offload["nvme_path"]} if place == "nvme" else {}
            made["zero_optimization"][key] = {"device": place, **path}
    if offload["optimizer_fraction"] is not None and offload["optimizer_fraction"] < 1:
        made["zero_optimization"]["offload_optimizer"]["ratio"] = offload["optimizer_fraction"]
    if "nvme" in (offload["optimizer"], offload["parameters"]):
        made["aio"] = {"block_size": offload["block_bytes"], "intra_op_parallelism": offload["threads"]}
    return made


def _refuse_ragged_batch(train: Mapping, *, replicas: int) -> None:
    """Rejects uneven batches: run.py may shorten the last micro-batch, and DeepSpeed's all have one size."""
    unit = replicas * train["micro_batch_size"]
    if rest := train["global_batch_size"] % unit:
        below = train["global_batch_size"] - rest
        fitting = " or ".join(str(size) for size in (below, below + unit) if size)
        raise ValueError(
            f"train.global_batch_size={train['global_batch_size']}: in a ds_config it is a multiple of {unit}, micro-batches of "
            f"{train['micro_batch_size']} on {replicas} data-parallel ranks; use {fitting}, or another train.micro_batch_size"
        )


def _ds_topology(topology: Mapping) -> dict:
    for axis, fix in (
        ("pipeline", "write the model as a PipelineModule"),
        ("sequence", "DeepSpeed cuts sequences by code"),
        ("context", "DeepSpeed has no attention around a ring"),
    ):
        if topology[axis] > 1:
            raise ValueError(
                f"topology.{axis}={topology[axis]}: a ds_config has no key for it; {fix}, or use topology.{axis}=1"
            )
    made: dict = {}
    if topology["tensor"] > 1:
        made["tensor_parallel"] = {"autotp_size": topology["tensor"]}
    if topology["expert"] > 1:
        made["expert_parallel"] = {"enabled": True, "autoep_size": topology["expert"]}
    return made


def _ds_optimizer(optimizer: Mapping) -> dict:
    if optimizer["name"] == "muon":
        raise ValueError(
            "optimizer=muon: a ds_config of ztk cannot choose it; use optimizer=adamw, adam, sgd, lion or lamb"
        )
    if optimizer.get("states") not in (None, "fp32"):
        raise ValueError(
            f"optimizer.states={optimizer['states']}: a ds_config has no key for states that are rounded stochastically or of 8 bits; use "
            "optimizer.states=fp32"
        )
    types = {"lamb": "Lamb", "adamw": "AdamW", "adam": "Adam", "sgd": "SGD", "lion": "Lion"}
    keys = ("lr", "betas", "eps", "weight_decay", "momentum", "nesterov", "min_coeff", "max_coeff")
    params = {key: optimizer[key] for key in keys if optimizer.get(key) is not None}
    if optimizer["name"] == "adam":
        params["adam_w_mode"] = False
    return {"type": types[optimizer["name"]], "params": params}


def _ds_precision(precision: Mapping) -> dict:
    if precision.get("master") == "stochastic":
        raise ValueError(
            "precision.master=stochastic: a ds_config has no key for master weights that are rounded stochastically; use "
            "precision.master=fp32"
        )
    if precision.get("float8") is not None:
        raise ValueError(
            f"precision.float8={precision['float8']}: a ds_config has no key for float8 products; use precision=bf16"
        )
    made: dict = {}
    scale = precision["loss_scale"]
    if precision["dtype"] == "bf16":
        made["bf16"] = {"enabled": True}
    elif precision["dtype"] == "fp16" and scale["dynamic"]:
        power = scale["initial"].hex().partition("p")  # 0x1.0...p+16
        if float.fromhex(f"{power[0]}p0") != 1.0:
            raise ValueError(f"precision.loss_scale.initial={scale['initial']}: DeepSpeed starts at a power of two")
        made["fp16"] = {
            "enabled": True,
            "initial_scale_power": int(power[2]),
            "loss_scale_window": scale["window"],
            "hysteresis": scale["hysteresis"],
            "min_loss_scale": scale["floor"],
        }
    elif precision["dtype"] == "fp16":
        made["fp16"] = {"enabled": True, "loss_scale": scale["initial"]}
    if precision.get("reduce_dtype"):
        made["communication_data_type"] = precision["reduce_dtype"]
    return made


def _ds_schedule(scheduler: Mapping, *, steps: int, lr: float) -> dict:
    name = scheduler["name"]
    if name == "wsd":
        raise ValueError("scheduler=wsd: DeepSpeed has no such schedule; use scheduler=linear, or another of its own")
    if name == "range_test":
        params = {"lr_range_test_min_lr": lr, **{key: scheduler[ours] for ours, (key, _) in _RANGE_TEST.items()}}
        return {"scheduler": {"type": "LRRangeTest", "params": params}}
    if name == "one_cycle":
        params = {
            "cycle_min_lr": lr * scheduler["start"],
            "cycle_max_lr": lr,
            **{key: scheduler[ours] for ours, (key, _) in _ONE_CYCLE.items()},
            "decay_lr_rate": scheduler["decay_rate"],
            "decay_step_size": scheduler["decay_interval"],
            "cycle_momentum": False,
        }
        return {"scheduler": {"type": "OneCycle", "params": params}}
    return _ds_warmup(scheduler, steps=steps, lr=lr)


def _ds_warmup(scheduler: Mapping, *, steps: int, lr: float) -> dict:
    name, warmup = scheduler["name"], scheduler["warmup_steps"]
    if name == "constant" and not warmup:
        return {}
    start = scheduler["warmup_start"]
    start = 1 / warmup if start is None and warmup else start or 0.0
    params = {"warmup_num_steps": max(1, warmup), "warmup_type": scheduler["warmup_shape"] or "linear"}
    total = {"total_num_steps": scheduler["total_steps"] or steps} if name != "constant" else {}
    if name == "cosine":
        ratios = {"warmup_min_ratio": start, "cos_min_ratio": scheduler["final"]}
        return {"scheduler": {"type": "WarmupCosineLR", "params": {**total, **params, **ratios}}}
    if name == "linear" and abs(scheduler["final"] - start) > 1e-12:
        raise ValueError(
            f"scheduler.final={scheduler['final']}: DeepSpeed's WarmupDecayLR ends where its warm-up began; "
            f"use scheduler.final={start:g}"
        )
    rates = {"warmup_min_lr": lr * start, "warmup_max_lr": lr}
    kind = "WarmupLR" if name == "constant" else "WarmupDecayLR"
    return {"scheduler": {"type": kind, "params": {**total, **params, **rates}}}
