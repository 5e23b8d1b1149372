"""What a kernel file owes the rest of the house: one `OpSpec`, read by tests, the AOT report and benchmarks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

NVIDIA_TARGETS = ("sm_80", "sm_90", "sm_100")
TARGETS = (*NVIDIA_TARGETS, "gfx942")
FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, kw_only=True, slots=True)
class AotCase:
    """One ahead-of-time compilation of one kernel, with the static budget it must keep on every target.

    `signature` types every argument that is not in `constexprs` ("*fp32", "*bf16", "i32", "i64", "fp32"); the names in
    `divisible_by_16` are compiled as the launcher would find them (aligned pointers, padded sizes). Registers are per
    thread; a zero vector width (with a reason) or a None switches that budget off.
    """

    kernel: Callable
    signature: Mapping[str, str]
    constexprs: Mapping[str, object] = field(default_factory=dict)
    hip_constexprs: Mapping[str, object] = field(default_factory=dict)  # replace `constexprs` on gfx (64-wide waves)
    divisible_by_16: tuple[str, ...] = ()
    variant: str = ""  # tells two cases of one kernel apart in the report
    targets: tuple[str, ...] = TARGETS
    num_warps: int = 4
    num_stages: int = 3
    num_ctas: int = 1
    max_registers: int = 255
    max_stack_bytes: int = 0  # any spill is a failure unless `stack_reason` says why it is wanted
    stack_reason: str = ""
    vector_load_bytes: int = 16  # at least one global load of this width
    vector_store_bytes: int = 16  # at least one global store of this width
    vector_reason: str = ""  # why either width is below 16
    max_barriers: int | None = None  # 0 for elementwise kernels: no shared memory round trip
    matrix_instructions: bool = False  # the target's own: HMMA, HGMMA, UTCxMMA, v_mfma
    elements_per_program: int | None = None  # what one program handles; turns instructions into a figure per element
    max_instructions_per_element: float | None = None

    def __post_init__(self):
        if self.max_stack_bytes > 0 and not self.stack_reason:
            raise ValueError(f"AotCase {self.name}: max_stack_bytes={self.max_stack_bytes} needs a stack_reason")
        if min(self.vector_load_bytes, self.vector_store_bytes) < 16 and not self.vector_reason:
            raise ValueError(f"AotCase {self.name}: accesses below 16 bytes need a vector_reason")
        if self.max_instructions_per_element is not None and self.elements_per_program is None:
            raise ValueError(f"AotCase {self.name}: max_instructions_per_element needs elements_per_program")

    @property
    def name(self) -> str:
        """`kernel` or `kernel[variant]`, as the report prints it."""
        kernel = self.kernel.__name__
        return f"{kernel}[{self.variant}]" if self.variant else kernel


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
    make_inputs: Callable[..., dict[str, object]]
    eager: Callable[..., Tensor | tuple[Tensor, ...] | None] | None = None
    differentiable: tuple[str, ...] = ()
    mutated: tuple[str, ...] = ()
    small_shapes: tuple[tuple[int, ...], ...]  # interpreter: few programs, odd edges
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
    """The dtype a reference computes in: float64 for float64 inputs, otherwise float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32
