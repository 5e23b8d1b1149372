"""One vector for a text: the mean of the last hidden states."""

import threading
import time

import torch
from torch import Tensor
from torch.nn import functional as F

from ztk.inference.model import InferenceModel
from ztk.inference.steps import Span

_YIELD = 0.001  # seconds between parts, in which steps of answers take the lock


@torch.inference_mode()
def embedding(model: InferenceModel, *, tokens: list[int], adapter: int, rows: int, lock: threading.RLock) -> Tensor:
    """fp32 [C] of length 1 on the CPU: the mean of the last norm's outputs for `tokens`. rows: that are computed at a time, with the lock."""
    with lock:
        cache, total = model.scratch(len(tokens)), torch.zeros(())
    for start in range(0, len(tokens), rows):
        part = tokens[start : start + rows]
        span = Span(slot=0, start=start, length=len(part), row=0, adapter=adapter)
        with lock:
            hidden = model.forward(torch.tensor(part), spans=[span], cache=cache)
            total = total + hidden.float().sum(0).cpu()
        time.sleep(_YIELD)
    return F.normalize(total / len(tokens), dim=0)
