"""Chooses who computes `attention` on a GPU: ztk's kernels, or a library that is installed, right and measured to be faster.

FlashAttention-3 computes the forward, and with `deterministic=True` the backward, in which it adds dQ over blocks of keys in a fixed order and
has five products in place of seven. cuDNN computes the forward of sequences of one length. torch refuses cuDNN's backward in its
deterministic mode ("cuDNN SDPA is not deterministic"), so it is no candidate.

[Note: One choice per shape]
Implementations have different bits, so a shape has one choice for each direction. Its first call measures all candidates. A library is chosen
only if it runs, two calls give equal bits, its results agree with ztk's, and it is at least 5 % faster. The choice and all times go into a
file of Triton's cache folder, whose name has the GPU, the versions and the shape. Other processes of this machine, such as other ranks and
a resumed run, read the file. Nodes of a run share the choice of the one that is first to put it into the run's store (`agree_by`), and write
that into their own files. So all ranks of a run have one choice, and a resumed run on the same nodes has it again.
"""

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from ztk.kernels.launch.grids import next_power_of_2

PACKAGE = "flash_attn_interface"
OWN, FLASH, CUDNN = "ztk", "flash attention 3", "cudnn"
FASTER = 0.95  # of ztk's seconds: below it a difference is no noise
# Distance from ztk's results, relative to their norm: four roundings of P, dS and results. lse is fp32, and sums over another order.
_NEAR = {torch.bfloat16: 4 * 2.0**-7, torch.float16: 4 * 2.0**-10, torch.float32: 2.0**-14}

Compute = Callable[[], tuple[Tensor, ...]]

logger = logging.getLogger(__name__)
_chosen: dict[tuple, str] = {}
_store: dist.Store | None = None


def agree_by(store: dist.Store | None) -> None:
    """From now on the ranks that call this with one store have one choice per shape; None: every machine chooses alone.

    store: store that all nodes of a run reach, with `compare_set`.
    """
    global _store  # of the process, as its process group is
    _store = store
    _chosen.clear()


@functools.cache
def has_flash() -> bool:
    """Whether FlashAttention-3 is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


@functools.cache
def has_cudnn() -> bool:
    """Whether torch has cuDNN's attention, which needs CUDA's architecture 8.0."""
    return torch.cuda.is_available() and torch.backends.cudnn.is_available()


def flash() -> Any:
    """The module of FlashAttention-3."""
    return importlib.import_module(PACKAGE)


def flash_sizes(q: Tensor, *, cu_seqlens: Tensor | None, T: int, causal: bool, window: int) -> dict[str, Any]:
    """Its arguments for packed sequences, in which q is [tokens, H, D] and lse [H, tokens], as ztk's are."""
    offsets = torch.arange(0, len(q) + 1, T, dtype=torch.int32, device=q.device) if cu_seqlens is None else cu_seqlens
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": T, "max_seqlen_k": T}
    return lengths | {"window_size_left": window - 1, "window_size_right": 0 if causal else -1}


def is_open(q: Tensor) -> bool:
    """Whether libraries are candidates for q, which has any shape: tokens of 16 bits on a GPU."""
    return q.is_cuda and q.element_size() == 2 and q.numel() > 0


def choose(
    direction: str,
    given: tuple,
    *,
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor | None,
    T: int,
    causal: bool,
    window: int,
    own: Callable[..., tuple[Tensor, ...]],
    others: Mapping[str, Callable[..., tuple[Tensor, ...]]],
) -> str:
    """`OWN` or a name of `others` for a shape, see [Note: One choice per shape].

    direction: forward or backward. q: [tokens, H, D]. k: [tokens, H_kv, D]. cu_seqlens: int32 [sequences + 1], or None if all sequences have T
    tokens. own, others: with the arguments `given` each computes the results of this call, in one order and with equal dtypes.

    Raises:
        RuntimeError: the other nodes have a library that this node lacks.
    """
    # Lengths of packed sequences differ from batch to batch: one choice for all of a size.
    packed = (0, T) if cu_seqlens is None else (next_power_of_2(cu_seqlens.numel() - 1), next_power_of_2(T))
    key = (direction, *q.shape, k.shape[1], str(q.dtype), q.stride(0), *packed, causal, window)
    found = _chosen.get(key)
    if found is None:
        able = {
            name: partial(other, *given)
            for name, other in others.items()
            if _takes(name, cu_seqlens=cu_seqlens, window=window)
        }
        found = _chosen[key] = _agreed(key, device=q.device, own=partial(own, *given), others=able)
    return found


def _takes(name: str, *, cu_seqlens: Tensor | None, window: int) -> bool:
    """Whether the library is there and takes these sequences."""
    if name == CUDNN:
        return cu_seqlens is None and not window and has_cudnn()
    return name != FLASH or has_flash()


def _agreed(key: tuple, *, device: torch.device, own: Compute, others: Mapping[str, Compute]) -> str:
    gpu, *packages = _versions(device)
    path = Path(triton.knobs.cache.dir, "ztk_attention", f"{_digest(key, gpu, packages)}.json")
    record: dict[str, Any] = {"chosen": OWN}
    if others:
        if not path.exists():
            _write(path, _measured(own, others=others) | {"key": key})
        record = json.loads(path.read_text())
    chosen = record["chosen"]
    if _store is not None:
        chosen = _store.compare_set(f"attention/{_digest(key, gpu)}", "", chosen).decode()
        if chosen != OWN and chosen not in others:
            raise RuntimeError(
                f"attention: another node computes the {key[0]} by {chosen}, which {socket.gethostname()} lacks: install the same "
                f"{PACKAGE} and cuDNN on every node"
            )
        if others and chosen != record["chosen"]:
            record["chosen"] = chosen
            _write(path, record, replace=True)
    if others:
        seconds = ", ".join(f"{name} {took * 1e3:.3g} ms" for name, took in record.get("seconds", {}).items())
        logger.info(
            "attention's %s for q %s: %s (%s)", key[0], list(key[1:4]), chosen, seconds or record.get("refused")
        )
    return chosen


def _measured(own: Compute, *, others: Mapping[str, Compute]) -> dict[str, Any]:
    """The name of the fastest, all seconds, and why others were refused."""
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name, other in others.items():
        try:
            reason = _difference(own, other)
            if reason is None:
                seconds[name] = gpu_seconds(other)
        except Exception as error:  # noqa: BLE001  # of a library that does not support this shape or GPU
            reason = f"{type(error).__name__}: {error}"[:300]
        if reason is not None:
            refused[name] = reason
    if not seconds:
        return {"chosen": OWN, "refused": refused}
    mine = gpu_seconds(own)
    fastest = min(seconds, key=lambda name: seconds[name])
    chosen = fastest if seconds[fastest] < FASTER * mine else OWN
    return {"chosen": chosen, "seconds": {OWN: mine} | seconds, "refused": refused}


def _difference(own: Compute, other: Compute) -> str | None:
    """Why the results of `other` cannot take the place of ztk's, or None."""
    for mine, one, two in zip(own(), other(), other(), strict=True):
        if not torch.equal(one, two):
            return "two calls differ"
        if mine.shape != one.shape or mine.dtype != one.dtype or mine.stride() != one.stride():
            return f"a result is {one.dtype} {tuple(one.shape)} with strides {one.stride()}"
        error = (one.float() - mine.float()).norm()
        if not error <= _NEAR[mine.dtype] * mine.float().norm():
            return f"a result differs by {float(error):.3g}"
    return None


def _write(path: Path, document: dict[str, Any], *, replace: bool = False) -> None:
    """Writes the file. Without `replace`, another process's file stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".tmp", delete=False) as file:
        json.dump(document, file)
    made = Path(file.name)
    try:
        if replace:
            made.replace(path)
        else:
            os.link(made, path)
    except FileExistsError:
        pass
    finally:
        made.unlink(missing_ok=True)


def gpu_seconds(run: Compute, *, calls: int = 3) -> float:
    """Mean seconds of a call, after one that may compile."""
    run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(calls):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / (1e3 * calls)


def _digest(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@functools.cache
def _versions(device: torch.device) -> tuple[str, ...]:
    """The GPU, and the versions of all that may compute attention."""
    packages = importlib.metadata.packages_distributions().get(PACKAGE, [])
    installed = (f"{name} {importlib.metadata.version(name)}" for name in packages)
    cudnn = f"cudnn {torch.backends.cudnn.version()}"
    return torch.cuda.get_device_name(device), torch.__version__, triton.__version__, cudnn, *installed
