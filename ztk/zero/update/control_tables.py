"""The decision of a step, in each memory where pieces are updated."""

from dataclasses import dataclass

from torch import Tensor

from ztk.zero.buckets.piece import Piece


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlTables:
    """The table of `step_control`, fp32 [groups, 16], in both memories. host: None if no piece is updated there."""

    device: Tensor
    host: Tensor | None

    def of(self, piece: Piece) -> Tensor:
        """The table in the memory where `piece` is updated."""
        if not piece.stores.updates_on_host:
            return self.device
        assert self.host is not None, "some pieces are updated on the host"
        return self.host

    @property
    def nearest(self) -> Tensor:
        """The table that the host reads without waiting, if there is one."""
        return self.device if self.host is None else self.host

    def clone(self) -> "ControlTables":
        """A copy that the next step does not change."""
        return ControlTables(device=self.device.clone(), host=None if self.host is None else self.host.clone())
