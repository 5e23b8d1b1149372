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

    def faults(self) -> list[str]:
        """What does not fit together."""
        if self.contiguous_memory_optimization and self.number_checkpoints is None:
            return [
                "number_checkpoints: is missing; contiguous_memory_optimization allocates one buffer for so many checkpointed calls "
                "of one forward"
            ]
        return []


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
    findings.faults += [f"{_PATH}{fault}" for fault in section.faults()]
    if section.partition_activations:
        findings.notes.append(
            f"{_PATH}partition_activations=True: acts among tensor-parallel ranks; without them inputs are not cut"
        )
    if section.number_checkpoints is not None and not section.contiguous_memory_optimization:
        findings.faults.append(
            f"{_PATH}number_checkpoints={section.number_checkpoints}: has no effect without contiguous_memory_optimization; leave it "
            "out, or set contiguous_memory_optimization to true"
        )
    return section
