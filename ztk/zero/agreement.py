"""Checks that all ranks wrote the same values into parameters that are full on every rank.

Data-parallel ranks train one model. If a write differs between ranks, stage 0 trains a different model on each rank, and stages 1 to 3 keep
the values of the rank that stores the shard. A rank that detects a write makes its part of the gradient norm negative, which costs no
collective. The ranks compare digests of the written parameters only after a step in which some rank did so. On a GPU the host reads the
signs one step late, like the overflow status, and the ranks compare the digests that they kept.
"""

import math
from collections.abc import Container, Mapping

import torch
from torch import Tensor, nn

from ztk.core.runtime.planned import is_planned
from ztk.core.runtime.streams import Copy, is_capturing, start_copy
from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.parameters.bits import digest_of

_Key = tuple[int, int, int, str]  # ranks on the axes that divide a model, and the name there
_SHOWN = 5  # names in an error


class WriteAgreement:
    """Compares writes between steps. is_late: the host reads signs one step late; overridden in tests."""

    def __init__(self, buckets: list[Bucket], *, model: nn.Module, context: ZeroContext) -> None:
        self._comm, self._is_on = context.mesh.world, not is_planned(context.device)
        self.is_late = context.device.type == "cuda"
        self._parameters: dict[_Key, nn.Parameter] = {}
        self._keys: dict[str, _Key] = {}
        pp, tp, ep = (context.mesh.comm(axis).rank for axis in ("pp", "tp", "ep"))
        for bucket in buckets:
            if not bucket.traits.shards_parameters and bucket.comm.size > 1:
                for parameter, place in zip(bucket.parameters, bucket.layout.placements, strict=True):
                    key = (pp, tp, 0 if bucket.comm is context.mesh.comm("data") else ep, place.name)
                    self._keys[place.name], self._parameters[key] = key, parameter
        self._is_on &= self._comm.size > 1
        self._renormalised = {  # renormalised by each rank's own lookups
            f"{name}.weight".lstrip(".")
            for name, module in model.named_modules()
            if getattr(module, "max_norm", None) is not None and isinstance(module, nn.Embedding | nn.EmbeddingBag)
        }
        self._written: dict[_Key, bool] = {}  # since the last step; True if certainly written
        self._error: Exception | None = None  # this rank's error, found before the step
        self._digests: dict[_Key, tuple[Tensor, bool]] = {}  # of the last step, if signs are read late
        self._seen: Tensor | None = None  # if signs are read late
        self._pending: Copy | None = None

    def note(self, changed: Mapping[str, bool]) -> None:
        """Records parameters of this rank that were written since the last step: name -> whether the write is certain."""
        if self._is_on:
            for name in changed.keys() & self._keys.keys():
                key = self._keys[name]
                self._written[key] = self._written.get(key, False) or changed[name]

    def forget(self, names: Container[str] | None) -> None:
        """Drops records of these parameters, because the engine set them to the same values on every rank. names: defaults to all."""
        if self._written:
            self._written = (
                {} if names is None else {key: c for key, c in self._written.items() if key[-1] not in names}
            )

    @property
    def tells_errors(self) -> bool:
        """Whether an error of one rank is raised on all ranks. If False, only the rank with the error raises."""
        return self._is_on and not self.is_late

    def signed(self, squares: Tensor, *, error: Exception | None) -> Tensor:
        """This rank's part of the gradient norm, float64 [1], negative if the ranks must compare. error: why this rank cannot step."""
        self._error = error
        return -squares.abs() if self._written or error else squares

    def check(self, squares: Tensor) -> None:
        """squares: the parts of all ranks, [ranks, 1]. Raises RuntimeError on every rank if their writes differ. A collective call."""
        if not self._is_on:
            return
        if not self.is_late:
            if _is_any_negative(squares):
                self._compare()
        elif not is_capturing(squares):
            if self._seen is None:
                self._seen = torch.zeros(squares.shape, dtype=squares.dtype, pin_memory=squares.is_cuda)
            elif self._pending is not None:
                self._pending.synchronize()
            if _is_any_negative(self._seen):
                self._compare_late()
            self._pending = start_copy(squares, out=self._seen)
            if self._pending is None:
                self._seen.copy_(squares)
            self._digests = {
                key: (digest_of(self._parameters[key]), is_certain) for key, is_certain in self._written.items()
            }
        self._written = {}

    def _compare(self) -> None:
        own, self._error = self._error, None
        written, self._written = self._written, {}
        everyone = self._comm.gather_objects((None if own is None else str(own), list(written)))
        for rank, (text, _) in enumerate(everyone):
            if text is not None:
                raise own or RuntimeError(f"rank {rank}: {text}")
        wanted = {key for _, keys in everyone for key in keys}
        self._judge({key: (int(digest_of(self._parameters[key])), True) for key in wanted & self._parameters.keys()})

    def _compare_late(self) -> None:
        kept = {key: (int(digest), is_certain) for key, (digest, is_certain) in self._digests.items()}
        wanted = {key for keys in self._comm.gather_objects(list(kept)) for key in keys}
        self._judge({key: kept.get(key, (None, False)) for key in wanted & self._parameters.keys()})

    def _judge(self, own: dict[_Key, tuple[int | None, bool]]) -> None:
        """own: digests of parameters that this rank holds; None if this rank did not write the parameter."""
        everyone = self._comm.gather_objects(own)
        differing: dict[str, None] = {}
        for found in everyone:
            for key in found:
                held = [other[key] for other in everyone if key in other]
                digests = {digest for digest, _ in held if digest is not None}
                is_missed = any(digest is None for digest, _ in held) and any(is_certain for _, is_certain in held)
                if len(digests) > 1 or is_missed:
                    differing[key[-1]] = None
        if differing:
            raise RuntimeError(self._message(list(differing)))

    def _message(self, names: list[str]) -> str:
        shown = f"{', '.join(names[:_SHOWN])}{' ...' * (len(names) > _SHOWN)}"
        if self._renormalised.issuperset(names):
            return (
                f"parameter {shown}: an embedding with max_norm scales the rows that its rank looks up, so the ranks hold different weights "
                "now. Leave max_norm out and look up in a scaled copy: F.embedding(x, w * (max_norm / w.norm(dim=1, keepdim=True)).clamp("
                "max=1)) with w = self.embedding.weight; or call torch.renorm on the weight after every step, which is alike on all ranks"
            )
        return (
            f"parameter {shown}: the ranks wrote different values into it since the last step, or not every rank wrote, and they train one "
            "model. Write the same on every rank (one seed, or values sent by torch.distributed.broadcast), or inside "
            "deepspeed.zero.GatheredParameters(parameter, modifier_rank=0), which broadcasts rank 0's values"
        )


def _is_any_negative(values: Tensor) -> bool:
    """values: on the host, of any shape."""
    return any(math.copysign(1.0, value) < 0 for value in values.view(-1).tolist())
