"""Records the order in which buckets are used in a pass, to prefetch in the next one."""

from collections.abc import Iterator

from ztk.zero.buckets.bucket import Bucket


class UseTrace:
    """Uses of buckets from one start of the model to the next: forward, then backward.

    Prefetching depends on recorded uses and sizes only, never on time, so all ranks issue the same collectives in the same order.
    """

    def __init__(self) -> None:
        self._recorded: list[Bucket] = []
        self._current: list[Bucket] = []
        self._cursor = 0

    def restart(self) -> None:
        """Begins a new pass; the last one becomes the forecast."""
        if self._current:
            self._recorded = self._current
        self._current, self._cursor = [], 0

    def use(self, bucket: Bucket) -> None:
        """Records a use of `bucket`. The cursor moves past it in the forecast, or stays if the forecast has no further use of it."""
        self._current.append(bucket)
        for position in range(self._cursor, len(self._recorded)):
            if self._recorded[position] is bucket:
                self._cursor = position + 1
                return

    def ahead(self) -> Iterator[Bucket]:
        """The rest of the forecast."""
        return iter(self._recorded[self._cursor :])

    def distance_to(self, bucket: Bucket) -> int | None:
        """Elements used before the next use of `bucket`, or None if the forecast has none."""
        distance = 0
        for other in self.ahead():
            if other is bucket:
                return distance
            distance += other.size
        return None
