"""Mixtures of experts by DeepSpeed's names: `deepspeed.moe.layer.MoE` is `ztk.moe.MoE`, and its `ep_size` makes the mesh."""

from ztk.deepspeed.experts.mesh import expert_topology

__all__ = ["expert_topology"]
