"""`init_inference`'s configuration: every key takes effect, is accepted with a note, or is rejected. All faults are reported at once."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ztk.deepspeed.config.keys import (
    Findings,
    Key,
    anything,
    boolean,
    fixed,
    hint,
    optional,
    read_section,
    takes,
    whole_number,
)
from ztk.deepspeed.tools.device import DTYPES

_DTYPES = DTYPES | {"bfloat": torch.bfloat16}
_GROUP = "the number of ranks determines the groups; leave it out, and give tensor_parallel.tp_size"
_EXPERTS = (
    "experts are spread over ranks by ztk.deepspeed.initialize(model=..., config={'expert_parallel': {'enabled': true, "
    "'autoep_size': n}, ...}) without an optimizer, whose engine evaluates; here every rank has all of them"
)
_MASK = "every model brings its own mask, and the kernels follow it"


def dtype_of(value: object) -> torch.dtype:
    """Converts a torch dtype or its name, including `torch.half` and "fp16". Raises ValueError for a dtype that ztk does not compute
    in.
    """
    word = str(value).removeprefix("torch.")
    if not isinstance(value, (str, torch.dtype)) or word not in _DTYPES:
        weights = " (quantised weights are not offered)" if word in ("int8", "int4", "uint8") else ""
        raise ValueError(f"must be fp16, bf16 or fp32{weights}")
    return _DTYPES[word]


def _checkpoint(value: object) -> object:
    if value is None or isinstance(value, (str, os.PathLike, Mapping)):
        return value
    raise ValueError("must be a path, or an object with a list of files in `checkpoints`")


def _suffixes(value: object) -> tuple[str, ...]:
    names = (value,) if isinstance(value, str) else value
    if isinstance(names, (tuple, list)) and names and all(isinstance(name, str) and name.strip(".") for name in names):
        return tuple(name.lstrip(".") for name in names)
    raise ValueError(
        "must be the ends of names of the layers whose results are summed over ranks, as ('self_attn.o_proj', 'mlp.down_proj')"
    )


def _policy(value: object) -> dict[type[nn.Module], tuple[str, ...]] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not value:
        raise ValueError("must be {class of a layer: ends of names}")
    for kind in value:
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            raise ValueError(f"has the key {kind!r}: must be a class of modules, as LlamaDecoderLayer")
    return {kind: _suffixes(names) for kind, names in value.items()}


_TENSOR = {
    "enabled": takes(boolean),
    "tp_size": takes(whole_number(1)),
    "tp_grain_size": hint(
        whole_number(1), "attention is cut between groups of heads, all else between columns", usual=(64,)
    ),
    "mpu": takes(anything),
    "tp_group": fixed(None, why=_GROUP),
}
_MOE = {
    "enabled": hint(boolean, "layers of experts are found by their class", usual=(True, False)),
    "ep_size": fixed(1, why=_EXPERTS),
    "num_experts": hint(anything, "a layer knows its experts"),
    "moe_experts": hint(anything, "a layer knows its experts"),
    "type": hint(anything, "a layer knows whether it is a residual one", usual=("standard",)),
    **dict.fromkeys(("ep_group", "expert_group", "ep_mp_group"), fixed(None, why=_GROUP)),
}
_QUANT = {"enabled": fixed(False, why="quantised weights are not offered; leave quant out, and use fp16 or bf16")}
_QUANT |= {
    name: hint(anything, "without effect while quant.enabled is false") for name in ("activation", "weight", "qkv")
}
KEYS: dict[str, Key] = {
    "replace_with_kernel_inject": takes(boolean),
    "dtype": takes(dtype_of, null=None),
    "tensor_parallel": takes(anything),
    "mp_size": takes(whole_number(1)),
    "mpu": takes(anything),
    "zero": takes(anything),
    "aio": takes(
        anything
    ),  # not a key of DeepSpeed's; it is next to `zero`, as it is next to zero_optimization in training
    "injection_policy": takes(_policy),
    "injection_policy_tuple": takes(optional(_suffixes)),
    "checkpoint": takes(_checkpoint),
    "base_dir": takes(anything),
    "keep_module_on_host": takes(boolean),
    "max_out_tokens": takes(whole_number(1)),
    "moe": takes(anything),
    "quant": takes(anything),
    "min_out_tokens": hint(
        whole_number(1), "no memory is set aside for tokens to come, so none can be missing", usual=(1,)
    ),
    "enable_cuda_graph": fixed(
        False,
        why="not offered: after init_inference call engine.compile(compile_kwargs={'mode': 'reduce-overhead'}), torch's graphs",
    ),
    "use_triton": hint(boolean, "on a GPU ztk's kernels are always Triton's", usual=(False,)),
    "triton_autotune": hint(boolean, "launch shapes follow from sizes, there is nothing to try out", usual=(False,)),
    "triangular_masking": hint(boolean, _MASK, usual=(True,)),
    "return_tuple": hint(boolean, "the return values of layers do not change", usual=(True,)),
    "transposed_mode": hint(boolean, "layers keep their weights as they are", usual=(False,)),
    "replace_method": hint(anything, "is deprecated; there is one method", usual=("auto",)),
    "set_empty_params": fixed(False, why="build the model on the meta device, and give its weights by checkpoint"),
    "save_mp_checkpoint_path": fixed(None, why="not offered: every checkpoint loads at every tp_size; leave it out"),
    "checkpoint_config": fixed(None, {}, why="has no effect in DeepSpeed 0.19.8; give checkpoint and base_dir"),
    "training_mp_size": fixed(1, why="checkpoints hold full weights: export one that does not by zero_to_fp32"),
    "config": fixed(None, why="the model has its own configuration; leave it out"),
    "ep_size": fixed(1, why=_EXPERTS),
    "ep_group": fixed(None, why=_GROUP),
    "ep_mp_group": fixed(None, why=_GROUP),
    "moe_experts": hint(anything, "a layer knows its experts", usual=([1],)),
    "moe_type": hint(anything, "a layer knows whether it is a residual one", usual=("standard",)),
}
ALIASES = {
    "kernel_inject": "replace_with_kernel_inject",
    "tp": "tensor_parallel",
    "tm": "triangular_masking",
    "injection_dict": "injection_policy",
    "max_tokens": "max_out_tokens",
    "min_tokens": "min_out_tokens",
    "ckpt_config": "checkpoint_config",
    "expert_group": "ep_group",
    "expert_mp_group": "ep_mp_group",
    "args": "config",
}
_ELSEWHERE = {
    "zero_optimization": "is called zero in init_inference's configuration",
    **dict.fromkeys(("fp16", "bf16"), "is said by dtype in init_inference's configuration: dtype='fp16' or 'bf16'"),
    "tp_size": "belongs into the section tensor_parallel; move it there",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorParallel:
    """tp_size: number of ranks that share every layer. mpu: provides the ranks instead; see `ztk.deepspeed.start.mesh`."""

    tp_size: int = 1
    mpu: object = None


class DeepSpeedInferenceConfig:
    """The checked configuration. Attributes have DeepSpeed's names; `notes` lists keys without effect, with the reason.

    Raises DeepSpeedConfigError with every fault.
    """

    def __init__(self, **given: object) -> None:
        findings = Findings()
        values = read_section(given, path="", keys=KEYS, findings=findings, elsewhere=_ELSEWHERE, aliases=ALIASES)
        self.dtype: torch.dtype = values.get("dtype", torch.float16)
        if "dtype" not in given:
            findings.notes.append("dtype: is not given, so the model becomes fp16, as in DeepSpeed")
        self.replace_with_kernel_inject: bool = values.get("replace_with_kernel_inject", False)
        self.tensor_parallel = _tensor_parallel(values, findings=findings)
        self.zero: Mapping[str, object] = values.get("zero") or {}
        self.aio: Mapping[str, object] = values.get("aio") or {}
        self.injection_policy: dict[type[nn.Module], tuple[str, ...]] | None = values.get("injection_policy")
        self.injection_policy_tuple: tuple[str, ...] | None = values.get("injection_policy_tuple")
        self.checkpoint: object = values.get("checkpoint")
        self.base_dir: str = values.get("base_dir") or ""
        self.keep_module_on_host: bool = values.get("keep_module_on_host", False)
        self.max_out_tokens: int = values.get("max_out_tokens", 1024)
        if isinstance(values.get("moe"), bool):
            del values["moe"]  # old form of moe.enabled
        for name, keys in (("moe", _MOE), ("quant", _QUANT)):
            if values.get(name):
                read_section(values[name], path=f"{name}.", keys=keys, findings=findings)
        _check_together(self, findings=findings)
        findings.check()
        self.notes = tuple(findings.notes)

    def dict(self) -> dict[str, object]:
        """Returns every setting by its name."""
        tensor = {"tp_size": self.tensor_parallel.tp_size, "mpu": self.tensor_parallel.mpu}
        return vars(self) | {"tensor_parallel": tensor}


def default_inference_config() -> dict[str, object]:
    """Returns the settings of an empty configuration."""
    settings = DeepSpeedInferenceConfig().dict()
    return {name: value for name, value in settings.items() if name not in ("notes", "aio")}


def _tensor_parallel(values: dict[str, object], *, findings: Findings) -> TensorParallel:
    section = values.get("tensor_parallel") or {}
    inner = read_section(section, path="tensor_parallel.", keys=_TENSOR, findings=findings)
    asked = {"mp_size": values.get("mp_size", 1), "tensor_parallel.tp_size": inner.get("tp_size", 1)}
    sizes = {size for size in asked.values() if size > 1}
    mpu = inner.get("mpu") if inner.get("mpu") is not None else values.get("mpu")
    if len(sizes) > 1:
        findings.faults.append(
            f"mp_size={asked['mp_size']}: is the old name of tensor_parallel.tp_size, which is {asked['tensor_parallel.tp_size']}"
        )
    if not inner.get("enabled", True):
        if sizes or mpu is not None:
            findings.notes.append("tensor_parallel.enabled=False: every rank has the full model")
        return TensorParallel()
    if sizes and mpu is not None:
        findings.faults.append("mpu: determines how many ranks share the model, and so does tp_size; keep one")
    # pyrefly: ignore[no-matching-overload]  # of the converter's type
    return TensorParallel(tp_size=min(sizes, default=1), mpu=mpu)


def _check_together(config: DeepSpeedInferenceConfig, *, findings: Findings) -> None:
    if config.base_dir and config.checkpoint is None:
        findings.faults.append("base_dir: has no effect without checkpoint, whose files lie there; leave it out")
    if config.injection_policy and config.injection_policy_tuple:
        findings.faults.append("injection_policy_tuple: injection_policy covers every class of layers; keep one")
    for name in ("zero", "aio"):
        if not isinstance(getattr(config, name), Mapping):
            findings.faults.append(f"{name}: must be an object {{...}}, not {getattr(config, name)!r}")
            return
    if config.aio and not config.zero:
        findings.faults.append("aio: has no effect without zero.offload_param.device=nvme; leave it out")
    if config.zero and config.keep_module_on_host:
        findings.faults.append(
            "keep_module_on_host: zero.offload_param.device=cpu keeps the parameters there; leave it out"
        )
    cuts = config.tensor_parallel.tp_size > 1 or config.tensor_parallel.mpu is not None
    if not cuts and (config.injection_policy or config.injection_policy_tuple):
        findings.notes.append("injection_policy: determines how layers are cut, and with tp_size=1 none is")
