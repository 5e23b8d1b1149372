"""The choice of attention's backward, with times and a library that the tests give, on tensors that report a GPU as their device."""

import json
import sys
from types import SimpleNamespace

import pytest
import torch
import triton

from tests.device_tagged import gpu_tensors, tag, untagged
from ztk.kernels.ops import attention_backward
from ztk.kernels.shared import backward_choice
from ztk.kernels.shared.backward_choice import LIBRARY, OWN


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of the records. No choice is known, and a call takes as many seconds as its function has in `seconds`."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(backward_choice, "_chosen", {})
    monkeypatch.setattr(backward_choice, "gpu_seconds", lambda run: run.seconds)
    return tmp_path / "ztk_attention_backward"


class Computing:
    """Gradients that differ from ones by `error`, or from call to call."""

    def __init__(self, *, seconds: float, error: float = 0.0, drifts: bool = False) -> None:
        self.seconds, self._error, self._drifts, self.calls = seconds, error, drifts, 0

    def __call__(self):
        self.calls += 1
        value = 1 + self._error + (self._drifts * 2.0**-7 * self.calls)
        return tuple(torch.full((8,), value, dtype=torch.bfloat16) for _ in range(3))


def refused():
    raise RuntimeError("head dimension 256 is not supported")


@pytest.mark.parametrize(
    ("other", "chosen", "reason"),
    [
        (Computing(seconds=0.6), LIBRARY, None),
        (Computing(seconds=0.6, error=2.0**-7), LIBRARY, None),  # a rounding of bf16
        (Computing(seconds=0.97), OWN, None),  # noise
        (Computing(seconds=0.6, error=0.1), OWN, "gradients differ by 0.28"),  # 0.1 sqrt(8), rounded to bf16
        (Computing(seconds=0.6, error=float("nan")), OWN, "two calls differ"),
        (Computing(seconds=0.6, drifts=True), OWN, "two calls differ"),
        (refused, OWN, "head dimension 256"),
    ],
)
def test_the_faster_one_is_chosen_if_it_is_right(folder, other, chosen, reason):
    own = Computing(seconds=1.0)
    assert backward_choice.choose(("H200", 4, 8), own=own, other=other) == chosen
    (path,) = folder.iterdir()
    record = json.loads(path.read_text())
    assert record["key"] == ["H200", 4, 8] and (reason is None or reason in record["reason"])


def test_a_shape_is_measured_once_by_all_processes(folder, monkeypatch):
    """A rank that measured at the same time adopts the first record, and other shapes have their own."""
    fast, slow = Computing(seconds=0.5), Computing(seconds=1.0)
    assert backward_choice.choose(("shape",), own=slow, other=fast) == LIBRARY
    calls = fast.calls
    monkeypatch.setattr(backward_choice, "_chosen", {})  # another process
    assert backward_choice.choose(("shape",), own=fast, other=slow) == LIBRARY and fast.calls == calls
    (path,) = folder.iterdir()
    backward_choice._write(path, {"chosen": OWN})
    assert json.loads(path.read_text())["chosen"] == LIBRARY
    assert backward_choice.choose(("other shape",), own=fast, other=slow) == OWN
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("packed", [False, True])
def test_the_library_gets_the_arguments_of_a_backward(folder, monkeypatch, packed):
    """FlashAttention-3's function computes by ztk's CPU path here: equal gradients, all tensors on one device."""

    def flash_attn_backward(
        dout, q, k, v, out, softmax_lse, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dq, dk, dv,
        softmax_scale, is_causal, window_size_left, window_size_right, deterministic,
    ):  # fmt: skip
        tensors = (dout, q, k, v, out, softmax_lse, cu_seqlens_q)
        assert all(x.is_cuda for x in (*tensors, cu_seqlens_k)) and deterministic and max_seqlen_q == max_seqlen_k
        assert window_size_right == (0 if is_causal else -1) and cu_seqlens_q.dtype == torch.int32
        rest = (max_seqlen_q, is_causal, window_size_left + 1, softmax_scale)
        for target, value in zip((dq, dk, dv), on_cpu(*map(untagged, tensors), *rest), strict=True):
            target.copy_(value)

    on_cpu = attention_backward._cpu_bwd
    monkeypatch.setitem(sys.modules, backward_choice.PACKAGE, SimpleNamespace(_flash_attn_backward=flash_attn_backward))
    monkeypatch.setattr(backward_choice, "has_library", lambda: True)
    monkeypatch.setattr(backward_choice, "versions", lambda device: ("H200", "3.0"))
    monkeypatch.setattr(backward_choice, "gpu_seconds", lambda run: 1.0 if run.func is own else 0.5)

    def own(*args):
        return tuple(map(tag, on_cpu(*(untagged(x) if isinstance(x, torch.Tensor) else x for x in args))))

    monkeypatch.setattr(attention_backward, "_launch_own_bwd", own)
    torch.manual_seed(0)
    d_out, q, out = (torch.randn(12, 4, 16, dtype=torch.bfloat16) for _ in range(3))
    k, v = (torch.randn(12, 2, 16, dtype=torch.bfloat16) for _ in range(2))
    lse, offsets = torch.randn(4, 12), torch.tensor([0, 5, 12], dtype=torch.int32) if packed else None
    rest = (7, True, 3, 0.25) if packed else (6, True, 0, 0.25)
    expected = on_cpu(d_out, q, k, v, out, lse, offsets, *rest)
    with gpu_tensors():
        given = (None if x is None else tag(x.clone()) for x in (d_out, q, k, v, out, lse, offsets))
        found = attention_backward._launch_bwd(*given, *rest)
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True))
    (path,) = folder.iterdir()
    assert json.loads(path.read_text())["chosen"] == LIBRARY
