"""fp16, bf16, and the dtypes in which gradients are communicated and accumulated."""

import torch

from ztk.core.precision import LossScalePolicy, PrecisionPolicy
from ztk.deepspeed.config.keys import (
    Findings,
    anything,
    at_least,
    boolean,
    fixed,
    hint,
    number,
    one_of,
    optional,
    read_section,
    takes,
    whole_number,
)
from ztk.deepspeed.tools.device import DTYPES

dtype_word = one_of(*DTYPES)

FP16 = {
    "enabled": takes(boolean),
    "auto_cast": takes(boolean, auto=True),
    "loss_scale": takes(at_least(0), auto=True),
    "initial_scale_power": takes(at_least(0, high=127), auto=True),
    "loss_scale_window": takes(whole_number(1), auto=True),
    "hysteresis": takes(whole_number(1), auto=True),
    "consecutive_hysteresis": takes(boolean, auto=True),
    "min_loss_scale": takes(number, auto=True),
    "fp16_master_weights_and_grads": fixed(
        False, why="not offered: ztk keeps fp32 master weights; leave it out, or offload them with offload_optimizer"
    ),
}
BF16 = {
    "enabled": takes(boolean),
    "immediate_grad_update": hint(
        boolean, "ztk moves every gradient into its flat buffer as soon as it is there", usual=(False, True)
    ),
    "check_grad_overflow": fixed(
        True, why="ztk looks at every step's gradients in the same pass that takes their norm; leave it out"
    ),
    "bf16_master_weights_and_grads": takes(boolean),
    "bf16_optimizer_states": takes(boolean),
}
_MASTERS = ("bf16_master_weights_and_grads", "bf16_optimizer_states")
AUTOCAST = {
    "enabled": takes(boolean),
    "dtype": takes(optional(dtype_word)),
    "lower_precision_safe_modules": hint(
        anything,
        "gradients are communicated in communication_data_type; torch decides which layers compute in 16 bit",
        usual=(None,),
    ),
}
DATA_TYPES = {
    "grad_accum_dtype": takes(dtype_word),
    "param_dtype": fixed(None, why="not offered: switch bf16 or fp16 on instead"),
    "buffer_dtype": takes(optional(dtype_word)),
    "keep_in_fp32_modules": fixed("auto", None, why="not offered: a model has one dtype, master weights are fp32"),
}


class Precision:
    """The dtypes of a run."""

    def __init__(self, given: dict, *, top: dict, stage: int, findings: Findings) -> None:
        """given: the full configuration. top: its effective top-level values. stage: ZeRO stage."""
        fp16 = read_section(given.get("fp16", {}), path="fp16.", keys=FP16, findings=findings)
        if "bf16" in given and "bfloat16" in given:
            findings.faults.append("bfloat16: is the old name of bf16, which is given too; keep bf16")
        name = "bf16" if "bf16" in given else "bfloat16"
        bf16 = read_section(
            given.get(name, {}),
            path=f"{name}.",
            keys=BF16,
            findings=findings,
            elsewhere={"check_overflow": "there is no such key; did you mean check_grad_overflow?"},
        )
        self.autocast = _autocast(given.get("torch_autocast", {}), findings=findings)
        types = read_section(given.get("data_types", {}), path="data_types.", keys=DATA_TYPES, findings=findings)
        self.fp16, self.bf16 = bool(fp16.get("enabled")), bool(bf16.get("enabled"))
        self._is_scaled = self.fp16 or self.autocast is torch.float16
        self.static_loss_scale = float(fp16.get("loss_scale", 0)) if self._is_scaled else 0.0
        self.casts_inputs = self.fp16 and fp16.get("auto_cast", True)
        word = types.get("buffer_dtype")
        self.buffer_dtype = None if word is None else DTYPES[word]
        if self.fp16 and self.bf16:
            findings.faults.append("fp16.enabled and bf16.enabled: a model has one dtype; switch one of them off")
        if self._is_scaled and stage == 0:
            _drop_hysteresis(fp16, findings=findings)
        if self.autocast is torch.float16 and (self.fp16 or self.bf16):
            findings.faults.append(
                "torch_autocast.dtype=float16: conflicts with fp16.enabled or bf16.enabled, which cast the model already: switch one off"
            )
        if not self._is_scaled:
            findings.notes += [f"fp16.{key}: without effect while fp16 is off" for key in fp16 if key != "enabled"]
        if not self.bf16:
            findings.notes += [f"bf16.{key}: without effect while bf16 is off" for key in _MASTERS if bf16.get(key)]
        reduce_dtype = _reduce_dtype(types, top=top, findings=findings)
        self.policy = self._policy(fp16, bf16=bf16, reduce_dtype=reduce_dtype, findings=findings)

    def _policy(
        self, fp16: dict, *, bf16: dict, reduce_dtype: torch.dtype | None, findings: Findings
    ) -> PrecisionPolicy:
        dtype = torch.float16 if self.fp16 else torch.bfloat16 if self.bf16 else torch.float32
        try:
            scale = _loss_scale(fp16, static=self.static_loss_scale) if self._is_scaled and not self.bf16 else None
            return PrecisionPolicy(
                dtype=dtype,
                reduce_dtype=None if reduce_dtype == dtype else reduce_dtype,
                autocast=self.autocast if self._is_scaled else None,
                bf16_master=self.bf16 and bool(bf16.get(_MASTERS[0])),
                bf16_states=self.bf16 and bool(bf16.get(_MASTERS[1])),
                loss_scale=scale,
            )
        except ValueError as error:
            text = (
                str(error)
                .replace("precision.bf16_master", f"bf16.{_MASTERS[0]}")
                .replace("precision.bf16_states", f"bf16.{_MASTERS[1]}")
            )
            findings.faults.append(text if text != str(error) else f"fp16: {error}")
            return PrecisionPolicy()


def _autocast(given: object, *, findings: Findings) -> torch.dtype | None:
    """Returns the dtype of `torch_autocast`, or None if it is off."""
    section = read_section(given, path="torch_autocast.", keys=AUTOCAST, findings=findings)
    if not section.get("enabled"):
        findings.notes += [
            f"torch_autocast.{key}: without effect while torch_autocast.enabled is false"
            for key in section
            if key != "enabled"
        ]
        return None
    dtype = DTYPES[section.get("dtype") or "bf16"]
    if dtype is torch.float32:
        findings.faults.append(f"torch_autocast.dtype={section['dtype']}: must be bfloat16 or float16")
    return dtype


def _drop_hysteresis(fp16: dict, *, findings: Findings) -> None:
    """Drops hysteresis at stage 0: DeepSpeed's optimizer (`FP16_Optimizer`) halves the scale at every overflow."""
    for key, usual in (("hysteresis", 1), ("consecutive_hysteresis", False)):
        if fp16.get(key, usual) != usual:
            findings.notes.append(
                f"fp16.{key}={fp16[key]}: without effect at stage 0, as in DeepSpeed; stages 1 to 3 use it"
            )
        fp16[key] = usual


def _loss_scale(fp16: dict, *, static: float) -> LossScalePolicy:
    if static:
        return LossScalePolicy(dynamic=False, initial=static)
    floor = fp16.get("min_loss_scale", 1.0) or 1.0  # older configurations write 0 for the default
    initial = 2.0 ** fp16.get("initial_scale_power", 16)
    return LossScalePolicy(
        initial=initial,
        window=fp16.get("loss_scale_window", 1000),
        hysteresis=fp16.get("hysteresis", 2),
        consecutive_hysteresis=fp16.get("consecutive_hysteresis", False),
        floor=floor,
        maximum=max(initial, 2.0**32),
    )


def _reduce_dtype(types: dict, *, top: dict, findings: Findings) -> torch.dtype | None:
    """Returns the reduction dtype. ztk accumulates gradients in the dtype of their communication, so the two keys must agree."""
    wire, accumulated = top.get("communication_data_type"), types.get("grad_accum_dtype")
    dtypes = {DTYPES[word] for word in (wire, accumulated) if word is not None}
    if len(dtypes) > 1:
        findings.faults.append(
            f"communication_data_type={wire} and data_types.grad_accum_dtype={accumulated}: ztk adds gradients up in the "
            "dtype they are communicated in; give one of them"
        )
        return None
    return dtypes.pop() if dtypes else None
