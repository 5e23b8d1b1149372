"""Checkpoints with DeepSpeed's interface, and the files and types that scripts read and write themselves."""
