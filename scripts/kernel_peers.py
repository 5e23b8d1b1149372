"""Other implementations of each op for benchmarks: torch's fused forms, liger-kernel, FlashOptim and FlashAttention 3."""

import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F

Peer = Callable[..., object]  # takes the op's keyword arguments


def _sdpa(backend) -> Peer:
    def run(q, k, v, *, causal=True, window=0, scale=None):
        if window:
            raise NotImplementedError("SDPA has no window")
        with torch.nn.attention.sdpa_kernel(backend):
            heads = (x.transpose(1, 2) for x in (q, k, v))
            out = F.scaled_dot_product_attention(
                *heads, is_causal=causal, scale=scale, enable_gqa=q.shape[2] != k.shape[2]
            )
        return out.transpose(1, 2)

    return run


def _layer_norm(x, weight, bias=None, *, eps=1e-5, residual=None):
    s = x if residual is None else x + residual
    return F.layer_norm(s, s.shape[-1:], weight, bias, eps)


def _rms_norm(x, weight, *, eps=1e-6, residual=None):
    s = x if residual is None else x + residual
    return F.rms_norm(s, s.shape[-1:], weight, eps)


def _cross_entropy(logits, target, *, ignore_index=-100, **_):
    flat = logits.reshape(-1, logits.shape[-1])
    return F.cross_entropy(flat, target.reshape(-1), ignore_index=ignore_index)


def _linear_cross_entropy(x, weight, target, *, ignore_index=-100, **_):
    return F.cross_entropy(F.linear(x, weight), target, ignore_index=ignore_index)


def _sum_of_squares(grad):
    return torch._foreach_norm([grad])[0].square()


class _TorchAdamW:
    """A common training loop's update: norm, unscale, fused AdamW on float32 states, cast."""

    def __call__(self, master, *, grad, exp_avg, exp_avg_sq, control, out=None, decoupled=True):
        wide = grad.float()
        torch._foreach_norm([wide])
        torch._foreach_mul_([wide], 0.5)
        step = getattr(self, "step", None)
        if step is None or step.device != master.device:
            self.step = step = torch.ones((), device=master.device)
        torch._fused_adamw_(
            [master], [wide], [exp_avg], [exp_avg_sq], [], [step], lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1,
            eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip
        if out is not None:
            out.copy_(master)


def _grouped_mm(x, weight, *, offsets, order=None, position=None):
    if order is None or position is None:
        rows = x
    else:
        rows = x.index_select(0, order // position.shape[1])
    return torch._grouped_mm(rows, weight, offs=offsets[1:])


def _grouped_mm_twice(x, weight, weight2, **where):
    return _grouped_mm(x, weight, **where), _grouped_mm(x, weight2, **where)


def torch_peers() -> dict[str, dict[str, Peer]]:
    """Fused forms in torch, by op and name."""
    backend = torch.nn.attention.SDPBackend
    peers: dict[str, dict[str, Peer]] = {
        "attention": {"sdpa flash": _sdpa(backend.FLASH_ATTENTION), "sdpa cudnn": _sdpa(backend.CUDNN_ATTENTION)},
        "layer_norm": {"F.layer_norm": _layer_norm},
        "rms_norm": {"F.rms_norm": _rms_norm},
        "cross_entropy": {"F.cross_entropy": _cross_entropy},
        "linear_cross_entropy": {"F.linear + F.cross_entropy": _linear_cross_entropy},
        "sum_of_squares": {"torch._foreach_norm": _sum_of_squares},
        "adamw": {"norm + mul + torch._fused_adamw_ + cast": _TorchAdamW()},
    }
    if hasattr(torch, "_grouped_mm"):
        peers["grouped_matmul"] = {"torch._grouped_mm": _grouped_mm}
        peers["grouped_matmul_pair"] = {"torch._grouped_mm twice": _grouped_mm_twice}
    return peers


def liger_peers() -> dict[str, dict[str, Peer]]:
    """liger-kernel's implementations, if it is installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return {}
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    def cross_entropy(logits, target, **_):
        return LigerCrossEntropyFunction.apply(logits, target, None, -100, 0.0, 0.0, "mean", None, False)[0]

    def linear_cross_entropy(x, weight, target, *, ignore_index=-100, **_):
        return LigerFusedLinearCrossEntropyFunction.apply(x, weight, target, None, None, ignore_index)[0]

    return {
        "linear_cross_entropy": {"liger fused": linear_cross_entropy},
        "swiglu": {"liger": lambda gate, up: LigerSiLUMulFunction.apply(gate, up)},
        "rms_norm": {"liger": lambda x, weight, *, eps=1e-6, residual=None: LigerRMSNormFunction.apply(x, weight, eps)},
        "layer_norm": {
            "liger": lambda x, weight, bias=None, *, eps=1e-5, residual=None: LigerLayerNormFunction.apply(
                x, weight, bias, eps
            )
        },
        "cross_entropy": {"liger": cross_entropy},
    }


class _FlashOptimAdamW:
    """FlashOptim's AdamW with 8-bit states over one parameter of the same size, because its optimizer owns its states."""

    def __init__(self, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self._make = optimizer
        self._made: tuple[torch.nn.Parameter, torch.optim.Optimizer] | None = None

    def __call__(self, param, *, grad, **_):
        made = self._made
        if made is None or made[0].shape != param.shape or made[0].device != param.device:
            parameter = torch.nn.Parameter(torch.zeros_like(grad, dtype=torch.bfloat16))
            self._made = made = parameter, self._make([parameter], lr=1e-3, weight_decay=0.1)
        made[0].grad = grad.to(torch.bfloat16)
        made[1].step()


def flashoptim_peers() -> dict[str, dict[str, Peer]]:
    """FlashOptim's implementations, if it is installed."""
    if importlib.util.find_spec("flashoptim") is None:
        return {}
    import flashoptim

    return {"adamw_8bit": {"flashoptim": _FlashOptimAdamW(flashoptim.FlashAdamW)}}


def flash_attention_peers() -> dict[str, dict[str, Peer]]:
    """FlashAttention 3's implementations, if it is installed."""
    if importlib.util.find_spec("flash_attn_interface") is None:
        return {}
    from flash_attn_interface import flash_attn_func

    def attention(q, k, v, *, causal=True, window=0, scale=None):
        sizes = {"window_size": (window - 1, 0)} if window else {}
        out = flash_attn_func(q, k, v, softmax_scale=scale, causal=causal, **sizes)
        return out[0] if isinstance(out, tuple) else out

    return {"attention": {"flash attention 3": attention}}


def all_peers() -> dict[str, dict[str, Peer]]:
    """Every installed peer by op and name."""
    peers = torch_peers()
    for found in (liger_peers(), flashoptim_peers(), flash_attention_peers()):
        for op, named in found.items():
            peers.setdefault(op, {}).update(named)
    return peers
