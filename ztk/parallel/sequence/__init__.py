"""Sequence parallelism: each rank has a part of every sequence, and all-to-alls around attention give it all
tokens of some heads (DeepSpeed-Ulysses). Applied to a plain module from outside.
"""

from ztk.parallel.sequence.cut import Divisible, cut_sequences, divides_sequences

__all__ = ["Divisible", "cut_sequences", "divides_sequences"]
