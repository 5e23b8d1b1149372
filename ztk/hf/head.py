"""TRL's loss over the head's weight, at stage 3.

It gathers the weight itself, in the forward and once more in the backward. What autograd gives back there is no parameter in ztk but the
gathered values themselves, so nothing is left to gather.
"""

import functools
from types import ModuleType

from torch import nn


def complete(utils: ModuleType) -> None:
    """utils: trl.trainer.utils."""
    original = utils.maybe_gather_lm_head_ctx

    @functools.wraps(original)
    def maybe_gather_lm_head_ctx(*params):
        return original(*(parameter for parameter in params if isinstance(parameter, nn.Parameter)))

    utils.maybe_gather_lm_head_ctx = maybe_gather_lm_head_ctx
