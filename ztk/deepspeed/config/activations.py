"""activation_checkpointing: what `deepspeed.checkpointing.checkpoint` does with the inputs it keeps."""

from dataclasses import dataclass

from ztk.deepspeed.config.keys import Findings, boolean, optional, read_section, takes, whole_number


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCheckpointing:
    """The section, in its own words."""

    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: int | None = None
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False

    @property
    def buffer_size(self) -> int | None:
        """For how many checkpointed calls of one forward the contiguous buffer has room; None: there is no such buffer."""
        return self.number_checkpoints if self.contiguous_memory_optimization else None

    def notes(self) -> list[str]:
        """Which options change nothing without another."""
        found = []
        if self.partition_activations:
            found.append(
                "partition_activations=True: acts among tensor-parallel ranks; without them inputs are not cut"
            )
        if self.contiguous_memory_optimization and self.number_checkpoints is None:
            found.append(
                "contiguous_memory_optimization=True: allocates no buffer without number_checkpoints, the number of checkpointed calls "
                "of one forward; every input is stored by itself"
            )
        if self.number_checkpoints is not None and not self.contiguous_memory_optimization:
            found.append(
                f"number_checkpoints={self.number_checkpoints}: has no effect without contiguous_memory_optimization"
            )
        return found


KEYS = {
    "partition_activations": takes(boolean),
    "contiguous_memory_optimization": takes(boolean),
    "number_checkpoints": takes(optional(whole_number(1))),
    "cpu_checkpointing": takes(boolean),
    "synchronize_checkpoint_boundary": takes(boolean),
    "profile": takes(boolean),
}
_PATH = "activation_checkpointing."
_ELSEWHERE = {"partitioned_activations": "there is no such key; did you mean partition_activations?"}


def read_activation_checkpointing(given: object, *, findings: Findings) -> ActivationCheckpointing | None:
    """The section, or None if there is none."""
    if given is None:
        return None
    values = read_section(given, path=_PATH, keys=KEYS, findings=findings, elsewhere=_ELSEWHERE)
    section = ActivationCheckpointing(**values)
    findings.notes += [f"{_PATH}{note}" for note in section.notes()]
    return section
