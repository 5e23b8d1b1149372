"""The one place that combines the techniques: `parallelize` makes a plain module train under a memory strategy on a mesh."""

from ztk.parallel.apply import parallelize

__all__ = ["parallelize"]
