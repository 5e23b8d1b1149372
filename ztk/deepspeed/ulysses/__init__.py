"""Sequence parallelism in scripts: DeepSpeed's names on top of the all-to-alls of `ztk.parallel.sequence`."""
