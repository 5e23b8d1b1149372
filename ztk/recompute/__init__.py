"""Activations recomputed in the backward instead of saved, applied to a plain module from outside."""

from ztk.policies.recompute import RecomputeMode, RecomputePolicy
from ztk.recompute.apply import recompute_blocks
from ztk.recompute.region import Regions

__all__ = ["RecomputeMode", "RecomputePolicy", "Regions", "recompute_blocks"]
