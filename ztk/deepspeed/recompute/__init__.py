"""Functions whose activations are recomputed, in DeepSpeed's words, and their random states."""
