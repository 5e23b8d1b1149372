"""Checkpoints by DeepSpeed's rules, and the files and types that scripts read and write themselves."""
