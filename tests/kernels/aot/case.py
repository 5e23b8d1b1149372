"""A kernel as an op launches it, and the budget that its compiled code must keep."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

NVIDIA_TARGETS = ("sm_80", "sm_90", "sm_100")
TARGETS = (*NVIDIA_TARGETS, "gfx942")


@dataclass(frozen=True, kw_only=True, slots=True)
class AotCase:
    """One kernel as the op launches it for one shape, compiled for every target, with its budget.

    The op itself runs, forward and backward, on tensors without memory (`make_inputs(shape, dtype=, device="meta",
    **inputs)`), assuming each target's machine, and its launches are recorded. So constexprs, argument types, divisibility,
    warps, stages and the grid come from the launcher. `where` picks one of several launches of the kernel by constexprs.
    A zero vector width (with a reason) or a None disables that budget. A program is a CTA, a processor an SM.

    Raises ValueError for a budget without its reason, and for one per element without the number of elements or their bytes.
    """

    kernel: str  # the name of its function
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    inputs: Mapping[str, object] = field(default_factory=dict)
    where: Mapping[str, object] = field(default_factory=dict)
    variant: str = ""  # distinguishes two cases of one kernel in the report
    targets: tuple[str, ...] = TARGETS
    min_programs: int = 1  # that fit on a processor at once: registers, threads and shared memory together (Hopper)
    resident: bool = False  # a grid of programs that stay: all of them must fit on the machine at once (Hopper)
    max_registers: int | None = None  # per thread, where `min_programs` cannot say it: a kernel that fits once (Hopper)
    max_stack_bytes: int = 0  # any spill is a failure unless `stack_reason` justifies it
    stack_reason: str = ""
    vector_load_bytes: int = 16  # at least one global load of this width
    vector_store_bytes: int = 16  # at least one global store of this width
    vector_reason: str = ""  # why either width is below 16
    max_barriers: int | None = None  # 0 for elementwise kernels: no shared memory round trip
    matrix_instructions: bool = False  # the target's own: HMMA, HGMMA, UTCxMMA, v_mfma
    tensor_loads: bool = False  # loads blocks by descriptors: UTMALDG
    min_shared_bytes: int = 0  # size of the pipeline's stages (Hopper): fewer stages or smaller tiles hold less
    elements: int | None = None  # of the full launch; turns instructions into a figure per element
    max_instructions_per_element: float | None = None
    loop_bytes: float | None = None  # that an element loads in a loop; turns the loops' instructions into such a figure
    max_loop_instructions: float | None = None  # per element, summed over the loops (Hopper)

    def __post_init__(self):
        if self.max_stack_bytes > 0 and not self.stack_reason:
            raise ValueError(f"AotCase {self.name}: max_stack_bytes={self.max_stack_bytes} needs a stack_reason")
        if min(self.vector_load_bytes, self.vector_store_bytes) < 16 and not self.vector_reason:
            raise ValueError(f"AotCase {self.name}: accesses below 16 bytes need a vector_reason")
        if self.max_instructions_per_element is not None and self.elements is None:
            raise ValueError(f"AotCase {self.name}: max_instructions_per_element needs elements")
        if self.max_loop_instructions is not None and self.loop_bytes is None:
            raise ValueError(f"AotCase {self.name}: max_loop_instructions needs loop_bytes")

    @property
    def name(self) -> str:
        """`kernel[shape]` or `kernel[shape, variant]`, as the report prints it."""
        shape = "x".join(map(str, self.shape)) if len(set(self.shape)) > 1 or len(self.shape) < 5 else "many"
        return f"{self.kernel}[{', '.join(filter(None, (shape, self.variant)))}]"
