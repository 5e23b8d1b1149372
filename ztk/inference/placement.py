"""Device, formats and cache layout of a model's weights."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ztk.core.policies.inference import cache_faults, cache_of
from ztk.inference.policy import InferencePolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """kind: the weights' format, a name of `InferencePolicy.weights`. dtype: of activations. cache: slabs, whose products are the processor's
    own, or blocks, whose products are ztk's kernels. exact: see `ztk.kernels.linear_rows`."""

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    kind: str = "stored"
    cache: str = "slabs"
    exact: bool = True

    @property
    def has_blocks(self) -> bool:
        """Keys and values are in blocks, and ztk's kernels compute."""
        return self.cache == "blocks"

    def place(self, value: Tensor) -> Tensor:
        """Moves a parameter of any shape to the device. Linear layers have their products instead."""
        return value.detach().to(self.device, self.dtype)


def placement_of(policy: InferencePolicy, *, module: nn.Module) -> Placement:
    """Where the engine computes `module`.

    Raises:
        ValueError: an option of the policy needs the other kind of cache.
    """
    parameter = next(module.parameters())
    device = torch.device(policy.device) if policy.device else parameter.device
    if device.type == "meta":  # a module without values, with a training engine
        device = torch.device("cpu")
    for fault in cache_faults(policy, device=device.type, streams=policy.offload is not None):
        raise ValueError(fault)
    cache = cache_of(policy.cache, device=device.type)
    if cache == "slabs":
        return Placement(kind=policy.weights)
    if policy.weights == "bf16":
        return Placement(device=device, dtype=torch.bfloat16, cache=cache, exact=policy.exact)
    dtype = torch.float32 if device.type == "cpu" else parameter.dtype
    return Placement(device=device, dtype=dtype, kind=policy.weights, cache=cache, exact=policy.exact)
