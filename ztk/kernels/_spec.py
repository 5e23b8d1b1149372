"""What a kernel file owes the rest of the library: one `OpSpec`, read by tests, the AOT report and benchmarks."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

NVIDIA_TARGETS = ("sm_80", "sm_90", "sm_100")
TARGETS = (*NVIDIA_TARGETS, "gfx942")
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class AotCase:
    """One kernel as the op launches it for one shape, compiled for every target, with the budget that it must keep.

    The op itself runs, forward and backward, on tensors without memory (`make_inputs(shape, dtype=, device="meta",
    **inputs)`), assuming each target's machine; what it launches is recorded. So constexprs, argument types, divisibility,
    warps, stages and the grid are those of the launcher. `where` picks one of several launches of the kernel by constexprs.
    A zero vector width (with a reason) or a None switches that budget off. A program is a CTA, a processor an SM.

    Raises ValueError for a budget without its reason, and for one per element without the number of elements or their bytes.
    """

    kernel: Any  # triton's JITFunction
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16
    inputs: Mapping[str, object] = field(default_factory=dict)
    where: Mapping[str, object] = field(default_factory=dict)
    variant: str = ""  # tells two cases of one kernel apart in the report
    targets: tuple[str, ...] = TARGETS
    min_programs: int = 1  # that fit on a processor at once: registers, threads and shared memory together (Hopper)
    resident: bool = False  # a grid of programs that stay: all of them must fit on the machine at once (Hopper)
    max_registers: int | None = None  # per thread, where `min_programs` cannot say it: a kernel that fits once (Hopper)
    max_stack_bytes: int = 0  # any spill is a failure unless `stack_reason` says why it is wanted
    stack_reason: str = ""
    vector_load_bytes: int = 16  # at least one global load of this width
    vector_store_bytes: int = 16  # at least one global store of this width
    vector_reason: str = ""  # why either width is below 16
    max_barriers: int | None = None  # 0 for elementwise kernels: no shared memory round trip
    matrix_instructions: bool = False  # the target's own: HMMA, HGMMA, UTCxMMA, v_mfma
    tensor_loads: bool = False  # loads blocks by descriptors: UTMALDG
    min_shared_bytes: int = 0  # what the pipeline's stages take (Hopper): fewer stages or smaller tiles hold less
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
        return f"{self.kernel.__name__}[{', '.join(filter(None, (shape, self.variant)))}]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reach:
    """A shape that reaches past the tiles and loops that a launcher chooses for one target."""

    shape: tuple[int, ...]
    target: str = "sm_90"
    dtype: torch.dtype = torch.float32
    inputs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpSpec:
    """Everything about an op that is not its code.

    `make_inputs(shape, dtype=, device=, **variant)` returns the keyword arguments of `op`, `reference` and `eager`, as
    one dict: `op(**inputs)`. What is compared with the reference: the returned tensors (one, a tuple, or None), the
    inputs named in `mutated` after the call, and the gradients of the inputs named in `differentiable`. `reference`
    computes in float32, or in float64 when its inputs are float64, which is how the tests find the true values. `eager`
    is the plain torch formulation in the input's own dtype; the op's error may be at most `error_ratio` times its error.
    """

    name: str
    op: Callable[..., Tensor | tuple[Tensor, ...] | None]
    reference: Callable[..., Tensor | tuple[Tensor, ...] | None]
    make_inputs: Callable[..., dict[str, Any]]
    eager: Callable[..., Tensor | tuple[Tensor, ...] | None] | None = None
    differentiable: tuple[str, ...] = ()
    mutated: tuple[str, ...] = ()
    small_shapes: tuple[tuple[int, ...], ...]  # interpreter: few programs, odd edges
    reach: tuple["Reach", ...] = ()  # past every loop and tile of the machines named, on the interpreter too
    bench_shapes: tuple[tuple[int, ...], ...]
    variants: tuple[Mapping[str, object], ...] = field(default_factory=lambda: ({},))  # keywords for make_inputs
    num_bytes: Callable[..., int]  # (shape, itemsize) -> bytes a perfect forward moves
    num_bytes_backward: Callable[..., int] | None = None
    num_flops: Callable[..., int]  # (shape,) -> floating point operations of the forward
    aot: tuple[AotCase, ...]
    dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES
    interpreted_dtypes: tuple[torch.dtype, ...] = FLOAT_DTYPES  # without bfloat16 when the kernel uses tl.dot
    tolerance_ulps: float = (
        2.0  # root mean square error in eps of the output dtype; the worst element may be 32 times that
    )
    error_ratio: float = 1.5


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype a reference computes in for x of any shape: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def tokens_as_numbers(function: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """`function`, whose first result are tokens, int64 [...], with these as float64, which tests compare with a tolerance."""

    @functools.wraps(function)
    def compared(**inputs: Any) -> tuple[Tensor, ...]:
        tokens, *rest = function(**inputs)
        return tokens.double(), *rest

    return compared
