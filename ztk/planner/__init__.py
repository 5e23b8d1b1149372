"""Plans a run before it starts: memory, traffic and time, from the real engine over tensors without values."""

from ztk.core.policies.peers import Peer, Way
from ztk.planner.fitting import Fix, fixes
from ztk.planner.layouts import Layout, Workload
from ztk.planner.operations import Operations, count_operations
from ztk.planner.plan import plan
from ztk.planner.price import Price
from ztk.planner.result import Plan
from ztk.planner.rollouts import RolloutPlan, RolloutWork, plan_rollout
from ztk.planner.search import Found, Search, search
from ztk.planner.trace import RankTrace
from ztk.planner.tracker import Peak

__all__ = [
    "Fix",
    "Found",
    "Layout",
    "Operations",
    "Peak",
    "Peer",
    "Plan",
    "Price",
    "RankTrace",
    "RolloutPlan",
    "RolloutWork",
    "Search",
    "Way",
    "Workload",
    "count_operations",
    "fixes",
    "plan",
    "plan_rollout",
    "search",
]
