"""Buffers of a model in 16 bit: they keep the dtype that the model gave them, unless `data_types.buffer_dtype` names another.

DeepSpeed casts them with the parameters, which rounds rotary frequencies. A model that adds a float32 buffer to its input (positions, masks)
then computes in float32 where its next layer has 16-bit weights; an error that names them takes the place of torch's. So it is where a script
has converted the parameters.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

SHOWN = 5
_ABOUT_DTYPES = ("dtype", "scalar type", "Float")  # as torch's messages say it


def cast_buffers(model: nn.Module, *, dtype: torch.dtype | None, of_parameters: torch.dtype) -> None:
    """Floating-point buffers of any shape become `dtype`; None: they stay, but for the running statistics of norms with weights, which torch
    computes in the dtype of those, `of_parameters`, alone."""
    for module in model.modules():
        is_norm = isinstance(module, _NormBase) and module.affine
        wanted = of_parameters if dtype is None and is_norm else dtype
        for name, buffer in _floating(module).items() if wanted is not None else ():
            module._buffers[name] = buffer.to(wanted)


@contextmanager
def naming_buffers(model: nn.Module, *, dtype: torch.dtype) -> Iterator[None]:
    """Turns torch's RuntimeError about dtypes in this block into one with the fix, which names the parameters and buffers that are not `dtype`,
    the engine's one."""
    try:
        yield
    except RuntimeError as error:
        is_torchs = any(word in str(error) for word in _ABOUT_DTYPES)
        reason = (_of_parameters(model, dtype=dtype) or _of_buffers(model, dtype=dtype)) if is_torchs else ""
        if not reason:
            raise
        raise RuntimeError(f"{reason} (torch: {error})") from error


def _of_parameters(model: nn.Module, *, dtype: torch.dtype) -> str:
    names = [name for name, parameter in model.named_parameters() if parameter.dtype != dtype]
    if not names:
        return ""
    found = str(model.get_parameter(names[0]).dtype).removeprefix("torch.")
    return (
        f"parameters {_listed(names)} are {found} now, and the engine computes in {str(dtype).removeprefix('torch.')}: leave out model.float() "
        "and model.double() after initialize, and put modules into the model before it"
    )


def _of_buffers(model: nn.Module, *, dtype: torch.dtype) -> str:
    names = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, buffer in _floating(module).items()
        if buffer.dtype != dtype
    ]
    if not names:
        return ""
    word = str(dtype).removeprefix("torch.")
    return (
        f"parameters are {word} here, and these buffers are not: {_listed(names)}. Cast what comes of them in the forward, or set "
        f'"data_types": {{"buffer_dtype": "{word}"}} in the configuration, which casts all buffers, as DeepSpeed does'
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (" ..." * (len(names) > SHOWN))


def _floating(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_floating_point()
    }
