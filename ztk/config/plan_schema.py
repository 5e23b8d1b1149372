"""The keys of `plan`: what task=plan does beside the plan of the command line."""

from dataclasses import dataclass

from ztk.config.key import key
from ztk.core.policies.peers import Way
from ztk.core.policies.ranges import Range


@dataclass(kw_only=True)
class PlanConfig:
    """What `task=plan` does beside the plan of the command line. `plan` has no options, only keys."""

    search: bool | None = key(
        "plan the best layouts (zero stage, offload, recompute and degrees of topology) of the same global batch, and rank them; null: false",
        default=None,
    )
    way: Way | None = key(
        "how operations on rows are computed: ztk, eager (PyTorch's operations) or compiled (torch.compile), to plan another library's run; "
        "null: ztk",
        default=None,
    )
    fp8: bool | None = key("linear layers multiply in fp8, as torchao's do; null: false", default=None)
    again: float | None = key(
        "share of a forward's products that another library computes again in a backward; null: 0", default=None
    )
    traced: int | None = key("layouts that plan.search=true plans; null: 20", default=None)


PLAN_RANGES = {"plan.traced": Range(low=1, high=10_000), "plan.again": Range(low=0, high=1)}
