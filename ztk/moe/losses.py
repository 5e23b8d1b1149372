"""The losses that routers add to the training by themselves."""

from torch import Tensor, nn

from ztk.nn.balance import RouterLosses


def scale_router_losses(model: nn.Module, *, loss_scale: Tensor) -> None:
    """From now on they are scaled as the model's loss is, by a device scalar that may change."""
    for module in model.modules():
        if isinstance(module, RouterLosses):
            module.loss_scale = loss_scale
