"""The memory tiers, and the kinds of state that move between them."""

from enum import StrEnum


class Tier(StrEnum):
    """Where bytes reside. The values are the words of the command line and of DeepSpeed's `OffloadDeviceEnum`."""

    none = "none"  # not offloaded: the memory that the model computes in
    cpu = "cpu"  # main memory, pinned if there is a GPU
    nvme = "nvme"  # a file; main memory holds the buffer pool only

    device = none  # how metrics and the memory ledger name them
    host = cpu

    @property
    def label(self) -> str:
        """The tier in metrics and ledgers: device, host or nvme."""
        return {"none": "device", "cpu": "host"}.get(self.value, self.value)


class StateKind(StrEnum):
    """Kinds of state that can be offloaded."""

    optim_states = "optim_states"  # the optimizer's moments, and the average of the weights
    hp_params = "hp_params"  # fp32 master weights; fp32 parameters have none
    lp_params = "lp_params"  # parameters, or their shards
    lp_grads = "lp_grads"  # reduced gradients
    contiguous_grad_buffer = "contiguous_grad_buffer"  # free buffers of gathered parameters and of unreduced gradients
