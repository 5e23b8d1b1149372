"""Chooses the backward of `attention` on a GPU: ztk's kernels, or FlashAttention-3's where it is installed and measured to be faster.

FlashAttention-3 has five products in place of seven. With `deterministic=True` it adds dQ over blocks of keys in a fixed order.
torch's cuDNN backward is no candidate: torch refuses it in its deterministic mode ("cuDNN SDPA is not deterministic").

[Note: One choice per shape]
The two have different bits, so a shape has one choice. Its first backward measures both, and writes the name of the faster one and both
times into a file of Triton's cache folder, whose name has the GPU, the versions and the shape. Other processes, such as other ranks and a
resumed run, read the file. The first process that writes it decides. Bits of another machine are equal if this folder is copied there.
FlashAttention-3 is chosen only if it runs, two calls give equal bits, and its gradients agree with ztk's.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

PACKAGE = "flash_attn_interface"
OWN, LIBRARY = "ztk", "flash attention 3"
FASTER = 0.95  # of ztk's seconds: below it a difference is no noise
ROUNDINGS = 4  # of P, dS and the results in both implementations, relative to a gradient's norm

Gradients = tuple[Tensor, Tensor, Tensor]
Backward = Callable[[], Gradients]
_chosen: dict[tuple, str] = {}


@functools.cache
def has_library() -> bool:
    """Whether FlashAttention-3 is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def choose(key: tuple, *, own: Backward, other: Backward) -> str:
    """`OWN` or `LIBRARY` for a shape, see [Note: One choice per shape]. key: all that the choice depends on, as numbers and strings.

    own, other: compute the gradients of this shape, of any shapes and one dtype each.
    """
    found = _chosen.get(key)
    if found is None:
        name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
        path = Path(triton.knobs.cache.dir, "ztk_attention_backward", f"{name}.json")
        if not path.exists():
            _write(path, _measured(own, other=other) | {"key": key})
        found = _chosen[key] = json.loads(path.read_text())["chosen"]
    return found


def _measured(own: Backward, *, other: Backward) -> dict[str, object]:
    try:
        expected, first, second = own(), other(), other()
        for mine, one, two in zip(expected, first, second, strict=True):
            if not torch.equal(one, two):
                return {"chosen": OWN, "reason": "two calls differ"}
            error = (one.float() - mine.float()).norm()
            if not error <= ROUNDINGS * torch.finfo(mine.dtype).eps * mine.float().norm():
                return {"chosen": OWN, "reason": f"gradients differ by {float(error):.3g}"}
        times = gpu_seconds(own), gpu_seconds(other)
    except Exception as error:  # noqa: BLE001  # of a library that does not support this shape or GPU
        return {"chosen": OWN, "reason": f"{type(error).__name__}: {error}"[:300]}
    return {"chosen": LIBRARY if times[1] < FASTER * times[0] else OWN, OWN: times[0], LIBRARY: times[1]}


def _write(path: Path, document: dict[str, object]) -> None:
    """Writes the file, unless another process has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp") as file:
        json.dump(document, file)
        file.flush()
        with contextlib.suppress(FileExistsError):
            os.link(file.name, path)


def gpu_seconds(run: Backward, *, calls: int = 3) -> float:
    """Mean seconds of a call, after one that may compile."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / (1e3 * calls)


@functools.cache
def versions(device: torch.device) -> tuple[str, ...]:
    """The part of a key that shapes do not have."""
    packages = importlib.metadata.packages_distributions().get(PACKAGE, [])
    installed = (f"{name} {importlib.metadata.version(name)}" for name in packages)
    return torch.cuda.get_device_name(device), torch.__version__, triton.__version__, *installed
