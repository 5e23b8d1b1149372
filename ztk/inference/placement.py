"""Device and formats of a model's weights."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ztk.core.policies.inference import InferencePolicy, device_faults
from ztk.core.policies.tier import Tier


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """kind: the weights' format, a name of `InferencePolicy.weights`. dtype: dtype of activations. by_kernels: ztk's kernels compute
    products and draws, as on every GPU; otherwise products are the processor's own. exact: see `ztk.kernels.linear_rows`."""

    device: torch.device = torch.device("cpu")
    dtype: torch.dtype = torch.float32
    kind: str = "stored"
    by_kernels: bool = False
    exact: bool = True

    def place(self, value: Tensor) -> Tensor:
        """Moves a parameter of any shape to the device. Linear layers have their products instead."""
        return value.detach().to(self.device, self.dtype)


def placement_of(policy: InferencePolicy, *, module: nn.Module) -> Placement:
    """Where the engine computes `module`.

    Raises:
        ValueError: an option of the policy needs another device.
    """
    parameter = next(module.parameters())
    device = torch.device(policy.device) if policy.device else parameter.device
    if device.type == "meta":  # a module without values, with a training engine
        device = torch.device("cpu")
    tier = Tier.none if policy.offload is None else policy.offload.parameters
    for fault in device_faults(policy, device=device.type, tier=tier, by_kernels=policy.kernels is True):
        raise ValueError(fault)
    by_kernels = device.type != "cpu" or policy.weights == "fp8" if policy.kernels is None else policy.kernels
    if not by_kernels:
        return Placement(kind=policy.weights)
    if policy.weights == "bf16":
        return Placement(device=device, dtype=torch.bfloat16, by_kernels=True, exact=policy.exact)
    dtype = torch.float32 if device.type == "cpu" else parameter.dtype
    return Placement(device=device, dtype=dtype, kind=policy.weights, by_kernels=True, exact=policy.exact)
