"""`offload_states` and `reload_states`: free an engine's memory for other uses between steps."""

from collections.abc import Container

from ztk.core.policies.tier import StateKind
from ztk.core.runtime import Tier
from ztk.deepspeed.tools.log import logger
from ztk.train.engine import Engine
from ztk.zero.offload import OffloadPolicy

OffloadStateTypeEnum = StateKind  # DeepSpeed's name, with the same members
OffloadDeviceEnum = Tier  # DeepSpeed's name, with the same values


class StateOffload:
    """Moves the states of one engine. Methods are collective calls."""

    def __init__(self, engine: Engine, *, policy: OffloadPolicy) -> None:
        self._policy = policy
        self._state_offloader = engine.zero.offloader

    def offload(
        self,
        include: Container[StateKind] | None = None,
        device: OffloadDeviceEnum | str = OffloadDeviceEnum.cpu,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """See `DeepSpeedEngine.offload_states`. Raises ValueError for nvme, and if the configuration offloads parameters."""
        target = OffloadDeviceEnum(device)
        if target is OffloadDeviceEnum.none:
            logger.warning("offload_states(device='none'): nothing is moved; use device='cpu'")
            return
        if target is OffloadDeviceEnum.nvme:
            raise ValueError("offload_states(device='nvme'): states leave for main memory only; use device='cpu'")
        if self._policy.parameters is not Tier.none:
            raise ValueError(
                "offload_states: the configuration offloads parameters (zero_optimization.offload_param), whose gathered buffers "
                "come and go with every pass; there is nothing left to move"
            )
        kinds = [kind for kind in StateKind if include is None or kind in include]
        self._state_offloader.offload(kinds, pin_memory=pin_memory, non_blocking=non_blocking)

    def reload(self, non_blocking: bool = False) -> None:
        """See `DeepSpeedEngine.reload_states`."""
        self._state_offloader.reload(non_blocking=non_blocking)

    def need(self, *kinds: StateKind, operation: str) -> None:
        """Raises RuntimeError if one of `kinds` is offloaded. kinds: defaults to all."""
        absent = self._state_offloader.absent.intersection(kinds) if kinds else self._state_offloader.absent
        if absent:
            names = ", ".join(sorted(absent))
            raise RuntimeError(f"{operation}: {names} were moved away by offload_states; call reload_states() before")
