"""Activations recomputed in the backward instead of saved, applied to a plain module from outside."""

from ztk.core.policies.recompute import RecomputeMode, RecomputePolicy
from ztk.parallel.recompute.apply import recompute_blocks
from ztk.parallel.recompute.region import Regions

__all__ = ["RecomputeMode", "RecomputePolicy", "Regions", "recompute_blocks"]
