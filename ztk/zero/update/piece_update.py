"""The update of one piece in memory: by ztk's own optimizers, or by the step of a torch optimizer.

Master weights and gradients have any floating-point dtype, the control is fp32.
"""

from torch import Tensor

from ztk.core.runtime.planned import is_host_memory
from ztk.kernels import UpdatePart, tiles_of
from ztk.optim import FlatOptimizer, GroupTable, TorchStep
from ztk.optim.muon import step_along
from ztk.zero.buckets.layout import Fragment
from ztk.zero.buckets.piece import Piece
from ztk.zero.update.missed import MissedUpdates
from ztk.zero.update.norms import TrustRatios


class PieceUpdate:
    """Runs the fused update over pieces: on a device one launch for all segments of a piece but Muon's matrices, on a CPU one call for each."""

    def __init__(
        self, optimizer: FlatOptimizer, *, groups: GroupTable, missed: MissedUpdates, norms: TrustRatios | None
    ) -> None:
        """missed: the updates that parameters have missed. norms: LAMB's, whose `run` must precede the pieces of a step."""
        self._optimizer, self._missed, self._group_of = optimizer, missed, groups.row_of
        self._norms = norms
        self._scales = [row.muon_scale for row in groups.rows]
        self._tiles: dict[Piece, Tensor] = {}  # of pieces that are updated by one launch

    def run(
        self,
        piece: Piece,
        *,
        master: Tensor,
        gradient: Tensor,
        rows: dict[str, Tensor],
        control: Tensor,
        out: Tensor | None,
        skipped: frozenset[str],
    ) -> None:
        """Updates `master` and `rows` in place.

        master: [n]; gradient: scaled and summed, [n]; rows: state -> its row, of the optimizer's format; control: [groups, 16]; out: 16-bit
        [n] that receives the cast master. skipped: names of parameters that stay unchanged.
        """
        if self._norms is not None:
            self._run_lamb(piece, master=master, rows=rows, control=control, out=out, skipped=skipped)
            return
        apart = self._apart(piece, skipped=skipped, master=master, gradient=gradient, rows=rows, control=control)
        if self._is_one_launch(piece, master=master):
            self._optimizer.step(
                master,
                grad=gradient,
                states=self._optimizer.format.cut(rows, start=0, stop=piece.numel),
                control=control,
                out=out,
                tiles=self._tiles_of(piece, master=master),
            )
            segments = ()
        else:
            segments = piece.segments
        for segment in segments:
            cut = slice(segment.start - piece.start, segment.stop - piece.start)
            if scale := self._scales[segment.group]:
                step_along(
                    master[cut],
                    direction=gradient[cut],
                    scale=scale,
                    control=control[segment.group],
                    out=None if out is None else out[cut],
                )
                continue
            self._optimizer.step(
                master[cut],
                grad=gradient[cut],
                states=self._cut(rows, place=cut, piece=piece),
                control=control[segment.group],
                out=None if out is None else out[cut],
                position=segment.position,
            )
        for place, values in apart.values():
            for row, value in zip((master[place], *self._cut(rows, place=place, piece=piece)), values, strict=True):
                row.copy_(value)
            if out is not None:
                out[place].copy_(master[place])

    def _is_one_launch(self, piece: Piece, *, master: Tensor) -> bool:
        """Whether one launch updates the piece. Not on the CPU, where calls are cheap and use torch's kernels."""
        segments = piece.segments
        return len(segments) > 1 and _is_on_device(master) and not any(self._scales[cut.group] for cut in segments)

    def _tiles_of(self, piece: Piece, *, master: Tensor) -> Tensor:
        """The tiles of a piece, built once from numbers on the host."""
        if piece not in self._tiles:
            parts = [
                UpdatePart(
                    start=cut.start - piece.start, stop=cut.stop - piece.start, row=cut.group, position=cut.position
                )
                for cut in piece.segments
            ]
            self._tiles[piece] = tiles_of(parts, device=master.device)
        return self._tiles[piece]

    def _cut(self, rows: dict[str, Tensor], *, place: slice, piece: Piece) -> tuple[Tensor, ...]:
        """The rows of the elements of `place`, which begins and ends at groups of the format, or at the padding after a parameter. Empty
        for a matrix, whose momentum is stored separately."""
        if piece.moments is not None:
            if not piece.moments.has_moments(place):
                return ()
            place = piece.moments.moments_of(place)
        return self._optimizer.format.cut(rows, start=place.start, stop=place.stop)

    def _apart(
        self,
        piece: Piece,
        *,
        skipped: frozenset[str],
        master: Tensor,
        gradient: Tensor,
        rows: dict[str, Tensor],
        control: Tensor,
    ) -> dict[str, tuple[slice, list[Tensor]]]:
        """By name: place, master and final states of parameters that this step skips, and of those that have missed updates.

        The latter are updated on a copy of their segment, because the cut of a buffer decides how a kernel rounds (multiples of 16
        elements).
        """
        found: dict[str, tuple[slice, list[Tensor]]] = {}
        if not (skipped or self._missed.counts):
            return found
        for fragment in piece.fragments:
            if fragment.name in skipped:
                place = fragment.place
                own = (master[place], *self._cut(rows, place=place, piece=piece))
                found[fragment.name] = place, [row.clone() for row in own]
        for segment in piece.segments:
            cut = slice(segment.start - piece.start, segment.stop - piece.start)
            late: dict[int, list[Fragment]] = {}
            for fragment in piece.fragments:
                count = self._missed.counts.get(fragment.name, 0)
                if count and fragment.name not in found and cut.start <= fragment.place.start < cut.stop:
                    late.setdefault(count, []).append(fragment)
            for fragments in late.values() if not self._scales[segment.group] else ():
                copied = master[cut].clone()
                states = {
                    row.name: value.clone()
                    for row, value in zip(
                        self._optimizer.format.rows, self._cut(rows, place=cut, piece=piece), strict=True
                    )
                }
                own = self._missed.control_of(fragments[0].name, control=control, group=segment.group)
                self._optimizer.step(
                    copied, grad=gradient[cut], states=tuple(states.values()), control=own, position=segment.position
                )
                for fragment in fragments:
                    place = slice(fragment.place.start - cut.start, fragment.place.stop - cut.start)
                    moments = self._optimizer.format.cut(states, start=place.start, stop=place.stop)
                    found[fragment.name] = fragment.place, [copied[place], *moments]
        return found

    def _run_lamb(
        self,
        piece: Piece,
        *,
        master: Tensor,
        rows: dict[str, Tensor],
        control: Tensor,
        out: Tensor | None,
        skipped: frozenset[str],
    ) -> None:
        """Updates parameter by parameter. The averages in `rows` are updated already."""
        lamb = self._optimizer.lamb
        assert lamb is not None and self._norms is not None
        if out is not None:
            out.copy_(master)  # for skipped parameters and padding
        for fragment in piece.fragments:
            if fragment.name not in skipped:
                place = fragment.place
                lamb.step(
                    master[place],
                    exp_avg=rows["exp_avg"][place],
                    exp_avg_sq=rows["exp_avg_sq"][place],
                    ratio=self._norms.ratios[fragment.name].to(control.device),
                    control=self._missed.control_of(
                        fragment.name, control=control, group=self._group_of[fragment.name]
                    ),
                    out=None if out is None else out[place],
                )


class TorchPieceUpdate:
    """Runs the step of a torch optimizer over pieces."""

    def __init__(self, optimizer: TorchStep) -> None:
        self._optimizer = optimizer

    def run(
        self,
        piece: Piece,
        *,
        master: Tensor,
        gradient: Tensor,
        rows: dict[str, Tensor],
        control: Tensor,
        out: Tensor | None,
        skipped: frozenset[str],
    ) -> None:
        """Updates a piece like `PieceUpdate.run`: [n], and [groups, 16]."""
        places = {part.name: part.place for part in piece.fragments if part.name not in skipped}
        self._optimizer.step(master, grad=gradient, rows=rows, control=control[0], places=places)
        if out is not None:
            out.copy_(master)


def _is_on_device(master: Tensor) -> bool:
    return master.device.type != "cpu" and not is_host_memory(master.untyped_storage())
