"""Timed calls, their owners, and the least bytes of a call."""

import math
import threading

import pytest
import torch

from ztk import kernels
from ztk.kernels import ALL_OPS, Ceilings, KernelTimes
from ztk.kernels.launch import library
from ztk.kernels.work import visible_pairs, work_of

# Statistics, control rows and offsets come on top of `num_bytes`, which counts rows of these widths.
SHAPES = {
    "swiglu": (32, 256),
    "geglu": (32, 256),
    "rms_norm": (64, 256),
    "layer_norm": (64, 256),
    "rope": (1, 512, 8, 16),
    "cross_entropy": (16, 1024),
    "sharded_cross_entropy": (16, 1024),
    "attention": (2, 32, 2, 64),
    "grouped_matmul": (64, 2, 64, 64),
    "router_losses": (64, 64),
    "moe_combine": (64, 2, 128),
    "quantize": (2, 4096),
    "dequantize": (2, 4096),
    "dequantize_reduce": (2, 4096),
    "step_control": (64,),
    "segment_scan": (8, 512),
    "linear_rows": (4, 256, 256),
    "gated_rows": (4, 256, 256),
    "draw_rows": (4, 256, 256),
    "select_rows": (4, 256),
    "symmetric_product": (64, 256),
    "float8_largest": (64, 256),
    "float8_codes": (64, 256),
}
# linear_cross_entropy, linear_logprob and moe_route count the tensors between their steps; random lengths in attention_varlen and
# rows behind the last expert's slots differ from the SPEC's shape.
OTHERS = (
    *("linear_cross_entropy", "linear_logprob", "moe_route", "attention_varlen", "grouped_matmul_pair"),
    *("paged_attention", "cache_rows", "copy_blocks"),  # given a cache of which they read or write a part
)


def ops_of(spec, *, shape, dtype):
    """Times of the op's forward and of its backward. Elementwise ops on a CPU are torch's own unless the kernels run."""
    inputs = spec.make_inputs(shape, dtype=dtype, device="cpu")
    for name in spec.differentiable:
        if inputs[name] is not None:
            inputs[name].requires_grad_()
    if spec.name in ("swiglu", "geglu", "rope"):
        kernels.set_backend("triton")
    with KernelTimes() as forward:
        out = spec.op(**inputs)
    outs = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, torch.Tensor) and o.requires_grad]
    with KernelTimes() as backward:
        torch.autograd.backward(outs, [torch.ones_like(o) for o in outs])
    return forward.read(), backward.read()


@pytest.mark.parametrize(
    "spec", [spec for spec in ALL_OPS if spec.name not in OTHERS], ids=lambda spec: getattr(spec, "name", None)
)
def test_bytes_equal_the_spec(spec):
    shape = SHAPES.get(spec.name, (4096,))
    dtype = torch.bfloat16 if torch.bfloat16 in spec.dtypes else torch.float32
    forward, backward = ops_of(spec, shape=shape, dtype=dtype)
    size = dtype.itemsize
    expected, back = spec.num_bytes(shape, size), spec.num_bytes_backward
    moved = sum(time.num_bytes for time in forward.values())
    if spec.name == "grouped_matmul":  # the SPEC's x is one per token, and each has two slots
        assert moved < 1.25 * expected
    else:
        assert expected <= moved < 1.25 * expected  # a quarter: the widest statistics of the narrowest rows above
    if back is not None and back(shape, size):
        assert back(shape, size) <= sum(time.num_bytes for time in backward.values()) < 1.25 * back(shape, size)


def test_a_residual_and_fewer_heads_of_keys_count():
    x, weight = torch.zeros(64, 256), torch.zeros(256)
    with KernelTimes() as alone:
        kernels.rms_norm(x, weight)
    with KernelTimes() as both:
        kernels.rms_norm(x, weight, residual=x.clone())
    assert both.read()["rms_norm"].num_bytes - alone.read()["rms_norm"].num_bytes == 2 * x.nbytes
    q, k = torch.zeros(1, 64, 8, 32), torch.zeros(1, 64, 2, 32)
    with KernelTimes() as times:
        kernels.attention(q, k, k)
    assert times.read()["attention"].num_bytes == 2 * q.nbytes + 2 * k.nbytes + 64 * 8 * 4


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 1, 3, 7, 9])
def test_visible_pairs_are_counted(causal, window):
    seen = [(i, j) for i in range(7) for j in range(7) if (j <= i or not causal) and (not window or j > i - window)]
    assert visible_pairs(7, causal=causal, window=window) == len(seen)


def test_operations_of_products():
    """By `num_flops` of the SPECs, and per sequence of a packed batch."""
    flops = {}
    for name, shape in (
        ("attention", (2, 16, 2, 16)),
        ("grouped_matmul", (24, 3, 16, 8)),
        ("linear_cross_entropy", (3, 8, 11)),
    ):
        (spec,) = (spec for spec in ALL_OPS if spec.name == name)
        one = Ceilings(memory_bandwidth=math.inf, rates={torch.float32: 1.0})
        inputs = spec.make_inputs(shape, dtype=torch.float32, device="cpu")
        for given in spec.differentiable:
            inputs[given].requires_grad_()
        with KernelTimes(ceilings=one) as times:
            spec.op(**inputs)
        flops[name] = times.read()[name].floor_seconds
        assert flops[name] == spec.num_flops(shape)
    q, offsets = torch.zeros(12, 2, 16), torch.tensor([0, 5, 12], dtype=torch.int32)
    args = (q, q, q, offsets, 7, True, 0, 1.0)
    work = work_of("attention", args=args, result=(q, torch.zeros(2, 12)))
    assert work.flops() == 4 * (15 + 28) * 2 * 16
    back = work_of(
        "attention_backward", args=(q, q, q, q, q, torch.zeros(2, 12), offsets, 7, True, 0, 1.0), result=(q, q, q)
    )
    assert back.flops() == 10 * (15 + 28) * 2 * 16


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_call_that_does_nothing_moves_nothing(factor):
    """The forward already computes the gradient of a loss; the backward scales it by its own input, and by 1 it touches no memory."""
    logits, target = torch.randn(6, 40, requires_grad=True), torch.arange(6)
    with KernelTimes() as times:
        (factor * kernels.cross_entropy(logits * 1, target, inplace=True)).backward()
    scaled = times.read()["scale_rows"]
    assert (scaled.calls, scaled.num_bytes) == (1, 0 if factor == 1 else 2 * 6 * 40 * 4 + 4)


def test_the_floor_is_the_longer_of_moving_and_computing():
    ceilings = Ceilings(memory_bandwidth=100.0, rates={torch.bfloat16: 1000.0, torch.float32: 10.0})
    assert ceilings.seconds(num_bytes=200, flops=100, dtype=torch.bfloat16) == 2.0
    assert ceilings.seconds(num_bytes=200, flops=100, dtype=torch.float64) == 10.0


def test_ops_are_what_was_registered_before_during_and_after():
    """Nothing is put in the place of an op or its launcher, and the bits are the same."""
    x, weight = torch.randn(8, 16), torch.randn(16)
    before = (
        [library.operator(name) for name in kernels.op_names()],
        dict(library.LAUNCHERS),
        kernels.rms_norm(x, weight),
    )
    with KernelTimes() as times:
        during = [library.operator(name) for name in kernels.op_names()]
        timed = kernels.rms_norm(x, weight)
    assert library.get_watch() is None
    assert all(a is b for a, b in zip(before[0], during, strict=True))
    assert before[1] == library.LAUNCHERS and torch.equal(timed, before[2])
    assert times.read()["rms_norm"].calls == 1 and times.read() == {}


def test_what_is_handed_over_belongs_to_the_next_period_in_full():
    """Also where it has run before that period begins, or goes on while something is aside."""
    x, weight = torch.randn(8, 16), torch.randn(16)
    times = KernelTimes()
    try:
        times.begin(current=False, following=True)
        kernels.rms_norm(x, weight)  # nobody's
        for _ in range(2):
            runs = threading.Thread(target=kernels.behind_step(lambda: kernels.rms_norm(x, weight)))
            runs.start()
            runs.join()
        late = kernels.behind_step(lambda: kernels.rms_norm(x, weight))
        times.begin(current=True, following=False)
        others = kernels.behind_step(lambda: kernels.rms_norm(x, weight))  # the next period's, which is not timed
        kernels.layer_norm(x, weight, weight)
        with times.aside():
            kernels.layer_norm(x, weight, weight)
            for call in (late, others):
                runs = threading.Thread(target=call)
                runs.start()
                runs.join()
        runs = threading.Thread(target=lambda: kernels.layer_norm(x, weight, weight))  # not handed over: now
        runs.start()
        runs.join()
        times.end()
        kernels.layer_norm(x, weight, weight)
        assert {name: time.calls for name, time in times.read().items()} == {"rms_norm": 3, "layer_norm": 2}
    finally:
        times.close()
    call = lambda: None  # noqa: E731
    assert kernels.behind_step(call) is call


def test_two_at_once_are_refused():
    with KernelTimes(), pytest.raises(RuntimeError, match="close the other"):
        KernelTimes().begin()
    assert library.get_watch() is None


class Event:
    """A GPU's clock, readable after a wait."""

    now, is_done = 0.0, False

    def record(self):
        self.at = Event.now

    def elapsed_time(self, end):
        assert Event.is_done, "read before the wait"
        return end.at - self.at


def test_events_of_a_gpu_are_read_after_one_wait(monkeypatch):
    waits = []

    def synchronize():
        waits.append(1)
        Event.is_done = True

    def run(*args):
        Event.now += 2.0
        return torch.zeros(64, 256), torch.zeros(0), torch.zeros(64)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    times = KernelTimes(event=Event, synchronize=synchronize, ceilings=Ceilings(memory_bandwidth=1e9))
    with times:
        for _ in range(3):
            times("rms_norm", run, (torch.zeros(64, 256), None, torch.zeros(256), 1e-6), on_gpu=True)
        assert not waits
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        times("rms_norm", run, (), on_gpu=True)  # into a graph: runs, and has no time
    found = times.read()["rms_norm"]
    moved = 3 * (2 * 64 * 256 + 256 + 64) * 4
    assert (found.calls, found.seconds, found.num_bytes) == (3, 6e-3, moved) and len(waits) == 1
    assert found.floor_seconds == pytest.approx(moved / 1e9)
