"""Optimizer updates over stored shards, piece by piece, and the exchanges between ranks that Muon and LAMB need."""
