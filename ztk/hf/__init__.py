"""Support for Hugging Face libraries. Adjusts them when a script imports them (`watch`), and trains their models in the main job."""

from ztk.hf.watch import watch

__all__ = ["watch"]
