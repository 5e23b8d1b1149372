"""ZeRO stages 0 to 3 (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054) and offload: sharding, gathering and updates."""
