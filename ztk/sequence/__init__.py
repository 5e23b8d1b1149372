"""Sequence parallelism: each rank holds a part of every sequence, and attention trades sequence for heads. Applied from outside."""

from ztk.sequence.cut import cut_sequences

__all__ = ["cut_sequences"]
