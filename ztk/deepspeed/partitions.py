"""`partition_uniform` and `partition_balanced` of `deepspeed.runtime.utils`: where `PipelineModule` cuts its layers."""

from collections.abc import Sequence

from ztk.parallel.pipeline.partition import balanced, uniform


def partition_uniform(num_items: int, num_parts: int) -> list[int]:
    """num_parts + 1 bounds: part p is items [bounds[p], bounds[p + 1]). With fewer items than parts the last parts are empty."""
    _check_parts(num_parts)
    if num_items <= num_parts:
        return [min(part, num_items) for part in range(num_parts + 1)]
    return [0, *(part.stop for part in uniform(num_items, num_stages=num_parts))]


def partition_balanced(weights: Sequence[float], num_parts: int) -> list[int]:
    """Bounds like `partition_uniform`'s, of the cut whose heaviest part is lightest; of several, the most even one."""
    _check_parts(num_parts)
    if len(weights) <= num_parts:
        return partition_uniform(len(weights), num_parts)
    return [0, *(part.stop for part in balanced(weights, num_stages=num_parts))]


def _check_parts(num_parts: int) -> None:
    if num_parts < 1:
        raise ValueError(f"num_parts={num_parts}: must be 1 or more")
