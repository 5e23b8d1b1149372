"""Update of a moving average of weights, with the same bits for any cut of a shard and on every device."""

from torch import Tensor

ELEMENTS = 1 << 18  # at once on a CPU: temporaries fit its cache
ELEMENTS_ON_A_GPU = 1 << 26  # at once on a GPU: four launches per 256 MiB


def update_average(average: Tensor, *, weights: Tensor, decay: float, skip: Tensor | None = None) -> None:
    """average += (1 - decay) (weights - average), in place.

    average, weights: fp32 [n] on one device. skip: a scalar on it; if it is not 0 the average keeps its bits. If omitted, the average is
    always updated.

    Every operation rounds separately: a fused multiply-add, which torch's lerp and add(alpha=) may use, would make the bits depend on the
    processor, and on the device of the tier.
    """
    elements = ELEMENTS if average.device.type == "cpu" else ELEMENTS_ON_A_GPU
    for own, new in zip(average.split(elements), weights.split(elements), strict=True):
        change = (new - own).mul_(1 - decay)
        if skip is not None:
            change.masked_fill_(skip != 0, -0.0)  # x + -0.0 is x, with its sign
        own.add_(change)
