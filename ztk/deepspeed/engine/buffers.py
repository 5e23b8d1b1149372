"""Buffers of a 16-bit model. They keep the dtype that the model gave them, unless `data_types.buffer_dtype` sets another.

DeepSpeed casts them with the parameters, which rounds rotary frequencies. If a model adds a float32 buffer to its input (positions,
masks), the result is float32 and meets 16-bit weights in the next layer. torch's error is then replaced by one that names the buffers.
The same applies if a script has converted the parameters.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

SHOWN = 5
_ABOUT_DTYPES = ("dtype", "scalar type", "Float")  # the words of torch's messages


def cast_buffers(model: nn.Module, *, dtype: torch.dtype | None, of_parameters: torch.dtype) -> None:
    """Casts floating-point buffers of any shape to `dtype`, if given.

    Otherwise casts only the running statistics of norms with weights, which torch supports only in the dtype of the weights,
    `of_parameters`.
    """
    for module in model.modules():
        is_norm = isinstance(module, _NormBase) and module.affine
        wanted = of_parameters if dtype is None and is_norm else dtype
        for name, buffer in _floating(module).items() if wanted is not None else ():
            module._buffers[name] = buffer.to(wanted)


@contextmanager
def naming_buffers(model: nn.Module, *, dtype: torch.dtype) -> Iterator[None]:
    """Replaces torch's RuntimeError about dtypes in this block by one with the fix.

    It names the parameters and buffers that are not `dtype`, the engine's dtype.
    """
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
        f"parameters are {word} here, and these buffers are not: {_listed(names)}. Cast the results in the forward, or set "
        f'"data_types": {{"buffer_dtype": "{word}"}} in the configuration, which casts all buffers, as DeepSpeed does'
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (" ..." * (len(names) > SHOWN))


def _floating(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_floating_point()
    }
