"""Mixtures of experts under DeepSpeed's names.

`deepspeed.moe.layer.MoE` is `ztk.parallel.moe.MoE`; its `ep_size`, or the configuration's, determines the mesh.
"""

from ztk.deepspeed.experts.layers import expert_degree, give_layer_options

__all__ = ["expert_degree", "give_layer_options"]
