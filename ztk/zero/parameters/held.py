"""Memory of parameters that a script still references after the engine moved them: `p.data`, a numpy array, a state dict.

The engine gives parameters new memory, so writes to the old memory would be lost. A storage that outlives the move is checked
by a digest of its bits until the script drops it, and a change of it is an error. Most runs hold no such memory.
"""

import logging

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ztk.zero.parameters.bits import digest_of
from ztk.zero.parameters.partitioned import partitioned_of
from ztk.zero.parameters.watched import is_watched

logger = logging.getLogger(__name__)
_SHOWN = 5  # names in a message
_WAY_OUT = (
    "p.data, a numpy array or a state dict from before initialize (or parallelize) keeps the old values, because the engine moves parameters "
    "into its own memory. Take it afterwards, or keep a clone()"
)


class HeldMemory:
    """The current memory of the parameters of `model`. Call `start` after the engine has moved them."""

    def __init__(self, model: nn.Module) -> None:
        self._held: dict[str, tuple[StorageWeakRef, tuple]] = {}
        self._digests: dict[str, int] = {}
        buffers = {buffer.untyped_storage()._cdata for buffer in model.buffers() if _has_storage(buffer)}
        for name, parameter in model.named_parameters():
            is_moved = not is_watched(parameter)  # else the memory belongs to an earlier engine
            if is_moved and _has_storage(parameter) and partitioned_of(parameter) is None and parameter.numel():
                storage = parameter.untyped_storage()
                if storage._cdata not in buffers:  # the module itself keeps its buffers alive
                    place = parameter.dtype, parameter.storage_offset(), parameter.shape, parameter.stride()
                    self._held[name] = StorageWeakRef(storage), place

    def start(self, *, warns: bool) -> None:
        """Starts to check the memory that is still held. warns: logs a warning about it; set on one rank."""
        for name in list(self._held):
            digest = self._digest(name)
            if digest is not None:
                self._digests[name] = digest
        self._held = {name: self._held[name] for name in self._digests}
        if self._held and warns:
            logger.warning("the script still holds memory that parameters had (%s): %s", _listed(self._held), _WAY_OUT)

    def check(self) -> None:
        """Raises RuntimeError if a script has written into held memory since the last call."""
        if not self._held:
            return
        changed = []
        for name in list(self._held):
            digest = self._digest(name)
            if digest is None:
                del self._held[name], self._digests[name]
            elif digest != self._digests[name]:
                changed.append(name)
                self._digests[name] = digest
        if changed:
            raise RuntimeError(
                f"parameter {_listed(changed)}: the script wrote into memory that it had before initialize, and the write is lost: {_WAY_OUT}"
            )

    def _digest(self, name: str) -> int | None:
        """Digest of the memory's current bits, or None if it was freed."""
        reference, (dtype, offset, shape, stride) = self._held[name]
        if reference.expired():
            return None
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        if storage is None:
            return None
        value = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, stride)
        return int(digest_of(value))


def _has_storage(tensor: Tensor) -> bool:
    return not tensor.is_meta and tensor.layout is torch.strided and not nn.parameter.is_lazy(tensor)


def _listed(names: object) -> str:
    listed = list(names)
    return f"{', '.join(listed[:_SHOWN])}{' ...' * (len(listed) > _SHOWN)}"
