"""Activation recomputation and its random states, with DeepSpeed's interface."""
