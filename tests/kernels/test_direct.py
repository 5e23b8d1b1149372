"""An op's launcher is called without torch's dispatcher only if the dispatcher would add nothing."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ztk.kernels import layer_norm, rms_norm, rope, set_backend, swiglu
from ztk.kernels.launch import library
from ztk.zero.parameters.watched import watch

X, WEIGHT = torch.randn(4, 16), torch.ones(16)


class Seen(torch.Tensor):
    """A class that overrides torch's functions."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        return super().__torch_function__(function, types, args, kwargs)


@pytest.fixture
def ways(monkeypatch) -> list[str]:
    """Of each call of `op`."""
    monkeypatch.setattr(library, "is_on_current_gpu", lambda tensor: tensor.device.type == "cpu")
    return []


@pytest.fixture
def op(ways) -> Callable:
    """`rms_norm`, which only notes its way."""

    class Dispatcher:
        _schema = library.operator("rms_norm")._schema

        def __call__(self, *args):
            ways.append("dispatcher")
            return X

    return library._short_way(Dispatcher(), launch=lambda *args: ways.append("launcher") or X)


def watched() -> nn.Parameter:
    """As an engine's."""
    watch(parameter := nn.Parameter(WEIGHT.clone()))
    return parameter


@pytest.mark.parametrize("weight", [WEIGHT, nn.Parameter(WEIGHT), watched()], ids=["tensor", "parameter", "watched"])
@pytest.mark.parametrize("residual", [None, X], ids=["None", "tensor"])
def test_plain_calls_go_to_the_launcher(op, ways, weight, residual):
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            op(X, residual, weight, 1e-5)
    assert ways == ["launcher"] * 2


ARGUMENTS = {
    "an integer": lambda: (X, None, WEIGHT, 1),
    "too few": lambda: (X, None, WEIGHT),
    "a class of its own": lambda: (X, None, WEIGHT.as_subclass(Seen), 1e-5),
    "no tensor": lambda: (X, None, 1.0, 1e-5),
    "None for a tensor": lambda: (None, None, WEIGHT, 1e-5),
    "elsewhere": lambda: (X.to("meta"), None, WEIGHT, 1e-5),
    "fake": lambda: (FakeTensorMode().from_tensor(X), None, WEIGHT, 1e-5),
}


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
def test_the_dispatcher_gets_what_it_would_change(op, ways, arguments):
    with torch.no_grad():
        op(*arguments())
    assert ways == ["dispatcher"]


class Looking(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def timed() -> Iterator[None]:
    library.set_watch(lambda name, run, args, on_gpu: run(*args))
    try:
        yield
    finally:
        library.set_watch(None)


CONTEXTS = {
    "gradients": torch.enable_grad,
    "a dispatch mode": Looking,
    "a function mode": TorchFunctionMode,
    "a profiler": lambda: torch.autograd.profiler.profile(use_kineto=False),
    "forward gradients": forward_ad.dual_level,
    "times of kernels": timed,
}


@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS)
def test_the_dispatcher_is_called_where_somebody_looks_on(op, ways, context):
    with torch.no_grad(), context():
        op(X, None, WEIGHT, 1e-5)
    assert ways == ["dispatcher"]


TRANSFORMS = {
    "vmap": lambda call: torch.vmap(call)(X[None]),
    "functionalize": lambda call: torch.func.functionalize(call)(X),
    "a trace": lambda call: torch.jit.trace(call, X, check_trace=False),
    "make_fx": lambda call: make_fx(call)(X),
    "make_fx before the dispatcher": lambda call: make_fx(call, pre_dispatch=True)(X),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_the_dispatcher_is_called_under_transforms(op, ways, transform):
    with torch.no_grad():
        transform(lambda x: op(x, None, WEIGHT, 1e-5) * x)
    assert set(ways) == {"dispatcher"}


def results() -> list[Tensor]:
    x, cos = X.view(1, 4, 1, 16), torch.randn(4, 8)
    return [
        rms_norm(X, WEIGHT),
        *rms_norm(X.view(2, 2, 16), WEIGHT, residual=X.view(2, 2, 16)),
        layer_norm(X, WEIGHT, WEIGHT),
        *layer_norm(X, WEIGHT, residual=X),
        swiglu(X, X),
        rope(x, cos=cos.cos(), sin=cos.sin()),
    ]


def test_public_functions_give_the_same_without_autograd_and_without_dispatcher(ways):
    set_backend("triton")
    try:
        torch.manual_seed(0)
        by_autograd = results()
        for context in (Looking(), contextlib.nullcontext()):
            with torch.no_grad(), context:
                torch.manual_seed(0)
                assert all(map(torch.equal, results(), by_autograd))
    finally:
        set_backend("auto")


def test_compiled_code_has_the_op_and_no_break():
    def call(x: Tensor) -> Tensor:
        return rms_norm(x, WEIGHT)

    with torch.no_grad():
        graphs = []
        compiled = torch.compile(call, fullgraph=True, backend=lambda graph, inputs: graphs.append(graph) or graph)
        assert torch.equal(compiled(X), call(X))
    torch._dynamo.reset()
    assert "ztk.rms_norm" in graphs[0].code
