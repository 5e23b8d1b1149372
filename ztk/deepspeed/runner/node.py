"""One machine of a run: the plan that every machine receives, the command of one rank, and the ranks of this machine.

python -m ztk.deepspeed.runner.node PLAN NODE     # NODE: the machine's number in the plan, or its name
"""

import ast
import base64
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from ztk.core.launch import Child, allocator_settings, first_cause, python_path, run_children
from ztk.deepspeed.names import SHIM
from ztk.deepspeed.runner.hosts import Host


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """One run of one script.

    script: a path, a module's name if `module`, or any command if not `python`.
    pass_local_rank: passes --local_rank to a script that declares it.
    log_folder: one file per rank, instead of the terminal.
    bind_cores: pins every rank to its own part of `cores`, which defaults to all.
    run_id: unique for the run.
    """

    hosts: tuple[Host, ...]
    master_addr: str
    master_port: int
    script: str
    arguments: tuple[str, ...]
    module: bool
    python: bool
    pass_local_rank: bool
    log_folder: str | None
    bind_cores: bool
    cores: tuple[int, ...] | None
    quiet: bool
    run_id: str

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return sum(len(host.slots) for host in self.hosts)

    def first_rank_of(self, node: int) -> int:
        """Returns a machine's first rank. Ranks are numbered machine by machine."""
        return sum(len(host.slots) for host in self.hosts[:node])

    def encoded(self) -> str:
        """Encodes the plan as one word of a command line."""
        return base64.urlsafe_b64encode(json.dumps(dataclasses.asdict(self)).encode()).decode()

    @staticmethod
    def decoded(word: str) -> "Plan":
        """Decodes the result of `encoded`."""
        values = json.loads(base64.urlsafe_b64decode(word))
        hosts = tuple(Host(name=host["name"], slots=tuple(host["slots"])) for host in values.pop("hosts"))
        tuples = {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
        return Plan(hosts=hosts, **(values | tuples))


def run_node(plan: Plan, *, node: int) -> int:
    """Runs the machine's ranks to their end. Returns 0, or the exit code of the rank that failed first, after all have ended.

    Returns 2 if none was started, and prints the reason.
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
    """Returns the environment variables that DeepSpeed's launcher and torchrun set, and the path on which ztk is `deepspeed`."""
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
    """Returns an equal part of `cores` for every rank; a remainder is not used. Raises ValueError if there are fewer cores than ranks."""
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
    }  # from the run that started this one
    environment = inherited | rank_environment(plan, node=node, local_rank=local_rank)
    # By default every rank would start one thread per core. A value set by the user is kept.
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


# Declarations of the argument: argparse, click and the like, or a dataclass for Hugging Face's parser.
_DECLARED = re.compile(r"""["'](--local[_-]rank)["'=]|^\s+(local_rank)\s*:""", re.MULTILINE)


def rank_command(plan: Plan, *, local_rank: int) -> list[str]:
    """Returns the rank's command.

    DeepSpeed appends --local_rank to every script, and scripts without it fail; here it is appended only if declared.
    """
    python = [sys.executable, "-u"] if plan.python else []
    module = ["-m"] if plan.module else []
    word = local_rank_word(plan.script, module=plan.module) if plan.pass_local_rank else None
    own = [f"{word}={local_rank}"] if word else []
    return [*python, *module, plan.script, *own, *plan.arguments]


def local_rank_word(script: str, *, module: bool = False) -> str | None:
    """Returns `--local_rank` or `--local-rank`, as declared by `script` or a module next to it, or None."""
    path = _file_of_module(script) if module else Path(script)
    if path is None or not path.is_file():
        return None
    for source in _with_neighbours(path):
        if match := _DECLARED.search(source):
            return match[1] or "--local_rank"
    return None


def _with_neighbours(path: Path, *, seen: set[Path] | None = None) -> Iterator[str]:
    """Yields the text of a file, and of the modules that it imports from its own folder."""
    seen = set() if seen is None else seen
    if path in seen:
        return
    seen.add(path)
    text = path.read_text(encoding="utf-8", errors="replace")
    yield text
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(".".join(filter(None, (node.module, alias.name))) for alias in node.names)}
    for name in sorted(filter(None, names)):
        place = path.parent.joinpath(*name.split("."))
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if file.is_file():
                yield from _with_neighbours(file, seen=seen)


def _file_of_module(name: str) -> Path | None:
    """Returns the file that `python -m name` runs, without importing its parent packages."""
    path = [str(Path.cwd()), *sys.path]
    *above, last = name.split(".")
    for part in above:
        spec = PathFinder.find_spec(part, path)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = list(spec.submodule_search_locations)
    spec = PathFinder.find_spec(last, path)
    if spec is None:
        return None
    if spec.submodule_search_locations:
        return Path(next(iter(spec.submodule_search_locations))) / "__main__.py"
    return Path(spec.origin) if spec.origin else None


def _main(arguments: list[str]) -> int:
    plan, node = Plan.decoded(arguments[0]), arguments[1]
    names = [host.name for host in plan.hosts]
    return run_node(plan, node=int(node) if node.isdigit() else names.index(node))


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
