"""Describes this machine: versions, devices, ops, communication, direct I/O, memory, disk. `python -m ztk.report` prints it."""

import importlib.metadata
import os
import platform
import resource
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ztk.core.runtime.system_memory import machine_memory
from ztk.kernels import ALL_OPS, OpSpec
from ztk.report.environment import device_name, version
from ztk.report.units import format_bytes
from ztk.zero.offload.probe import probe_folder

_PACKAGES = (
    *("ztk", "torch", "triton", "numpy", "safetensors", "einops", "hydra-core", "wandb", "tensorboard"),
    *("transformers", "accelerate", "peft", "trl"),
)
_SHARED_MEMORY = Path("/dev/shm")
_SMALL_SHARED_MEMORY = 512 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """A title and its rows of name and value. faults: problems to fix."""

    title: str
    rows: tuple[tuple[str, str], ...]
    faults: tuple[str, ...] = ()


def describe_machine(*, folder: str | os.PathLike, runs_ops: bool) -> list[Section]:
    """Describes this machine in sections. folder: location of offload files. runs_ops: runs every op once, which compiles it on a GPU."""
    return [_versions(), _devices(), _ops(runs_ops), _communication(), _storage(folder), _memory()]


def render(sections: Iterable[Section]) -> str:
    """Formats sections like ds_report: a title, then `name ...... value`."""
    lines = []
    for section in sections:
        lines += ["-" * 80, section.title, "-" * 80]
        lines += [f"{name} {'.' * max(2, 28 - len(name))} {value}" for name, value in section.rows]
        lines += [f"[WARNING] {fault}" for fault in section.faults]
    return "\n".join([*lines, "-" * 80])


def _versions() -> Section:
    rows = [("python", platform.python_version())]
    rows += [(package, version(package) or "not installed") for package in _PACKAGES]
    rows += [("ztk lies in", str(Path(__file__).parents[1])), ("torch lies in", str(Path(torch.__file__).parent))]
    other = _deepspeed()
    rows.append(("the name deepspeed", other))
    return Section(title="Versions", rows=tuple(rows))


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
    if not torch.cuda.is_available():
        built = torch.version.cuda or torch.version.hip
        rows.append(("GPU", "none" if built else "none: this torch is built for CPUs only"))
        return Section(title="Devices", rows=tuple(rows))
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
    faults = []
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


def _storage(folder: str | os.PathLike) -> Section:
    path, faults = Path(folder).resolve(), []
    rows = [("folder", str(path)), ("free on its disk", format_bytes(shutil.disk_usage(path).free))]
    try:
        kind = probe_folder(path, direct=True).kind or "its filesystem"
        rows.append(("asynchronous direct I/O", f"yes, on {kind}: offload_optimizer.device=nvme may use it"))
    except ValueError as error:
        rows.append(("asynchronous direct I/O", "no"))
        faults.append(str(error))
    return Section(title="Disk for offloading (choose another with --folder)", rows=tuple(rows), faults=tuple(faults))


def _memory() -> Section:
    rows = []
    if found := machine_memory():
        rows.append(("main memory", f"{format_bytes(found['MemAvailable'])} of {format_bytes(found['MemTotal'])} free"))
        rows.append(("swap", f"{format_bytes(found['SwapFree'])} of {format_bytes(found['SwapTotal'])} free"))
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    rows.append(("lockable by a process", "all" if locked == resource.RLIM_INFINITY else format_bytes(locked)))
    return Section(title="Memory", rows=tuple(rows))
