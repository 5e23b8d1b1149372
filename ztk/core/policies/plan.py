"""What a plan does not trace."""

from collections.abc import Iterator


def untraced(*, partition: str | None) -> Iterator[str]:
    """One line per fault. partition: of a pipeline; None without one."""
    if partition == "profile":
        yield "topology.partition=profile: a plan computes nothing and cannot measure layers; use topology.partition=parameters"
