"""Describes this machine and what to do about each line that is not right. `python -m ztk.report` prints it, like ds_report.

With `--run` it also measures the disk and starts a tiny run of two ranks with every launcher that is installed.
"""

import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ztk.core.runtime.system_memory import available_memory, machine_memory, memory_limit, process_limit
from ztk.kernels import ALL_OPS, OpSpec
from ztk.report.environment import device_name, version
from ztk.report.units import format_bytes
from ztk.zero.offload.disk import DiskFile
from ztk.zero.offload.pool import AlignedRegion
from ztk.zero.offload.probe import probe_folder

_PACKAGES = (
    *("ztk", "torch", "triton", "numpy", "safetensors", "einops", "hydra-core", "wandb", "tensorboard"),
    *("transformers", "accelerate", "peft", "trl"),
)
_EXTRAS = {"tensorboard": "tensorboard"} | dict.fromkeys(("transformers", "accelerate", "peft", "trl"), "hf")
_GPU_FILES = ("/dev/nvidia0", "/dev/kfd")  # of the drivers of NVIDIA and AMD
_LITTLE_DISK = 10**10
_SHARED_MEMORY = Path("/dev/shm")
_SMALL_SHARED_MEMORY = 512 * 2**20
_TESTED = Path(__file__).parents[2] / "constraints.txt"  # in a checkout
_NETWORK_DISKS = ("nfs", "nfs4", "lustre", "gpfs", "ceph", "beegfs", "cifs", "smb3", "fuse.sshfs", "9p")
_BLOCK_BYTES, _FILE_BYTES = 8 << 20, 256 << 20
_THREADS, _FILES = 2048, 4096  # of a node with eight ranks, and of a rank among 1,000
_RUN_SECONDS = 300
_COMMAND = "import sys; from ztk.cli import main; sys.argv[0] = 'ztk'; sys.exit(main())"
_TINY = ("model=nano", "zero=stage3", "train.steps=2", "data=synthetic", "launch.device=cpu", "logger=disabled")


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A title and its rows of name and value. faults: problems to fix."""

    title: str
    rows: tuple[tuple[str, str], ...]
    faults: tuple[str, ...] = ()


def describe_machine(*, folder: str | os.PathLike, runs_ops: bool, runs: bool = False) -> list[Section]:
    """Describes this machine in sections. folder: location of offload files. runs_ops: runs every op once, which compiles it on a GPU. runs:
    measures the disk and starts a tiny run with each launcher, which takes about a minute."""
    sections = [_versions(), _devices(), _ops(runs_ops), _communication(), _storage(folder, measures=runs), _memory()]
    return [*sections, _processes(), _launchers(runs=runs)]


def render(sections: Sequence[Section]) -> str:
    """Formats sections like ds_report: a title, then `name ...... value`."""
    lines = []
    for section in sections:
        lines += ["-" * 80, section.title, "-" * 80]
        lines += [f"{name} {'.' * max(2, 28 - len(name))} {value}" for name, value in section.rows]
        lines += [f"[WARNING] {fault}" for fault in section.faults]
    return "\n".join([*lines, "-" * 80, _count(sum(len(section.faults) for section in sections))])


def _count(faults: int) -> str:
    return f"{faults} to fix, see [WARNING] above" if faults else "nothing to fix"


def _versions() -> Section:
    rows = [("python", platform.python_version())]
    tested = dict(line.split("==") for line in _lines(_TESTED) if "==" in line)
    for package in _PACKAGES:
        own = version(package)
        other = tested.get(package, own)
        differs = own is not None and own.partition("+")[0] != (other or "").partition("+")[0]
        if own is None:
            extra = _EXTRAS.get(package)
            rows.append((package, f'not installed; pip install "ztk[{extra}]"' if extra else "not installed"))
        else:
            advice = f"; the tests run with {other}: pip install {package}=={other} if something fails"
            rows.append((package, own + advice * differs))
    rows += [("ztk lies in", str(Path(__file__).parents[1])), ("torch lies in", str(Path(torch.__file__).parent))]
    other = _deepspeed()
    rows.append(("the name deepspeed", other))
    return Section(title="Versions", rows=tuple(rows))


def _lines(path: Path) -> list[str]:
    return path.read_text().split() if path.is_file() else []


def _deepspeed() -> str:
    try:
        found = importlib.metadata.version("deepspeed")
    except importlib.metadata.PackageNotFoundError:
        return "free; ztk uses it under python -m ztk.deepspeed and after ztk.deepspeed.install()"
    if found.endswith("+ztk"):
        return f"ztk's, as {found}"
    return f"DeepSpeed {found}, except under python -m ztk.deepspeed and after ztk.deepspeed.install()"


def _devices() -> Section:
    cpu = torch.device("cpu")
    rows = [("processor", f"{device_name(cpu)}, {os.cpu_count()} cores")]
    rows.append(("vector instructions", torch.backends.cpu.get_cpu_capability()))
    faults = []
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    rows.append(("C compiler", compiler or "none"))
    if compiler is None and torch.cuda.is_available():
        faults.append("there is no C compiler, with which Triton builds its launchers: apt install gcc python3-dev")
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        rows.append(("GPU", "none" if built else "none: this torch is built for CPUs only"))
        if driver := next(filter(os.path.exists, _GPU_FILES), None):
            how = (
                "see whether nvidia-smi or rocm-smi lists it, and unset CUDA_VISIBLE_DEVICES"
                if built
                else "install torch for it, see pytorch.org/get-started"
            )
            faults.append(f"{driver} exists, and torch finds no GPU: {how}")
        return Section(title="Devices", rows=tuple(rows), faults=tuple(faults))
    rows.append(("CUDA of torch", str(torch.version.cuda or torch.version.hip)))
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        capability = ".".join(map(str, torch.cuda.get_device_capability(number)))
        name = torch.cuda.get_device_name(number)
        rows.append((f"GPU {number}", f"{name}, {capability}, {format_bytes(free)} of {format_bytes(total)} free"))
        if torch.cuda.get_device_capability(number) < (8, 0) and torch.version.cuda:
            faults.append(f"GPU {number} has no bfloat16: use fp16")
    return Section(title="Devices", rows=tuple(rows), faults=tuple(faults))


def _ops(runs: bool) -> Section:
    on_gpu = torch.cuda.is_available()
    how = "Triton, compiled at first use" if on_gpu else "torch on the processor"
    rows, faults = [], []
    for spec in sorted(ALL_OPS, key=lambda spec: spec.name):
        problem = _try(spec, device="cuda" if on_gpu else "cpu") if runs else None
        rows.append((spec.name, f"{how}{', ran' if runs and problem is None else ''}"))
        if problem is not None:
            faults.append(f"{spec.name} does not run: {problem}")
    if on_gpu and version("triton") is None:
        faults.append("triton is not installed: pip install triton")
    title = "Ops: nothing is compiled at installation" + ("" if runs else "; --run_ops runs each of them once")
    return Section(title=title, rows=tuple(rows), faults=tuple(faults))


def _try(spec: OpSpec, *, device: str) -> str | None:
    """Runs the op once. Returns the error, or None."""
    try:
        inputs = spec.make_inputs(spec.small_shapes[0], dtype=spec.dtypes[0], device=device, **spec.variants[0])
        spec.op(**inputs)
        if device == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - the report is about any error
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return None


def _communication() -> Section:
    rows = [
        ("gloo", "yes" if dist.is_gloo_available() else "no"),
        ("NCCL", ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "no"),
    ]
    name, faults = socket.gethostname(), []
    if not dist.is_gloo_available():
        faults.append("this torch has no gloo, by which CPU ranks communicate: install torch from PyPI or pytorch.org")
    if torch.cuda.is_available() and not dist.is_nccl_available():
        faults.append("this torch has no NCCL, by which GPUs communicate: install torch from PyPI or pytorch.org")
    try:
        rows.append(("address of this host", f"{name}, {socket.gethostbyname(name)}"))
    except OSError:
        rows.append(("address of this host", f"{name}, unknown"))
        faults.append(
            f"the name {name} has no address, and ranks of several machines find each other by names: add it to /etc/hosts"
        )
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as server,
            socket.create_connection(server.getsockname(), timeout=5),
        ):
            rows.append(("connection to itself", "yes"))
    except OSError as error:
        rows.append(("connection to itself", "no"))
        faults.append(
            f"ranks cannot connect to 127.0.0.1 ({error.strerror or error}): allow connections of this host to itself"
        )
    if _SHARED_MEMORY.is_dir():
        space = shutil.disk_usage(_SHARED_MEMORY)
        rows.append(("shared memory (/dev/shm)", f"{format_bytes(space.free)} of {format_bytes(space.total)} free"))
        if space.total < _SMALL_SHARED_MEMORY:
            faults.append(
                "/dev/shm is small: ranks of one machine share memory there; in docker give --shm-size=1gb or more"
            )
    else:
        rows.append(("shared memory (/dev/shm)", "none; ranks communicate by sockets"))
    return Section(title="Communication", rows=tuple(rows), faults=tuple(faults))


def _storage(folder: str | os.PathLike, *, measures: bool) -> Section:
    path, faults = Path(folder).resolve(), []
    free = shutil.disk_usage(path).free
    rows = [("folder", str(path)), ("free on its disk", format_bytes(free))]
    if free < _LITTLE_DISK:
        faults.append(
            f"{path} has {format_bytes(free)} free, and a model with its AdamW states takes 16 bytes per parameter: free some, or choose "
            "another disk by hydra.run.dir and offload.nvme_path"
        )
    try:
        kind = probe_folder(path, direct=True).kind or "its filesystem"
        rows.append(("asynchronous direct I/O", f"yes, on {kind}: offload_optimizer.device=nvme may use it"))
        if kind in _NETWORK_DISKS:
            faults.append(f"{path} lies on {kind}, a disk across the network: offloading needs a disk of the machine")
        if measures:
            rows += _disk_rates(path)
    except ValueError as error:
        rows.append(("asynchronous direct I/O", "no"))
        faults.append(str(error))
    return Section(title="Disk for offloading (choose another with --folder)", rows=tuple(rows), faults=tuple(faults))


def _disk_rates(folder: Path) -> list[tuple[str, str]]:
    """Writes and reads a file with direct I/O, one request at a time. A run has several under way and may be faster."""
    region = AlignedRegion(nbytes=_BLOCK_BYTES, pin=False)
    disk = DiskFile(folder / f"ztk-report-{uuid.uuid4().hex}", direct=True)
    rows = []
    try:
        disk.preallocate(offset=0, nbytes=_FILE_BYTES)
        for name, move in (("written", disk.write), ("read", disk.read)):
            started = time.perf_counter()
            for offset in range(0, _FILE_BYTES, _BLOCK_BYTES):
                move(region.bytes, offset=offset)
            rate = _FILE_BYTES / (time.perf_counter() - started)
            rows.append((f"{name} per second", f"{format_bytes(rate)}, one request at a time"))
    finally:
        disk.close()
        region.close()
    return rows


def _memory() -> Section:
    rows = []
    if found := machine_memory():
        rows.append(("main memory", f"{format_bytes(found['MemAvailable'])} of {format_bytes(found['MemTotal'])} free"))
        rows.append(("swap", f"{format_bytes(found['SwapFree'])} of {format_bytes(found['SwapTotal'])} free"))
        if (limit := memory_limit()) is not None:
            rows.append(("limit of the container", f"{format_bytes(limit)}, {format_bytes(available_memory())} left"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rows.append(("lockable by a process", "all" if locked == resource.RLIM_INFINITY else format_bytes(locked)))
    return Section(title="Memory", rows=tuple(rows))


def _processes() -> Section:
    """Limits of processes, threads and open files, of this user and of the container."""
    limits = [
        limit for limit in (resource.getrlimit(resource.RLIMIT_NPROC)[0], process_limit()) if limit not in (None, -1)
    ]
    rows, faults = [("processes and threads", f"{min(limits):,}" if limits else "no limit")], []
    if limits and min(limits) < _THREADS:
        faults.append(
            f"only {min(limits):,} processes and threads may run, and ranks start up to a hundred threads each: raise `ulimit -u`, or "
            "the container's limit (docker run --pids-limit, podPidsLimit)"
        )
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # a start raises the soft limit to it
    rows.append(("open files of a process", "no limit" if files == resource.RLIM_INFINITY else f"{files:,}"))
    if files != resource.RLIM_INFINITY and files < _FILES:
        faults.append(f"a process may open {files:,} files, and gloo has a few for each other rank: raise `ulimit -Hn`")
    return Section(title="Processes", rows=tuple(rows), faults=tuple(faults))


def _launchers(*, runs: bool) -> Section:
    """The launchers that are installed. runs: starts two ranks with each; all must have the same losses."""
    start = [sys.executable, "-c", _COMMAND]
    commands = {
        "ztk": [*start, "launch.ranks=2"],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--no-python", *start],
    }
    if "SLURM_JOB_ID" in os.environ:  # srun outside of a job would wait for one
        commands["srun"] = ["srun", "--ntasks=2", "--overlap", *start]
    rows, faults, digests = [], [], {}
    for name, command in commands.items():
        if shutil.which(command[0]) is None:
            rows.append((name, "not installed"))
        elif not runs:
            rows.append((name, "installed"))
        else:
            digests[name], seconds, error = _tiny_run(command)
            rows.append((name, "failed" if error else f"two ranks trained in {seconds:.0f} s"))
            if error:
                faults.append(f"two ranks do not train with {name}: {error}")
    rows.append(("sbatch", "installed: launch=slurm submits jobs" if shutil.which("sbatch") else "not installed"))
    if len(set(digests.values()) - {None}) > 1:
        faults.append(f"the launchers' runs have unequal losses ({digests}): please report it")
    title = "Launchers" + ("" if runs else "; --run starts two ranks with each of them")
    return Section(title=title, rows=tuple(rows), faults=tuple(faults))


def _tiny_run(command: list[str]) -> tuple[str | None, float, str]:
    """The digest of the losses, the seconds of the command, and its last line of output if it failed."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        words = [*command, *_TINY, f"hydra.run.dir={folder}/run"]
        try:
            done = subprocess.run(words, check=False, cwd=folder, capture_output=True, text=True, timeout=_RUN_SECONDS)
        except subprocess.TimeoutExpired:
            return None, _RUN_SECONDS, f"it did not end within {_RUN_SECONDS} s"
        summary = Path(folder, "run", "summary.json")
        if done.returncode or not summary.is_file():
            lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            return None, 0.0, lines[-1].strip() if lines else f"exit code {done.returncode}"
        return json.loads(summary.read_text())["loss_digest"], time.perf_counter() - started, ""
