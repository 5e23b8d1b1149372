"""Who computes attention on a GPU, with times and libraries that the tests give, on tensors that report a GPU as their device."""

import json
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import triton

from tests.device_tagged import gpu_tensors, tag, untagged
from ztk.kernels.ops import attention, attention_backward
from ztk.kernels.shared import attention_choice
from ztk.kernels.shared.attention_choice import CUDNN, FLASH, OWN


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Of the records. No choice is known, a call takes as many seconds as its function has in `seconds`, and the GPU is an H200."""
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(attention_choice, "gpu_seconds", lambda run: run.func.seconds)
    monkeypatch.setattr(attention_choice, "_versions", lambda device: ("H200", "3.0"))
    attention_choice.agree_by(None)
    yield tmp_path / "ztk_attention"
    attention_choice.agree_by(None)


class Computing:
    """Gradients that differ from ones by `error`, or from call to call."""

    def __init__(self, *, seconds: float, error: float = 0.0, drifts: bool = False, dtype=torch.bfloat16) -> None:
        self.seconds, self._error, self._drifts, self._dtype, self.calls = seconds, error, drifts, dtype, 0

    def __call__(self):
        self.calls += 1
        value = 1 + self._error + (self._drifts * 2.0**-7 * self.calls)
        return tuple(torch.full((8,), value, dtype=self._dtype) for _ in range(3))


def refused():
    raise RuntimeError("head dimension 256 is not supported")


def choose(*, own, heads: int = 4, **others) -> str:
    q = torch.zeros(8, heads, 16, dtype=torch.bfloat16)
    sizes = {"cu_seqlens": None, "T": 8, "causal": True, "window": 0}
    return attention_choice.choose("backward", (), q=q, k=q, **sizes, own=own, others=others)


@pytest.mark.parametrize(
    ("other", "chosen", "reason"),
    [
        (Computing(seconds=0.6), "other", None),
        (Computing(seconds=0.6, error=2.0**-7), "other", None),  # a rounding of bf16
        (Computing(seconds=0.97), OWN, None),  # noise
        (Computing(seconds=0.6, error=0.1), OWN, "a result differs by 0.28"),  # 0.1 sqrt(8), rounded to bf16
        (Computing(seconds=0.6, error=float("nan")), OWN, "two calls differ"),
        (Computing(seconds=0.6, drifts=True), OWN, "two calls differ"),
        (Computing(seconds=0.6, dtype=torch.float32), OWN, "a result is torch.float32"),
        (refused, OWN, "head dimension 256"),
    ],
)
def test_the_faster_one_is_chosen_if_it_is_right(folder, other, chosen, reason):
    assert choose(own=Computing(seconds=1.0), other=other) == chosen
    (path,) = folder.iterdir()
    record = json.loads(path.read_text())
    assert record["key"][:2] == ["backward", 8]
    assert record["refused"] == {} if reason is None else reason in record["refused"]["other"]


def test_logarithms_must_agree_to_more_digits_than_results(folder):
    """They are fp32, and exponents of all probabilities of the backward."""
    own = Computing(seconds=1.0, dtype=torch.float32)
    assert choose(own=own, other=Computing(seconds=0.5, error=2.0**-15, dtype=torch.float32)) == "other"
    assert choose(own=own, heads=2, other=Computing(seconds=0.5, error=2.0**-12, dtype=torch.float32)) == OWN


def test_the_fastest_of_several_is_chosen_and_logged(folder, caplog, monkeypatch):
    for name in ("has_flash", "has_cudnn"):
        monkeypatch.setattr(attention_choice, name, lambda: True)
    others = {FLASH: Computing(seconds=0.7), CUDNN: Computing(seconds=0.6), "third": refused}
    with caplog.at_level(logging.INFO, logger="ztk"):
        assert choose(own=Computing(seconds=1.0), **others) == CUDNN
    (line,) = caplog.messages
    assert line == "attention's backward for q [8, 4, 16]: cudnn (ztk 1e+03 ms, flash attention 3 700 ms, cudnn 600 ms)"


def test_a_shape_is_measured_once_by_all_processes(folder):
    """Other shapes have their own choice."""
    fast, slow = Computing(seconds=0.5), Computing(seconds=1.0)
    assert choose(own=slow, other=fast) == "other"
    calls = fast.calls
    attention_choice.agree_by(None)  # another process
    assert choose(own=fast, other=slow) == "other" and fast.calls == calls
    assert choose(own=fast, heads=2, other=slow) == OWN
    assert len(list(folder.iterdir())) == 2


def test_nodes_have_the_choice_of_the_first_one_also_in_later_runs(folder, monkeypatch, tmp_path):
    """The nodes' files lie in two folders."""
    fast, slow, store = Computing(seconds=0.5), Computing(seconds=1.0), dist.HashStore()
    attention_choice.agree_by(store)
    assert choose(own=slow, other=fast) == "other"
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "second"))
    attention_choice.agree_by(store)
    assert choose(own=fast, other=slow) == "other"
    for first in ("second", "."):  # whichever is first in the next run
        monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / first))
        attention_choice.agree_by(dist.HashStore())
        assert choose(own=fast, other=slow) == "other"


def test_a_node_without_the_chosen_library_ends_the_run(folder):
    store = dist.HashStore()
    attention_choice.agree_by(store)
    assert choose(own=Computing(seconds=1.0), other=Computing(seconds=0.5)) == "other"
    attention_choice.agree_by(store)
    with pytest.raises(RuntimeError, match="computes the backward by other, which .* lacks: install the same"):
        choose(own=Computing(seconds=1.0))
    attention_choice.agree_by(dist.HashStore())  # whose first node lacks it
    assert choose(own=Computing(seconds=1.0)) == OWN
    attention_choice.agree_by(attention_choice._store)
    assert choose(own=Computing(seconds=1.0), other=Computing(seconds=0.5)) == OWN


SIZES = {"batch": (None, 6, True, 0, 0.25), "packed": (torch.tensor([0, 5, 12], dtype=torch.int32), 7, True, 3, 0.25)}


@pytest.fixture
def library(folder, monkeypatch):
    """FlashAttention-3's module and cuDNN's op compute by ztk's CPU implementations, in half of the time of ztk's kernels."""
    forward, backward = attention._cpu_fwd, attention_backward._cpu_bwd

    def offsets_of(cu_seqlens_q, cu_seqlens_k, *, max_seqlen_q, max_seqlen_k):
        assert cu_seqlens_q.is_cuda and cu_seqlens_q.dtype == torch.int32 and max_seqlen_q == max_seqlen_k
        assert torch.equal(untagged(cu_seqlens_q), untagged(cu_seqlens_k))
        return untagged(cu_seqlens_q), max_seqlen_q

    def flash_attn_forward(
        q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size_left,
        window_size_right,
    ):  # fmt: skip
        assert all(x.is_cuda for x in (q, k, v)) and window_size_right == (0 if causal else -1)
        lengths = offsets_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
        out, lse = forward(*map(untagged, (q, k, v)), *lengths, causal, window_size_left + 1, softmax_scale)
        return tag(out), tag(lse), None, None

    def flash_attn_backward(
        dout, q, k, v, out, softmax_lse, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dq, dk, dv,
        softmax_scale, is_causal, window_size_left, window_size_right, deterministic,
    ):  # fmt: skip
        tensors = (dout, q, k, v, out, softmax_lse)
        assert all(x.is_cuda for x in tensors) and deterministic and window_size_right == (0 if is_causal else -1)
        lengths = offsets_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q=max_seqlen_q, max_seqlen_k=max_seqlen_k)
        found = backward(*map(untagged, tensors), *lengths, is_causal, window_size_left + 1, softmax_scale)
        for target, value in zip((dq, dk, dv), found, strict=True):
            target.copy_(value)

    def cudnn(q, k, v, bias, with_lse, dropout, causal, *, scale):
        assert bias is None and with_lse and not dropout and all(x.is_cuda for x in (q, k, v))
        B, H, T, D = q.shape
        rows = (untagged(x.transpose(1, 2).flatten(0, 1)) for x in (q, k, v))
        out, lse = forward(*rows, None, T, causal, 0, scale)
        return tag(out.view(B, T, H, D).transpose(1, 2)), tag(lse.view(H, B, T).transpose(0, 1).contiguous()[..., None])

    def own(compute):
        return lambda *args: tuple(
            map(tag, compute(*(untagged(x) if isinstance(x, torch.Tensor) else x for x in args)))
        )

    module = SimpleNamespace(_flash_attn_forward=flash_attn_forward, _flash_attn_backward=flash_attn_backward)
    monkeypatch.setitem(sys.modules, attention_choice.PACKAGE, module)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    owns = own(forward), own(backward)
    monkeypatch.setattr(attention, "_launch_own_fwd", owns[0])
    monkeypatch.setattr(attention_backward, "_launch_own_bwd", owns[1])
    monkeypatch.setattr(attention_choice, "gpu_seconds", lambda run: 1.0 if run.func in owns else 0.5)

    def have(*, flash: bool, cudnn: bool) -> None:
        monkeypatch.setattr(attention_choice, "has_flash", lambda: flash)
        monkeypatch.setattr(attention_choice, "has_cudnn", lambda: cudnn)

    return have


def tensors(*, sequences_of: str) -> tuple[list[torch.Tensor], tuple]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(12, heads, 16, dtype=torch.bfloat16) for heads in (4, 2, 2))
    return [q, k, v], SIZES[sequences_of]


@pytest.mark.parametrize(
    ("has", "sequences"), [("flash", "batch"), ("flash", "packed"), ("cudnn", "batch"), ("cudnn", "packed")]
)
def test_a_library_gets_the_arguments_of_a_forward(library, folder, has, sequences):
    """Equal results, all tensors on one device. cuDNN has no packed sequences."""
    library(flash=has == "flash", cudnn=has == "cudnn")
    given, sizes = tensors(sequences_of=sequences)
    expected = attention._cpu_fwd(*given, *sizes)
    with gpu_tensors():
        found = attention._launch_fwd(
            *(tag(x.clone()) for x in given), *(tag(x) if isinstance(x, torch.Tensor) else x for x in sizes)
        )
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True))
    assert all(mine.is_contiguous() for mine in found)
    chosen = [json.loads(path.read_text())["chosen"] for path in folder.iterdir()] if folder.exists() else []
    assert chosen == ([] if (has, sequences) == ("cudnn", "packed") else [{"flash": FLASH, "cudnn": CUDNN}[has]])


@pytest.mark.parametrize("sequences", ["batch", "packed"])
def test_flash_attention_gets_the_arguments_of_a_backward(library, folder, sequences):
    library(flash=True, cudnn=True)
    (q, k, v), sizes = tensors(sequences_of=sequences)
    d_out = torch.randn_like(q)
    out, lse = attention._cpu_fwd(q, k, v, *sizes)
    expected = attention_backward._cpu_bwd(d_out, q, k, v, out, lse, *sizes)
    with gpu_tensors():
        given = (tag(x.clone()) for x in (d_out, q, k, v, out, lse))
        found = attention_backward._launch_bwd(*given, *(tag(x) if isinstance(x, torch.Tensor) else x for x in sizes))
    assert all(torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True))
    (path,) = folder.iterdir()
    assert json.loads(path.read_text())["chosen"] == FLASH
