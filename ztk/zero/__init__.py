"""ZeRO: one policy of which states are sharded, for stages 0 to 3 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054)."""

from ztk.policies.zero import ZeroPolicy
from ztk.zero.state.shards import StateShard
from ztk.zero.zero import Zero

__all__ = ["StateShard", "Zero", "ZeroPolicy"]
