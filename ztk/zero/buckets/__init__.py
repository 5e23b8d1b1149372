"""Flat buffers of parameters, cut into shards: where everything lies in them, how shards are sent, and where parameters and gradients are."""
