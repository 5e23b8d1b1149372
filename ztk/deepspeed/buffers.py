"""Buffers of a model in 16 bit: they keep the dtype that the model gave them, unless `data_types.buffer_dtype` names another.

DeepSpeed casts them with the parameters, which rounds rotary frequencies. A model that adds a float32 buffer to its input (positions, masks)
then computes in float32 where its next layer has 16-bit weights; torch's error about that gets a note.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

SHOWN = 5


def cast_buffers(model: nn.Module, *, dtype: torch.dtype | None) -> None:
    """Floating-point buffers of any shape become `dtype`; None: they stay."""
    for module in model.modules() if dtype is not None else ():
        for name, buffer in _floating(module).items():
            module._buffers[name] = buffer.to(dtype)


@contextmanager
def naming_buffers(model: nn.Module, *, dtype: torch.dtype) -> Iterator[None]:
    """A RuntimeError about dtypes in this block has a note with the buffers that are not `dtype`, the parameters' one, and with the fix."""
    try:
        yield
    except RuntimeError as error:
        if "dtype" in str(error) and (note := _note(model, dtype=dtype)):
            error.add_note(note)
        raise


def _note(model: nn.Module, *, dtype: torch.dtype) -> str:
    names = [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        for name, buffer in _floating(module).items()
        if buffer.dtype != dtype
    ]
    if not names:
        return ""
    word = str(dtype).removeprefix("torch.")
    listed = ", ".join(names[:SHOWN]) + (" ..." * (len(names) > SHOWN))
    return (
        f"parameters are {word} here, and these buffers are not: {listed}. Cast what comes of them in the forward, or set "
        f'"data_types": {{"buffer_dtype": "{word}"}} in the configuration, which casts all buffers, as DeepSpeed does'
    )


def _floating(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_floating_point()
    }
