"""Flat buffers of parameters, cut into shards: their layout, the collectives of shards, and the placement of parameters and gradients."""
