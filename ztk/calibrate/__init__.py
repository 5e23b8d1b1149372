"""Measures this machine for `hardware=here` of a plan: `python -m ztk.calibrate`. `measure` runs on every rank."""

from ztk.calibrate.measure import combine, measure

__all__ = ["combine", "measure"]
