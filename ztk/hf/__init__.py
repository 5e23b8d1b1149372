"""Hugging Face over ztk: changes its libraries need beyond the name `deepspeed`, made when a script imports them; see `watch`."""

from ztk.hf.watch import watch

__all__ = ["watch"]
