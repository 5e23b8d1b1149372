"""Tensor, sequence, expert and pipeline parallelism, recomputation, and `apply.parallelize`, which combines them with ZeRO."""
