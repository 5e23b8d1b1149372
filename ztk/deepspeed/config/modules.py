"""Sections about the model's execution: activation_checkpointing, pipeline, hybrid_engine."""

from dataclasses import dataclass
from typing import Annotated

from ztk.deepspeed.config.keys import (
    Findings,
    anything,
    boolean,
    fixed,
    hint,
    keys_of,
    optional,
    read_section,
    takes,
    whole_number,
)
from ztk.rl.rollout.weights import RolloutWeights


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationCheckpointing:
    """The section with its own names."""

    partition_activations: bool = False
    contiguous_memory_optimization: bool = False
    number_checkpoints: Annotated[int | None, optional(whole_number(1))] = None
    cpu_checkpointing: bool = False
    synchronize_checkpoint_boundary: bool = False
    profile: bool = False

    @property
    def buffer_size(self) -> int | None:
        """The number of checkpointed calls per forward that the contiguous buffer holds, or None without a buffer."""
        return self.number_checkpoints if self.contiguous_memory_optimization else None

    def notes(self) -> list[str]:
        """Returns notes on options without effect."""
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


_ACTIVATION_KEYS = keys_of(ActivationCheckpointing)
_PATH = "activation_checkpointing."
_ELSEWHERE = {"partitioned_activations": "there is no such key; did you mean partition_activations?"}


def read_activation_checkpointing(given: object, *, findings: Findings) -> ActivationCheckpointing | None:
    """Reads the section. Returns None if there is none."""
    if given is None:
        return None
    values = read_section(given, path=_PATH, keys=_ACTIVATION_KEYS, findings=findings, elsewhere=_ELSEWHERE)
    section = ActivationCheckpointing(**values)
    findings.notes += [f"{_PATH}{note}" for note in section.notes()]
    return section


_BUILT = "stages are cut and seeded when the script builds its PipelineModule, before there is a configuration"
_UNCUT = (
    "activations and gradients cross stages uncut; layers of a PipelineModule are not cut over tensor-parallel ranks"
)
_PIPELINE_KEYS = {
    "stages": hint(anything, _BUILT, usual=("auto",)),
    "partition": hint(anything, _BUILT, usual=("best",)),
    "seed_layers": hint(boolean, _BUILT, usual=(False,)),
    "activation_checkpoint_interval": takes(whole_number()),
    "pipe_partitioned": hint(boolean, _UNCUT, usual=(True,)),
    "grad_partitioned": hint(boolean, _UNCUT, usual=(True,)),
    "use_reentrant": hint(boolean, "layers are always recomputed without reentrant autograd", usual=(True, False)),
}


def read_pipeline(given: object, *, findings: Findings) -> int:
    """Returns `pipeline.activation_checkpoint_interval`; 0 keeps the module's own."""
    if given is None:
        return 0
    values = read_section(given, path="pipeline.", keys=_PIPELINE_KEYS, findings=findings)
    return values.get("activation_checkpoint_interval", 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hybrid:
    """The section with its own names. max_out_tokens: limit of prompt and answer together. release_inference_cache: frees the buffers of
    gathered parameters after every text.
    """

    enabled: bool = False
    max_out_tokens: Annotated[int, whole_number(1)] = 512
    inference_tp_size: Annotated[int, whole_number(1)] = 1
    release_inference_cache: bool = False
    pin_parameters: bool = True

    @property
    def weights(self) -> RolloutWeights:
        """Whether parameters are gathered once per text, or for every forward."""
        return RolloutWeights.whole if self.pin_parameters and self.inference_tp_size == 1 else RolloutWeights.streamed


_HYBRID_KEYS = keys_of(Hybrid) | {
    "tp_gather_partition_size": hint(
        whole_number(1),
        "with pin_parameters=false as many layers are gathered ahead as stage3_prefetch_bucket_size has room for",
        usual=(8,),
    ),
    "enable_cuda_graph": fixed(False, why="not offered by ztk; leave it out"),
}


def read_hybrid(given: object, *, stage: int, world_size: int, tensor_degree: int, findings: Findings) -> Hybrid | None:
    """Reads the section. Returns None if it is off or missing."""
    if given is None:
        return None
    own = Findings()
    hybrid = Hybrid(**read_section(given, path="hybrid_engine.", keys=_HYBRID_KEYS, findings=own))
    findings.faults += own.faults
    if not hybrid.enabled:
        return None
    findings.notes += own.notes
    size = hybrid.inference_tp_size
    if world_size % size:
        fitting = max(k for k in range(1, size) if world_size % k == 0)
        findings.faults.append(
            f"hybrid_engine.inference_tp_size={size}: {world_size} ranks cannot be divided by it; {fitting} would fit"
        )
    if tensor_degree > 1:
        findings.faults.append(
            "hybrid_engine.enabled: not offered with tensor_parallel, whose ranks would draw different tokens; leave one of them out"
        )
    if stage < 3:
        acting = {"pin_parameters=False": not hybrid.pin_parameters, f"inference_tp_size={size}": size > 1}
        findings.notes += [
            f"hybrid_engine.{name}: acts at stage 3; this is stage {stage}, where every rank keeps all parameters"
            for name, acts in acting.items()
            if acts
        ]
    elif size > 1:
        findings.notes.append(
            f"hybrid_engine.inference_tp_size={size}: no layer is cut; every rank gathers one unit at a time instead, as with "
            "pin_parameters=false"
        )
    return hybrid
