"""The training loop as a library: steps, evaluations, checkpoints and a record, with hooks between them."""

from ztk.train.loop import Callback, Loop

__all__ = ["Callback", "Loop"]
