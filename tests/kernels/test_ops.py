"""Every op in ALL_OPS against its reference: values, gradients, accuracy, and the contract with torch."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.reach import REACH
from ztk.kernels import ALL_OPS, set_backend
from ztk.kernels.launch import machine as machines

WORST_OVER_RMS = 32  # the worst single element may be this many times the allowed root mean square error


def case_id(spec, shape, variant, dtype) -> str:
    options = ",".join(f"{k}={str(v).removeprefix('torch.')}" for k, v in variant.items())
    return "-".join(filter(None, (spec.name, "x".join(map(str, shape)), options, str(dtype)[6:])))


def cases(dtypes_of):
    return [
        pytest.param(spec, shape, variant, dtype, id=case_id(spec, shape, variant, dtype))
        for spec in ALL_OPS
        for shape in spec.small_shapes
        for variant in spec.variants
        for dtype in dtypes_of(spec)
    ]


def each_tensor(value):
    """The tensors of a value that is a tensor, None, or a sequence of such."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from each_tensor(item)


def convert(inputs: dict, *, spec, dtype: torch.dtype | None = None) -> dict:
    """A deep copy of the inputs as fresh leaves; floating point tensors in `dtype` when given."""

    def copy(value, needs_grad):
        if isinstance(value, Tensor):
            value = value.detach().clone()
            if dtype is not None and value.is_floating_point():
                value = value.to(dtype)
            return value.requires_grad_(needs_grad)
        if isinstance(value, list):
            return [copy(item, needs_grad) for item in value]
        return value

    return {name: copy(value, name in spec.differentiable and value is not None) for name, value in inputs.items()}


def run(function, inputs: dict, *, spec, d_outs: list[Tensor] | None = None) -> dict[str, Tensor]:
    """Call and differentiate; returns everything that can be compared, by name."""
    named = {}
    outputs = list(each_tensor(function(**inputs)))
    for i, out in enumerate(outputs):
        named[f"out{i}"] = out.detach()
    for name in spec.mutated:
        for i, tensor in enumerate(each_tensor(inputs[name])):
            named[f"{name}{i}"] = tensor.detach()
    if spec.differentiable:
        if d_outs is None:
            d_outs = [torch.randn_like(out) for out in outputs]
        differentiable = [(out, d.to(out.dtype)) for out, d in zip(outputs, d_outs, strict=True) if out.requires_grad]
        torch.autograd.backward([o for o, _ in differentiable], [d for _, d in differentiable])
        for name in spec.differentiable:
            if inputs[name] is not None:
                named[f"d_{name}"] = inputs[name].grad
    return named


def make(spec, shape, variant, dtype, device="cpu"):
    torch.manual_seed(0)
    inputs = spec.make_inputs(shape, dtype=dtype, device=device, **variant)
    outputs = list(each_tensor(spec.reference(**convert(inputs, spec=spec))))
    return inputs, [torch.randn_like(out) for out in outputs]


def errors(actual: Tensor, expected: Tensor) -> tuple[float, float]:
    """Root mean square and worst error, both relative to the expected tensor's scale."""
    finite = expected.isfinite()
    difference = (actual.double() - expected.double())[finite]
    scale = expected.double()[finite]
    if difference.numel() == 0:
        return 0.0, 0.0
    rms_scale = scale.square().mean().sqrt().clamp_min(1e-30)
    return (difference.square().mean().sqrt() / rms_scale).item(), (
        difference.abs().max() / scale.abs().max().clamp_min(1e-30)
    ).item()


def assert_close(name: str, actual: Tensor, expected: Tensor, *, ulps: float) -> None:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, f"{name}: {actual.shape} {actual.dtype}"
    if actual.numel() == 0:
        return
    if not actual.is_floating_point():
        assert torch.equal(actual, expected), name
        return
    assert torch.equal(actual.isnan(), expected.isnan()), f"{name}: NaN: an element was never written"
    assert torch.equal(actual.isinf(), expected.isinf()), f"{name}: infinities differ"
    rms, worst = errors(actual, expected)
    eps = torch.finfo(expected.dtype).eps
    assert rms <= ulps * eps and worst <= WORST_OVER_RMS * ulps * eps, (
        f"{name}: rms {rms / eps:.2f} eps, worst {worst / eps:.2f} eps"
    )


def check_against_reference(spec, shape, variant, dtype, device="cpu") -> None:
    inputs, d_outs = make(spec, shape, variant, dtype, device)
    actual = run(spec.op, convert(inputs, spec=spec), spec=spec, d_outs=d_outs)
    expected = run(spec.reference, convert(inputs, spec=spec), spec=spec, d_outs=d_outs)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert_close(name, actual[name], value, ulps=spec.tolerance_ulps)


@pytest.mark.parametrize("spec, shape, variant, dtype", cases(lambda spec: spec.interpreted_dtypes))
def test_kernel_matches_reference(spec, shape, variant, dtype, poisoned):
    set_backend("triton")
    check_against_reference(spec, shape, variant, dtype)


def check_reach(spec, reach, *, machine=machines) -> None:
    """The op against its reference for one `Reach`, with the tiles of its target. machine: the `launch.machine` of the op's package: a copy's
    launchers know an architecture by its own enumeration."""
    with machine.assume(machine.MACHINES[reach.target]):
        check_against_reference(spec, reach.shape, reach.inputs, reach.dtype)


REACHES = [
    pytest.param(spec, reach, id=case_id(spec, reach.shape, reach.inputs, reach.dtype) + f"-{reach.target}")
    for spec in ALL_OPS
    for reach in REACH.get(spec.name, ())
]


@pytest.mark.parametrize("spec, reach", REACHES)
def test_kernel_past_every_tile_and_loop(spec, reach, poisoned):
    """Shapes of a GPU's grid: more rows than resident programs, more partial sums than one step reads, every target's tiles."""
    set_backend("triton")
    check_reach(spec, reach)


@pytest.mark.parametrize("spec, shape, variant, dtype", cases(lambda spec: spec.dtypes))
def test_cpu_implementation_matches_reference(spec, shape, variant, dtype, poisoned):
    check_against_reference(spec, shape, variant, dtype)


def check_error_ratio(spec, shape, variant, dtype) -> None:
    """Compares the op's error against float64 with the error of eager torch in the input's dtype."""
    inputs, d_outs = make(spec, shape, variant, dtype)
    actual = run(spec.op, convert(inputs, spec=spec), spec=spec, d_outs=d_outs)
    eager = run(spec.eager, convert(inputs, spec=spec), spec=spec, d_outs=d_outs)
    true = run(spec.reference, convert(inputs, spec=spec, dtype=torch.float64), spec=spec, d_outs=d_outs)
    eps = torch.finfo(dtype).eps
    for name, value in true.items():
        if value.numel() < 8 or not value.is_floating_point():
            continue  # the error of a handful of elements is chance
        ours, theirs = errors(actual[name], value), errors(eager[name], value)
        floors = (eps / 4, eps / 2)  # rounding the output once does no better
        for kind, mine, other, floor in zip(("rms", "worst"), ours, theirs, floors, strict=True):
            assert mine <= spec.error_ratio * max(other, floor), (
                f"{name}: {kind} {mine / eps:.2f} eps, eager {other / eps:.2f}"
            )


def accuracy_cases(backend: str):
    """16-bit cases of the ops with an eager form. Of the kernels one shape each: all are held to the reference above."""
    for case in cases(lambda spec: tuple(d for d in spec.dtypes if d != torch.float32)):
        spec, shape, _, dtype = case.values
        on_kernel = shape == spec.small_shapes[1] and dtype in spec.interpreted_dtypes
        if spec.eager is not None and (backend == "auto" or on_kernel):
            yield pytest.param(*case.values, backend, id=f"{case.id}-{backend}")


@pytest.mark.parametrize("spec, shape, variant, dtype, backend", [*accuracy_cases("auto"), *accuracy_cases("triton")])
def test_as_accurate_as_eager(spec, shape, variant, dtype, backend):
    set_backend(backend)
    check_error_ratio(spec, shape, variant, dtype)


class Recorder(TorchDispatchMode):
    """Keeps every ztk op that is called, with a copy of its arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "ztk":
            copy = [
                [t.clone() for t in a] if isinstance(a, (list, tuple)) and a and isinstance(a[0], Tensor)
                else a.clone() if isinstance(a, Tensor) else a
                for a in args
            ]  # fmt: skip
            self.calls.append((func, tuple(copy)))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", ALL_OPS, ids=lambda spec: spec.name)
def test_library_contract(spec):
    """opcheck on every registered op that the public function and its backward call."""
    set_backend("triton")  # some public functions need no op on the CPU
    calls = {}
    for variant in spec.variants:
        inputs, d_outs = make(spec, spec.small_shapes[1], variant, spec.dtypes[0])
        with Recorder() as recorder:
            run(spec.op, convert(inputs, spec=spec), spec=spec, d_outs=d_outs)
        for func, args in recorder.calls:
            calls.setdefault((func, *(a is None for a in args)), (func, args))
    set_backend("auto")
    assert calls, f"{spec.name} calls no registered op"
    for func, args in calls.values():
        torch.library.opcheck(func, args)


@pytest.mark.parametrize("spec", [s for s in ALL_OPS if s.differentiable], ids=lambda spec: spec.name)
def test_compiles_without_graph_break(spec):
    inputs, d_outs = make(spec, spec.small_shapes[1], spec.variants[0], spec.dtypes[0])
    eager = run(spec.op, convert(inputs, spec=spec), spec=spec, d_outs=d_outs)
    torch._dynamo.reset()
    compiled = torch.compile(spec.op, fullgraph=True, backend="aot_eager")
    actual = run(compiled, convert(inputs, spec=spec), spec=spec, d_outs=d_outs)
    for name, value in eager.items():
        assert torch.equal(actual[name], value), name


@pytest.mark.parametrize("spec", [s for s in ALL_OPS if s.differentiable], ids=lambda spec: spec.name)
def test_non_contiguous_inputs(spec):
    """Every second element of a wider tensor gives the same result as a contiguous copy."""
    inputs, d_outs = make(spec, spec.small_shapes[1], spec.variants[0], torch.float32)
    strided = convert(inputs, spec=spec)
    for name in spec.differentiable:
        if inputs[name] is not None:
            strided[name] = torch.stack([inputs[name], inputs[name]], dim=-1).unbind(-1)[0].detach().requires_grad_()
    expected = run(spec.op, convert(inputs, spec=spec), spec=spec, d_outs=d_outs)
    actual = run(spec.op, strided, spec=spec, d_outs=d_outs)
    for name, value in expected.items():
        assert_close(name, actual[name], value, ulps=spec.tolerance_ulps)


@pytest.mark.parametrize("spec", ALL_OPS, ids=lambda spec: spec.name)
def test_same_bits_again(spec):
    """Two runs of the kernel on the same inputs give the same bits."""
    set_backend("triton")
    inputs, d_outs = make(spec, spec.small_shapes[1], spec.variants[0], spec.interpreted_dtypes[0])
    first = run(spec.op, convert(inputs, spec=spec), spec=spec, d_outs=d_outs)
    second = run(spec.op, convert(inputs, spec=spec), spec=spec, d_outs=d_outs)
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_op_names_are_unique():
    names = [spec.name for spec in ALL_OPS]
    assert len(set(names)) == len(names)
    assert all(dataclasses.is_dataclass(spec) for spec in ALL_OPS)
