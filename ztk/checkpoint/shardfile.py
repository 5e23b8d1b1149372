"""One rank's file: its slices of all state, the buffers that no lower rank has, and its random number generators."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ztk.checkpoint.manifest import BUFFER, OPTIMIZER, RNG, Entry, StateFile
from ztk.checkpoint.model import persistent_buffers
from ztk.checkpoint.rng import rng_states
from ztk.checkpoint.tensorfile import TensorFileWriter, TensorSpec
from ztk.checkpoint.torch_optimizer import pack_whole
from ztk.core.precision.names import DTYPE_NAMES
from ztk.core.runtime import Tier
from ztk.core.runtime.part import Part
from ztk.optim import WholeStep
from ztk.optim.states import FROZEN
from ztk.train.engine import Engine

Append = Callable[..., None]  # called as append(key, value=)


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """A rank's range [start, stop) of one flat tensor, or of the rank's part of it."""

    kind: str
    name: str
    dtype: torch.dtype
    start: int
    stop: int
    part: Part | None = None

    @property
    def key(self) -> str:
        """Its name in the file."""
        place = "" if self.box is None else "+".join(str(first) for first, _ in self.box) + ":"
        return f"{self.kind}/{self.name}@{place}{self.start}"

    @property
    def box(self) -> list[list[int]] | None:
        """The box in the manifest's format."""
        if self.part is None or self.part.is_full:
            return None
        return [[first, size] for first, size in zip(self.part.start, self.part.shape, strict=True)]


class ShardSource:
    """This rank's part of the engine's state: first the list of slices, then their values piece by piece."""

    def __init__(self, engine: Engine, *, buffers: frozenset[str], trained_only: bool = False) -> None:
        """buffers: names of the buffers that this rank writes. trained_only: omits frozen parameters."""
        self._engine, self._trained_only = engine, trained_only
        self._small: dict[tuple[str, str], Tensor] = {
            (BUFFER, name): buffer for name, buffer in persistent_buffers(engine.module) if name in buffers
        }
        self._small |= {(RNG, name): state for name, state in rng_states(engine.process.device).items()}
        if engine.process.rank == 0 and isinstance(engine.zero.optimizer, WholeStep):
            _, tensors = pack_whole(engine, copies=engine.zero.tiers["optimizer"] == Tier.nvme)
            self._small |= {(OPTIMIZER, name): value for name, value in tensors.items() if value.numel()}
        self.slices = self._plan()

    def _plan(self) -> dict[tuple[str, str], Slice]:
        """Plans one slice per parameter and kind, of any number of pieces, so that files do not depend on the offload tier."""
        slices: dict[tuple[str, str], Slice] = {}
        for part in self._engine.zero.state.slices():
            if part.kind == FROZEN and self._trained_only:
                continue
            before = slices.get((part.kind, part.name))
            assert before is None or before.stop == part.start, part
            slices[part.kind, part.name] = Slice(
                kind=part.kind,
                name=part.name,
                dtype=part.dtype,
                start=part.start if before is None else before.start,
                stop=part.stop,
                part=part.part,
            )
        for (kind, name), value in self._small.items():
            slices[kind, name] = Slice(kind=kind, name=name, dtype=value.dtype, start=0, stop=value.numel())
        kinds = list(
            dict.fromkeys(kind for kind, _ in slices)
        )  # grouped by kind, because an export reads one kind at a time
        return dict(sorted(slices.items(), key=lambda item: kinds.index(item[0][0])))

    @property
    def specs(self) -> list[TensorSpec]:
        """Returns the slices as tensors of the file."""
        return [
            TensorSpec(key=part.key, dtype=part.dtype, shape=(part.stop - part.start,)) for part in self.slices.values()
        ]

    def keep_small(self) -> None:
        """Copies the buffers, which training changes between updates, before `stream` runs on another thread."""
        self._small = {key: value.clone() for key, value in self._small.items()}

    def stream(self, append: Append, *, aside: bool = False) -> None:
        """Calls `append(key, value=)` for all values, with one piece of the engine's state in memory at a time.

        Pieces of a slice come in order.

        aside: runs on another thread than the training; see `ModelState.shards`.
        """
        with closing(self._engine.zero.state.shards(aside=aside)) as shards:
            for shard in shards:
                if (shard.kind, shard.name) in self.slices:
                    append(self.slices[shard.kind, shard.name].key, value=shard.value)
        for (kind, name), value in self._small.items():
            append(self.slices[kind, name].key, value=value)


class Staging:
    """A reusable copy of a rank's slices in main memory."""

    def __init__(self) -> None:
        self._values: dict[str, Tensor] = {}
        self._filled: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in self._values.values())

    def open(self, specs: list[TensorSpec]) -> None:
        """Allocates memory for `specs` and drops earlier values."""
        fits = {spec.key: (spec.shape, spec.dtype) for spec in specs} == {
            key: (tuple(value.shape), value.dtype) for key, value in self._values.items()
        }
        if not fits:
            self._values = {}  # free the old values before the new ones are allocated
            pin = torch.cuda.is_initialized()
            self._values = {spec.key: torch.empty(spec.shape, dtype=spec.dtype, pin_memory=pin) for spec in specs}
        self._filled = dict.fromkeys(self._values, 0)

    def append(self, key: str, *, value: Tensor) -> None:
        """Appends the next elements of slice `key`, in any shape."""
        start = self._filled[key]
        self._values[key][start : start + value.numel()].copy_(value.detach().reshape(-1))
        self._filled[key] = start + value.numel()

    def stream(self, append: Append) -> None:
        for key, value in self._values.items():
            append(key, value=value)


def file_name(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def open_file(folder: Path, *, rank: int, specs: list[TensorSpec]) -> TensorFileWriter:
    """Creates a rank's file. Raises OSError, with the fix if the folder is not shared between machines."""
    if not folder.is_dir():
        raise OSError(
            None,
            "rank 0 created this folder, but it does not exist on this rank; all machines must share the filesystem, or keep checkpoints "
            "in a folder each (checkpoint.local=true)",
            str(folder),
        )
    return TensorFileWriter(folder / file_name(rank), specs=specs, metadata={"format": "pt", "rank": str(rank)})


def describe_file(writer: TensorFileWriter, *, slices: list[Slice]) -> StateFile:
    """Returns the manifest's entry for the finished file."""
    entries = [
        Entry(
            name=part.name,
            kind=part.kind,
            dtype=DTYPE_NAMES[part.dtype],
            start=part.start,
            stop=part.stop,
            offset=writer.offset(part.key),
            crc32=writer.checksums(part.key),
            box=part.box,
        )
        for part in slices
    ]
    return StateFile(
        file=writer.path.name,
        nbytes=writer.nbytes,
        header_nbytes=writer.header_nbytes,
        header_crc32=writer.header_crc32,
        entries=entries,
    )
