"""The name `deepspeed`: what every module under it holds, and how Python finds them."""

from ztk.deepspeed.names.finder import SHIM, install
from ztk.deepspeed.names.tree import lookup

__all__ = ["SHIM", "install", "lookup"]
