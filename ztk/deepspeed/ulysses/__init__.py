"""Sequences that a script divides over ranks: DeepSpeed's names over the all-to-alls of `ztk.parallel.sequence`."""
