"""Keys of the ranks of a run, and of the job that starts them."""

import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from ztk.core.policies.key import Changes, When, key
from ztk.core.policies.machine import Machine
from ztk.core.policies.ranges import COUNT_OR_ZERO, Range
from ztk.core.policies.runs import aligns, trains
from ztk.core.policies.train import YEAR

if TYPE_CHECKING:
    from ztk.core.policies.config import Config


class DeviceName(StrEnum):
    """launch.device: the device of the ranks."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Starter(StrEnum):
    """launch.starter: the program that starts the ranks."""

    local = "local"  # run.py on this machine, or torchrun, srun or mpirun around it
    slurm = "slurm"  # srun in a job that run.py submits
    ray = "ray"  # workers of Ray Train on a Ray cluster, of which run.py is the driver


@dataclass(frozen=True, slots=True)
class Line:
    """A text that stays on one line. pattern: matches the whole text. words: describe it."""

    pattern: str = r"[^\n\r]*\S[^\n\r]*"
    words: str = "text on one line"

    @property
    def brief(self) -> str:
        """The accepted texts."""
        return self.words

    def fault(self, value: Any) -> str:
        """Why `value` is refused, or "". Of a list, every entry must be accepted."""
        listed = value if isinstance(value, list) else [value]
        return "" if all(re.fullmatch(self.pattern, str(each)) for each in listed) else f"must be {self.words}"


_WORD = Line(pattern=r"[^\s'\"]+", words="a name without spaces")
_TIME = Line(
    pattern=r"\d+(:\d+){0,2}|\d+-\d+(:\d+){0,2}", words="minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS:MINUTES:SECONDS"
)
_COUNT = Range(low=1, high=65_536)
_STARTS = When(
    "python run.py; torchrun starts ranks again by itself, with --max-restarts",
    lambda config, machine: not machine.started_ranks,
)
_LOCAL = When(
    "launch=local by python run.py; torchrun has --numa-binding, srun --cpu-bind",
    lambda config, machine: not machine.started_ranks and config.launch.starter is Starter.local,
)
_MEETS = When(
    "torchrun, srun, launch=slurm and launch=ray; ranks that run.py starts have no such limit",
    lambda config, machine: bool(machine.started_ranks) or config.launch.starter is not Starter.local,
)
_TRAINS = When("tasks that train, such as task=pretrain", lambda config, machine: trains(config))
_ELASTIC = When(
    "launch.elastic=true", lambda config, machine: bool(config.launch.elastic) and not machine.started_ranks
)
SLURM = When(
    "launch=slurm",
    lambda config, machine: config.launch.starter is Starter.slurm,
    "launch",
    lambda launch: launch.starter is Starter.slurm,
)
_RAY = When("launch=ray", lambda config, machine: config.launch.starter is Starter.ray)
_ELSEWHERE = When(
    "launch=slurm or launch=ray",
    lambda config, machine: config.launch.starter is not Starter.local,
    "launch",
    lambda launch: launch.starter is not Starter.local,
)


def _elastic(config: "Config") -> Iterator[str]:
    launch = config.launch
    if launch.elastic and not config.checkpoint.every and config.task.name != "plan":
        yield (
            "launch.elastic=true cannot continue without checkpoints: use checkpoint=periodic, or checkpoint.every=N"
        )
    if launch.elastic and aligns(config):
        yield f"launch.elastic=true: task={config.task.name} does not go on with fewer ranks by itself; use launch.elastic=false"


def _max_failures(config: "Config") -> Iterator[str]:
    if config.launch.max_failures and trains(config) and not config.checkpoint.every:
        yield (
            f"launch.max_failures={config.launch.max_failures} starts at step 1 again without checkpoints: use checkpoint=periodic, or "
            "checkpoint.every=N"
        )


def _debug(config: "Config") -> Iterator[str]:
    launch = config.launch
    if launch.debug is not None and "launch.timeout_seconds" in config.given:
        yield "launch.timeout_seconds: a rank in a debugger stops for any time, so launch.debug has no time limit; leave one of them out"
    if launch.debug is not None and launch.elastic:
        yield "launch.debug: launch.elastic starts ranks again, which have no terminal; leave one of them out"


def _min_ranks(config: "Config") -> Iterator[str]:
    launch = config.launch
    if launch.elastic and launch.ranks and launch.min_ranks and launch.min_ranks > launch.ranks:
        yield f"launch.min_ranks={launch.min_ranks} with launch.ranks={launch.ranks}: use launch.min_ranks={launch.ranks}"


def _gpus(config: "Config") -> Iterator[str]:
    launch = config.launch
    if launch.gpus_per_node and launch.device != DeviceName.cpu and launch.gpus_per_node < ranks_per_node(launch):
        yield (
            f"launch.gpus_per_node={launch.gpus_per_node}: {ranks_per_node(launch)} ranks of a node need a GPU each; use "
            f"launch.ranks_per_node={launch.gpus_per_node}, or launch.device=cpu"
        )


@dataclass(kw_only=True)
class LaunchConfig:
    """The ranks of a run. Under torchrun or srun they exist already, and only threads, time limits, device and slowest_every apply."""

    changes: ClassVar = Changes.nothing

    starter: Starter = key(
        "local: this command, or the launcher around it, starts the ranks; slurm: this command checks the run and submits a job; ray: "
        "workers of Ray Train start them",
        default=Starter.local,
    )
    ranks: int | None = key(
        "number of ranks; null: as the topology requires, else one per GPU, two without a GPU",
        range=_COUNT,
    )
    threads: int | None = key(
        "CPU threads per rank; null: OMP_NUM_THREADS, else the cores divided by the ranks",
        range=Range(low=1, high=4096),
    )
    bind_cores: bool | None = key(
        "binds each rank to cores of its own, and so to their memory: of the NUMA node of its GPU, else an equal share",
        default=False,
        acts=_LOCAL,
        idle=False,
    )
    timeout_seconds: float = key("seconds that a collective may wait for a rank", default=MISSING, range=YEAR)
    start_seconds: float | None = key(
        "seconds in which all ranks must arrive at the start; null: launch.timeout_seconds",
        range=YEAR,
        optional=True,
        acts=_MEETS,
    )
    setup_seconds: float | None = key(
        "seconds that a run may spend outside of steps, evaluations and saves: on model, data and checkpoint before the first step",
        default=14_400.0,
        range=YEAR,
        acts=_TRAINS,
    )
    compile_seconds: float | None = key(
        "seconds of the first step, which compiles kernels", default=3600.0, range=YEAR, acts=_TRAINS
    )
    step_seconds: float | None = key(
        "seconds of every other step; null: ten times the longest one so far, and at least launch.timeout_seconds",
        range=YEAR,
        optional=True,
        acts=_TRAINS,
    )
    eval_seconds: float | None = key("seconds of an evaluation", default=3600.0, range=YEAR, acts=_TRAINS)
    save_seconds: float | None = key(
        "seconds that a step may wait for a checkpoint, and a background save for its slowest rank",
        default=3600.0,
        range=YEAR,
        acts=_TRAINS,
    )
    slowest_every: int | None = key(
        "rows of metrics.jsonl between lines that name the slowest of several ranks, its host and its phase; 0: no lines",
        default=100,
        range=COUNT_OR_ZERO,
        acts=_TRAINS,
        idle=0,
    )
    device: DeviceName = key("where the ranks compute; auto: on GPUs if there are any", default=MISSING)
    elastic: bool | None = key(
        "when ranks are killed, continue with the others from the latest checkpoint, with the same global batch",
        acts=_STARTS,
        contradicts=_elastic,
    )
    debug: int | None = key(
        "rank that has the terminal, for breakpoint() and pdb; the other ranks write to ranks/, and no collective waits in vain",
        range=Range(low=0, high=65_535),
        optional=True,
        acts=_STARTS,
        contradicts=_debug,
    )
    min_ranks: int | None = key("fewest ranks to continue with", range=_COUNT, acts=_ELASTIC, contradicts=_min_ranks)
    max_failures: int | None = key(
        "how often all ranks start again after one has failed or its machine is lost, from the latest checkpoint",
        default=0,
        range=Range(low=0, high=65_536),
        acts=_RAY,
        contradicts=_max_failures,
    )
    nodes: int | None = key("nodes of the job", default=1, range=_COUNT, acts=SLURM)
    gpus_per_node: int | None = key(
        "GPUs of a node that the job asks for; null: none, or as launch.sbatch asks",
        range=_COUNT,
        optional=True,
        acts=SLURM,
        contradicts=_gpus,
    )
    ranks_per_node: int | None = key(
        "tasks of a node; null: launch.gpus_per_node, else launch.ranks divided by the nodes, else 1",
        range=_COUNT,
        optional=True,
        acts=SLURM,
    )
    cpus_per_rank: int | None = key(
        "cores of a rank; null: the partition's default, one with launch=ray",
        range=_COUNT,
        optional=True,
        acts=_ELSEWHERE,
    )
    time: str | None = key(
        "time limit of the job, as in 24:00:00; null: the partition's", range=_TIME, optional=True, acts=SLURM
    )
    partition: str | None = key("partition; null: the cluster's default", range=_WORD, optional=True, acts=SLURM)
    account: str | None = key("account that pays; null: the user's default", range=_WORD, optional=True, acts=SLURM)
    container: str | None = key(
        "words between srun and python: --container-image=/images/ztk.sqsh, or apptainer exec --nv /images/ztk.sif",
        range=Line(),
        optional=True,
        acts=SLURM,
    )
    python: str | None = key(
        "interpreter on the nodes or in the container; null: the one of this command",
        range=Line(),
        optional=True,
        acts=SLURM,
    )
    sbatch: list[str] | None = key(
        "further options of sbatch, as in [--constraint=a100,--mail-type=END]",
        range=Line(pattern=r"-[^\n\r]+", words="options of sbatch, which start with -"),
        optional=True,
        acts=SLURM,
    )
    setup: list[str] | None = key(
        "shell lines of the job in front of srun, as in ['module load cuda']", range=Line(), optional=True, acts=SLURM
    )
    signal_seconds: int | None = key(
        "seconds before the time limit at which Slurm sends SIGUSR1: the ranks save the running step, and the job requeues itself",
        default=300,
        range=Range(low=1, high=65_535),
        acts=SLURM,
    )
    requeues: int | None = key(
        "how often a job that saved after a signal may go into the queue again",
        default=100,
        range=Range(low=0, high=65_536),
        acts=SLURM,
    )
    dry_run: bool | None = key("print the job and submit nothing, as does --dry-run", default=False, acts=SLURM)


def start_seconds(launch: LaunchConfig) -> float:
    """Seconds in which all ranks must arrive at the start."""
    return launch.timeout_seconds if launch.start_seconds is None else launch.start_seconds


def ranks_per_node(launch: LaunchConfig) -> int:
    """The number of tasks on a node of a Slurm job."""
    shared = (launch.ranks or 1) // max(1, launch.nodes or 1)
    return launch.ranks_per_node or launch.gpus_per_node or max(1, shared)


def computing_machine(launch: LaunchConfig, *, machine: Machine) -> Machine:
    """The machine whose resources a run has: `machine`, or the machines of the job or the Ray cluster, if this
    one may have no GPU."""
    if launch.starter is Starter.local or machine.started_ranks:
        return machine
    if launch.starter is Starter.ray:
        ranks = launch.ranks or 1
        cores = ranks * (launch.cpus_per_rank or 1)
        gpus = ranks if launch.device == DeviceName.cuda else 0
        return Machine(gpus=gpus, cores=cores, started_ranks=ranks, started_here=ranks)
    each = ranks_per_node(launch)
    gpus = launch.gpus_per_node or (each if launch.device == DeviceName.cuda else 0)
    return Machine(
        gpus=gpus,
        cores=each * (launch.cpus_per_rank or 1),
        started_ranks=each * max(1, launch.nodes or 1),
        started_here=each,
    )
