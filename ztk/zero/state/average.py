"""Temporarily replaces the weights by their moving average."""

from collections.abc import Iterator
from contextlib import contextmanager

from ztk.zero.buckets.bucket import Bucket
from ztk.zero.buckets.context import ZeroContext
from ztk.zero.gathering import Gathering
from ztk.zero.update.piece_states import PieceStates
from ztk.zero.update.update import ShardUpdate


class AveragedWeights:
    """Exchanges weights and average, shard by shard. is_shown: whether the parameters are the average now."""

    def __init__(
        self, buckets: list[Bucket], *, context: ZeroContext, update: ShardUpdate, gathering: Gathering
    ) -> None:
        """buckets: the trained ones."""
        self._buckets, self._states, self._has_average = buckets, PieceStates(context), context.ema is not None
        self._update, self._gathering = update, gathering
        self.is_shown = False

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Context in which the parameters are the average, cast to the model's dtype. Afterwards they and the master weights have their
        previous bits.

        A collective call, between steps. Raises RuntimeError if there is no average, it is shown already, or parameters are pinned.
        """
        if not self._has_average:
            raise RuntimeError("no average of the weights is kept: pass ema=EmaPolicy(decay=0.999) to parallelize")
        if self.is_shown:
            raise RuntimeError("the average is in the place of the weights already: leave engine.averaged() first")
        self._exchange()
        self.is_shown = True
        try:
            yield
        finally:
            self._exchange()
            self.is_shown = False

    def check_hidden(self, action: str) -> None:
        """Raises RuntimeError if the average is shown. action: the refused operation, for the message."""
        if self.is_shown:
            raise RuntimeError(
                f"{action} inside engine.averaged() would take the average for the weights: leave it first"
            )

    def _exchange(self) -> None:
        self._gathering.reshard_before_change()
        self._update.finish()  # takes over writes of a script, which the exchange would hide
        self._gathering.parameters_change()
        for bucket in self._buckets:
            for piece in bucket.pieces:
                self._states.exchange_average(bucket, piece=piece)
        for bucket in self._buckets:
            bucket.share_parameters()
