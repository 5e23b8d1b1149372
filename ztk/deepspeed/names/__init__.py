"""The module names below `deepspeed`: their contents, and the finder that makes Python import them."""

from ztk.deepspeed.names.finder import SHIM, install
from ztk.deepspeed.names.tree import lookup

__all__ = ["SHIM", "install", "lookup"]
