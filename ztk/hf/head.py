"""TRL's loss that reads the head's weight, at stage 3.

TRL gathers the weight in the forward and again in the backward. In ztk's backward, autograd returns the gathered values instead of a
parameter, so there is nothing to gather.
"""

import functools
from types import ModuleType

from torch import nn


def complete(utils: ModuleType) -> None:
    """Adjusts TRL's loss. utils: the module trl.trainer.utils."""
    original = utils.maybe_gather_lm_head_ctx

    @functools.wraps(original)
    def maybe_gather_lm_head_ctx(*params):
        return original(*(parameter for parameter in params if isinstance(parameter, nn.Parameter)))

    # pyrefly: ignore[missing-attribute]  # replaces a function of the module
    utils.maybe_gather_lm_head_ctx = maybe_gather_lm_head_ctx
