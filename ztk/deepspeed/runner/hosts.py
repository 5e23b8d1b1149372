"""Selects devices and machines from a hostfile and `--include`, `--exclude`, `--num_nodes`, `--num_gpus`."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import glob
from pathlib import Path

LOCALHOST = "localhost"
_LINE = re.compile(r"(?P<name>\S+)\s+slots=(?P<slots>\d+)\s*(#.*)?")
# Files of GPU drivers. Without any, there is no GPU, and importing torch, which takes seconds, is not needed.
_GPU_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/kfd")


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """A machine with its used devices, one rank each. slots: names as in CUDA_VISIBLE_DEVICES."""

    name: str
    slots: tuple[str, ...]


def read_hostfile(path: str | os.PathLike) -> list[Host]:
    """Reads lines `worker-0 slots=4`, one per machine; # begins a comment. Raises ValueError for any other line."""
    hosts: dict[str, Host] = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ValueError(f"--hostfile={path}, line {number}: {line!r} must look like `worker-0 slots=4`")
        if match["name"].startswith("-"):  # ssh would parse it as an option
            raise ValueError(
                f"--hostfile={path}, line {number}: {match['name']} is no machine's name: it begins with '-'"
            )
        if match["name"] in hosts:
            raise ValueError(f"--hostfile={path}, line {number}: {match['name']} is listed twice; keep one line")
        hosts[match["name"]] = Host(name=match["name"], slots=tuple(map(str, range(int(match["slots"])))))
    if not hosts:
        raise ValueError(f"--hostfile={path}: lists no machine; write `worker-0 slots=4`, a line for every machine")
    return list(hosts.values())


def this_machine(*, num_gpus: int | None) -> Host:
    """Returns this machine with its GPUs in CUDA_VISIBLE_DEVICES, or the first `num_gpus` of them.

    Without GPUs, there are `num_gpus` ranks, by default one. Raises ValueError for more GPUs than there are.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        slots = [str(number) for number in range(_count_gpus())]
    else:
        slots = [word.strip() for word in visible.split(",") if word.strip()] if _count_gpus() else []
    if num_gpus is not None and slots and num_gpus > len(slots):
        left = "" if visible is None else f" that CUDA_VISIBLE_DEVICES={visible} leaves"
        raise ValueError(f"--num_gpus={num_gpus}: this machine has {len(slots)}{left}; use --num_gpus={len(slots)}")
    if not slots:
        slots = [str(number) for number in range(num_gpus or 1)]
    return Host(name=LOCALHOST, slots=tuple(slots[:num_gpus]))


def all_of_this_machine() -> Host:
    """Returns all devices for `--include=localhost:...`: GPUs, or processors without any."""
    slots = range(_count_gpus() or os.cpu_count() or 1)
    return Host(name=LOCALHOST, slots=tuple(map(str, slots)))


def filtered(hosts: Sequence[Host], *, include: str, exclude: str) -> list[Host]:
    """Returns the machines and devices in `include`, or all except `exclude`: `NAME[:SLOT,SLOT]@NAME...`.

    Raises ValueError for both, for an unknown name or slot, and if nothing is left.
    """
    if include and exclude:
        raise ValueError("--include and --exclude: give one of them")
    if not include and not exclude:
        return list(hosts)
    option, words = ("--include", include) if include else ("--exclude", exclude)
    named: dict[str, set[str]] = {}
    known = {host.name: host for host in hosts}
    for word in words.split("@"):
        name, _, slots = word.partition(":")
        if name not in known:
            raise ValueError(f"{option}={words}: there is no machine {name}; there is {', '.join(known)}")
        chosen = {slot.strip() for slot in slots.split(",")} if slots else set(known[name].slots)
        if unknown := chosen - set(known[name].slots):
            raise ValueError(f"{option}={words}: {name} has no slot {', '.join(sorted(unknown))}")
        named[name] = named.get(name, set()) | chosen
    keep = bool(include)
    left = [replace(h, slots=tuple(s for s in h.slots if (s in named.get(h.name, ())) == keep)) for h in hosts]
    left = [host for host in left if host.slots]
    if not left:
        raise ValueError(f"{option}={words}: leaves no device")
    return left


def first(hosts: Sequence[Host], *, num_nodes: int | None, num_gpus: int | None) -> list[Host]:
    """Returns the first machines and the first devices of each. Raises ValueError if there are fewer."""
    if num_nodes is not None and num_nodes > len(hosts):
        raise ValueError(
            f"--num_nodes={num_nodes}: the hostfile lists {len(hosts)}; add machines to it, or use --num_nodes={len(hosts)}"
        )
    chosen = list(hosts)[:num_nodes]
    for host in chosen:
        if num_gpus is not None and num_gpus > len(host.slots):
            raise ValueError(f"--num_gpus={num_gpus}: the hostfile gives {host.name} {len(host.slots)} slots")
    return [replace(host, slots=host.slots[:num_gpus]) for host in chosen]


def _count_gpus() -> int:
    if not any(glob(pattern) for pattern in _GPU_FILES):
        return 0
    import torch

    return torch.cuda.device_count()
