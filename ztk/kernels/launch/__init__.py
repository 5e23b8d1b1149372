"""Registers ops with torch, chooses sizes, allocates results and starts compiled kernels."""
