"""The ranks of one machine.

python -m ztk.deepspeed.runner.node PLAN NODE     # NODE: the machine's number in the plan, or its name
"""

import os
import sys
import time
from pathlib import Path

from ztk.core.launch import Child, allocator_settings, first_cause, python_path, run_children
from ztk.deepspeed.names import SHIM
from ztk.deepspeed.runner.plan import Plan
from ztk.deepspeed.runner.script import rank_command


def run_node(plan: Plan, *, node: int) -> int:
    """Runs the machine's ranks to their end. Returns 0, or the exit code of the rank that failed first; all have ended by then.

    2: none was started, because of what is printed.
    """
    folder = None if plan.log_folder is None else Path(plan.log_folder)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    try:
        children = [_child(plan, node=node, local_rank=n, folder=folder) for n in range(_ranks(plan, node))]
    except ValueError as error:
        print(f"[ztk] {error}", file=sys.stderr)
        return 2
    failures = run_children(children)
    if not failures:
        return 0
    cause = first_cause(failures)
    print(f"[ztk] {cause}; the other ranks were stopped", file=sys.stderr)
    return cause.code


def rank_environment(plan: Plan, *, node: int, local_rank: int) -> dict[str, str]:
    """What DeepSpeed's launcher and torchrun tell a rank, and the path on which ztk is `deepspeed`."""
    host, ranks = plan.hosts[node], _ranks(plan, node)
    return {
        "RANK": str(plan.first_rank_of(node) + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(plan.world_size),
        "LOCAL_WORLD_SIZE": str(ranks),
        "LOCAL_SIZE": str(ranks),
        "CROSS_RANK": str(node),
        "CROSS_SIZE": str(len(plan.hosts)),
        "MASTER_ADDR": plan.master_addr,
        "MASTER_PORT": str(plan.master_port),
        "CUDA_VISIBLE_DEVICES": ",".join(host.slots),
        "PYTHONPATH": python_path(SHIM),
    }


def cores_of(local_rank: int, *, ranks: int, cores: tuple[int, ...]) -> tuple[int, ...]:
    """An equal part of `cores` for every rank, what is left over for none. Raises ValueError for fewer cores than ranks."""
    each = len(cores) // ranks
    if not each:
        raise ValueError(
            f"--bind_cores_to_rank: {ranks} ranks on {len(cores)} cores; give --bind_core_list {ranks} or more"
        )
    return cores[local_rank * each : (local_rank + 1) * each]


def _child(plan: Plan, *, node: int, local_rank: int, folder: Path | None) -> Child:
    ranks, mine = _ranks(plan, node), sorted(os.sched_getaffinity(0))
    bound = cores_of(local_rank, ranks=ranks, cores=plan.cores or tuple(mine)) if plan.bind_cores else None
    inherited = {
        key: value for key, value in os.environ.items() if key != "ZTK_STORE"
    }  # of a run this one was started by
    environment = inherited | rank_environment(plan, node=node, local_rank=local_rank)
    # Every rank would start a thread per core. Who set a number meant it.
    environment = {"OMP_NUM_THREADS": str(max(1, len(mine) // ranks))} | allocator_settings() | environment
    if bound:
        environment["OMP_NUM_THREADS"] = str(len(bound))
    rank = plan.first_rank_of(node) + local_rank
    return Child(
        rank=rank,
        command=rank_command(plan, local_rank=local_rank),
        environment=environment,
        log=None if folder is None else folder / f"{time.strftime('%Y%m%d%H%M%S')}_rank{rank}.log",
        cores=bound,
    )


def _ranks(plan: Plan, node: int) -> int:
    return len(plan.hosts[node].slots)


def _main(arguments: list[str]) -> int:
    plan, node = Plan.decoded(arguments[0]), arguments[1]
    names = [host.name for host in plan.hosts]
    return run_node(plan, node=int(node) if node.isdigit() else names.index(node))


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
