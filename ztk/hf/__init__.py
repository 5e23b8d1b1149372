"""Hugging Face over ztk: what its libraries need beyond the name `deepspeed`. They are completed when a script imports them, see `watch`."""

from ztk.hf.watch import watch

__all__ = ["watch"]
