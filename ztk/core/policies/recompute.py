"""Activation checkpointing."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from ztk.core.policies.key import Changes, When, key, key_faults, section, within, without_effect
from ztk.core.policies.ranges import COUNT, member, pattern_faults, refuse


class RecomputeMode(StrEnum):
    """The activations of a block that are kept for its backward."""

    none = "none"  # everything that autograd saves
    full = "full"  # the block's input (Chen et al. 2016, https://arxiv.org/abs/1604.06174)
    selective = "selective"  # the input, and the results of matrix products and attention (Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198)


_RECOMPUTES = within(
    "recompute",
    words="recompute=full, selective or every2",
    test=lambda recompute: recompute.mode is not RecomputeMode.none,
)
_PARTITIONS = When(
    "recompute=full, selective or every2, topology.tensor above 1 and topology.sequence_parallel=false",
    lambda config, machine: (
        config.recompute.mode is not RecomputeMode.none
        and config.topology.tensor > 1
        and not config.topology.sequence_parallel
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecomputePolicy:
    r"""Which blocks are recomputed, and where their inputs are kept until then.

    every: blocks 0, every, 2 * every, ... are recomputed.
    modules: regular expressions that match full module names, such as `model\.layers\.\d+`. Empty: the elements of the outermost
        ModuleLists, ModuleDicts and Sequentials that have parameters and submodules.
    partition_inputs: the backward gathers the input, which must be the same on all of these ranks.
    contiguous: the buffer has the size of the first input. Later ones may be smaller.
    preserve_rng: random numbers, such as dropout's, are the same when a block runs again.

    Raises ValueError for options that change nothing.
    """

    changes: ClassVar = Changes.experiment

    mode: RecomputeMode = key(
        "saved activations of a block: none: all, nothing is recomputed; full: its input; selective: its input and the results of matrix "
        "products and attention",
        default=RecomputeMode.none,
        chosen=True,
    )
    every: int = key("recompute one block of this many", default=1, range=COUNT, acts=_RECOMPUTES)
    inputs_on_cpu: bool = key(
        "keep a block's input in main memory, pinned on a machine with a GPU", default=False, acts=_RECOMPUTES
    )
    partition_inputs: bool = key(
        "each tensor-parallel rank keeps its part of a block's input", default=False, acts=_PARTITIONS
    )
    contiguous: bool = key("keep inputs in one buffer, allocated once", default=False, acts=_RECOMPUTES)
    num_checkpoints: int | None = key(
        "inputs that this buffer holds; null: one per recomputed block",
        range=COUNT,
        acts=within("recompute", words="recompute.contiguous=true", test=lambda recompute: bool(recompute.contiguous)),
        optional=True,
    )
    modules: tuple[str, ...] = ()
    preserve_rng: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "mode", member(self.mode, of=RecomputeMode, key="recompute.mode"))
        object.__setattr__(self, "modules", tuple(self.modules))
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        yield from key_faults(self, section="recompute")
        for pattern in self.modules:
            yield from pattern_faults(pattern, key="recompute.modules")
        if self.mode is RecomputeMode.none:
            given = {
                "modules": bool(self.modules),
                "partition_inputs": self.partition_inputs,
                "preserve_rng": not self.preserve_rng,
            }
            for name in filter(given.get, given):
                yield without_effect(f"recompute.{name}", value=getattr(self, name), acts=_RECOMPUTES)


@section
class RecomputeConfig(RecomputePolicy):
    """Which activations the backward computes again instead of reading them (activation checkpointing)."""
