"""offload_optimizer, offload_param and aio: where shards are stored, and how files are read and written."""

from ztk.core.policies.offload import MAX_THREADS, PAGE_BYTES
from ztk.core.policies.ranges import PART
from ztk.deepspeed.config.keys import (
    Findings,
    anything,
    boolean,
    fixed,
    hint,
    number,
    one_of,
    read_section,
    shown,
    takes,
    whole_number,
)
from ztk.zero.offload import OffloadPolicy

_POOL = "ztk's pool of buffers for a disk is its own size, the same for optimizer and parameters"
_PIPELINE = "reading, updating and writing always overlap"
_device = one_of("none", "cpu", "nvme")


def _part(value: object) -> float:
    if reason := PART.fault(number(value)):
        raise ValueError(reason)
    return number(value)


OPTIMIZER = {
    "device": takes(_device),
    "nvme_path": takes(anything),
    "pin_memory": takes(boolean),
    "buffer_count": hint(whole_number(1), _POOL),
    "pipeline_read": hint(boolean, _PIPELINE),
    "pipeline_write": hint(boolean, _PIPELINE),
    "pipeline": hint(boolean, _PIPELINE),
    "fast_init": hint(boolean, "states are allocated in the tier they reside in, without a copy"),
    "ratio": takes(_part),
    "super_offload": fixed(False, why="not offered by ztk yet; leave it out"),
    "cpuadam_cores_perc": fixed(0.8, why="has an effect with super_offload only, which ztk does not offer yet"),
}
PARAMETERS = {
    "device": takes(_device),
    "nvme_path": takes(anything),
    "pin_memory": takes(boolean),
    "buffer_count": hint(whole_number(1), _POOL),
    "buffer_size": hint(whole_number(1), _POOL, auto=True),
    "max_in_cpu": hint(whole_number(0), "parameters on the disk have no copy in main memory", auto=True),
}
AIO = {
    "block_size": takes(whole_number(1)),
    "intra_op_parallelism": takes(whole_number(1, high=MAX_THREADS)),
    "queue_depth": hint(whole_number(1), "requests in flight are threads: set intra_op_parallelism"),
    "single_submit": hint(boolean, "requests are system calls of threads"),
    "overlap_events": hint(boolean, "requests always overlap", usual=(True,)),
    "use_gds": fixed(False, why="not offered: files go through main memory; leave it out"),
}
AIO["thread_count"] = AIO["intra_op_parallelism"]  # its name before DeepSpeed 0.15


def read_offload(
    given: dict, *, optimizer: object, parameters: object, stage: int, findings: Findings
) -> OffloadPolicy:
    """Returns the policy of both sections and of `aio`.

    given: the full configuration. optimizer, parameters: the two sections of zero_optimization, or None.
    """
    optim = _section(optimizer, name="offload_optimizer", keys=OPTIMIZER, findings=findings)
    param = _section(parameters, name="offload_param", keys=PARAMETERS, findings=findings)
    if param.get("device", "none") != "none" and stage < 3:
        findings.notes.append(
            f"zero_optimization.offload_param.device={param['device']}: acts at stage 3; this is stage {stage}, where every rank "
            "keeps all parameters"
        )
        param = {}
    places = {"offload_optimizer": optim.get("device", "none"), "offload_param": param.get("device", "none")}
    paths = {values["nvme_path"] for values in (optim, param) if values.get("nvme_path")}
    if len(paths) > 1:
        findings.faults.append(f"nvme_path: ztk uses one folder for everything it offloads; have {sorted(paths)}")
    pins = {values["pin_memory"] for values in (optim, param) if "pin_memory" in values}
    if len(pins) > 1:
        findings.notes.append(
            "zero_optimization.pin_memory: is true in one offload section and false in the other; both are pinned"
        )
    aio = _aio(given, uses_nvme="nvme" in places.values(), findings=findings)
    missing = "nvme" in places.values() and not paths
    if missing:
        return OffloadPolicy()
    try:
        return OffloadPolicy(
            optimizer=places["offload_optimizer"],
            optimizer_fraction=optim.get("ratio", 1.0),
            parameters=places["offload_param"],
            nvme_path=min(paths) if paths else None,
            pin_memory=pins
            != {False},  # if both differ, true: copies from pinned memory overlap, and nothing else changes
            **aio,
        )
    except ValueError as error:
        findings.faults.append(f"zero_optimization: {error}")
        return OffloadPolicy()


def _section(given: object, *, name: str, keys: dict, findings: Findings) -> dict:
    if given is None:
        return {}
    path = f"zero_optimization.{name}."
    values = read_section(given, path=path, keys=keys, findings=findings)
    if isinstance(given, dict) and "device" not in given:
        findings.faults.append(f"{path}device: is missing; give cpu, nvme or none")
    if values.get("nvme_path") in (None, "none", ""):  # Accelerate writes "none" for a missing path
        values.pop("nvme_path", None)
    elif not isinstance(values["nvme_path"], str):
        findings.faults.append(f"{path}nvme_path={values.pop('nvme_path')!r}: must be the path of a folder")
    device = values.get("device")
    if device == "nvme" and "nvme_path" not in values:
        findings.faults.append(f"{path}nvme_path: is missing; device=nvme needs a folder on the disk to use")
    if device in ("cpu", "none") and "nvme_path" in values:
        findings.notes.append(f"{path}nvme_path={shown(values.pop('nvme_path'))}: has no effect with device={device}")
    if device == "none":
        values.pop("pin_memory", None)
        if values.pop("ratio", 1.0) != 1.0:
            findings.notes.append(f"{path}ratio: has no effect with device=none")
    return values


def _aio(given: dict, *, uses_nvme: bool, findings: Findings) -> dict:
    section = _aio_section(given, findings=findings)
    if section is None:
        return {}
    values = read_section(section, path="aio.", keys=AIO, findings=findings)
    if (threads := values.pop("thread_count", None)) is not None:
        if values.setdefault("intra_op_parallelism", threads) != threads:
            findings.faults.append(
                "aio.thread_count: is the old name of intra_op_parallelism, which is given too; keep one"
            )
        findings.notes.append(
            f"aio.thread_count={threads}: is read as intra_op_parallelism, its name since DeepSpeed 0.15"
        )
    if not uses_nvme and section:
        findings.notes.append("aio: without effect while nothing is offloaded to nvme")
        return {}
    options = {}
    if "block_size" in values:
        options["block_bytes"] = -(-values["block_size"] // PAGE_BYTES) * PAGE_BYTES
    if "intra_op_parallelism" in values:
        options["threads"] = values["intra_op_parallelism"]
    return options


def _aio_section(given: dict, *, findings: Findings) -> object:
    """Returns the section `aio`, which DeepSpeed's documentation puts inside zero_optimization."""
    zero = given.get("zero_optimization")
    nested = zero.get("aio") if isinstance(zero, dict) else None
    section = given.get("aio")
    if nested is not None:
        if section is not None and section != nested:
            findings.faults.append(
                "zero_optimization.aio: differs from aio at the top level; keep the one at the top level"
            )
        findings.notes.append("zero_optimization.aio: is read as aio, its place at the top level of the configuration")
        section = nested if section is None else section
    return section
