"""Definition of MFU and HFU for plans, runs and scripts.

MFU, model FLOPs utilization, as in the PaLM paper (https://arxiv.org/abs/2204.02311, appendix B): the operations of the model's forward and
backward, divided by the operations that the devices could compute in the same time at their peak rate in the computing dtype. Attention
counts without its causal mask, and nothing that is computed twice counts twice. HFU, hardware FLOPs utilization, also counts recomputation:
of activations, and of the scores in the backward of fused attention.
"""

from dataclasses import dataclass

AGAIN = (
    1 / 6
)  # share of attention's operations: its backward has five products instead of four, because it recomputes the scores


def utilization(flops: float, *, seconds: float, rate: float) -> float:
    """MFU of the model's operations, HFU of the computed ones. flops: operations of one device in `seconds`. rate: its peak, per second."""
    return flops / seconds / rate


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Operations of one step over all devices, and the peak of a device.

    hardware_flops: None if not counted. rate: operations per second of a device at its peak. source: origin of the rate.
    """

    model_flops: int
    hardware_flops: int | None
    devices: int
    rate: float
    source: str

    def shares(self, seconds: float) -> dict[str, float]:
        """`mfu` and `hfu` of steps that take `seconds`; without `hfu` where the operations were not counted."""
        counted = {"mfu": self.model_flops, "hfu": self.hardware_flops}
        return {
            name: utilization(flops / self.devices, seconds=seconds, rate=self.rate)
            for name, flops in counted.items()
            if flops is not None
        }

    def as_dict(self) -> dict[str, float | str]:
        """The keys of `summary.json`."""
        values = {
            "model_flops": self.model_flops,
            "hardware_flops": self.hardware_flops,
            "peak_flops_per_second": self.rate,
        }
        return {key: value for key, value in values.items() if value is not None} | {"peak_flops_source": self.source}
