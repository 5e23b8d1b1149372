"""Scaling of the losses that routers add to the model's loss."""

from torch import Tensor, nn

from ztk.nn.balance import RouterLosses


def scale_router_losses(model: nn.Module, *, loss_scale: Tensor) -> None:
    """Scales router losses like the model's loss, by a float32 device scalar that may change."""
    for module in model.modules():
        if isinstance(module, RouterLosses):
            module.loss_scale = loss_scale
