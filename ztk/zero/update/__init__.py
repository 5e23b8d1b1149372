"""Optimizers over shards, wherever these are stored: the update piece by piece, and what Muon and LAMB need of other ranks."""
