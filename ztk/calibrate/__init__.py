"""`python -m ztk.calibrate`: measures this machine for `hardware=here` of a plan. `measure` is the program of a rank."""

from ztk.calibrate.measure import combine, measure

__all__ = ["combine", "measure"]
