"""Keys of `plan`, and what a plan does not trace."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from ztk.core.policies.key import When, key, tasks
from ztk.core.policies.peers import Way
from ztk.core.policies.ranges import Range

_PLAN = tasks("plan")
_PLANNED = When(
    "task=plan and hardware=NAME",
    lambda config, machine: config.task.name == "plan" and config.hardware.name is not None,
)
_SEARCHES = When(
    "task=plan and plan.search=true",
    lambda config, machine: config.task.name == "plan" and bool(config.plan.search),
)


@dataclass(kw_only=True)
class PlanConfig:
    """What `task=plan` does beside the plan of the command line. `plan` has no options, only keys."""

    acts: ClassVar = _PLANNED
    optional: ClassVar = True

    search: bool | None = key(
        "plan the best layouts (zero stage, offload, recompute and degrees of topology) of the same global batch, and rank them; null: false",
        acts=_PLAN,
    )
    way: Way | None = key(
        "how operations on rows are computed: ztk, eager (PyTorch's operations) or compiled (torch.compile), to plan another library's run; "
        "null: ztk"
    )
    fp8: bool | None = key("linear layers multiply in fp8, as torchao's do; null: false")
    again: float | None = key(
        "share of a forward's products that another library computes again in a backward; null: 0",
        range=Range(low=0, high=1),
    )
    traced: int | None = key(
        "layouts that plan.search=true plans; null: 20", range=Range(low=1, high=10_000), acts=_SEARCHES
    )


def untraced(*, partition: str | None) -> Iterator[str]:
    """One line per fault. partition: of a pipeline; None without one."""
    if partition == "profile":
        yield "topology.partition=profile: a plan computes nothing and cannot measure layers; use topology.partition=parameters"
