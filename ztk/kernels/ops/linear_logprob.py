"""Log-probabilities of tokens under softmax(x @ weight^T / temperature), and losses of them, without ever holding the logits.

    for each chunk of tokens:   logits = x_c @ weight^T / temperature                     [rows, V]
                                logprob = logits[token] - log(sum(exp(logits)))
    gradient:                   g = d_logprob * (onehot(token) - softmax(logits)) / temperature
                                d_x_c = g @ weight,    d_weight += g^T x_c                 (both float32)

`linear_token_loss` takes a loss that is a sum over tokens, each a function of its own log-probability (PPO, GRPO, CISPO): d_logprob is
known as soon as the chunk's log-probabilities are, so its gradients come in the same chunk, 6 T H V operations for forward and backward.
Losses of a sequence's summed log-probabilities (DPO, GSPO) use `linear_logprob`, whose backward computes the logits again: 8 T H V.

Between the products a chunk is read by the kernels of `cross_entropy` on a GPU, and by torch's log_softmax on a CPU. The products round
like a model's linear layers. So if a product's rows do not depend on their number, as on a CPU, log-probabilities have the bits of a
forward that holds all logits. Memory: the chunk, in float32 too, its gradient, d_x and d_weight in float32.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ztk.kernels.launch.functions import OnceFunction
from ztk.kernels.launch.library import needs_reference, register, use_reference
from ztk.kernels.ops.cross_entropy import _launch_bwd, _launch_fwd
from ztk.kernels.ops.linear_cross_entropy import CHUNK_BYTES, CPU_CHUNK_BYTES, accumulate, chunk_rows, multiply, operand
from ztk.kernels.shared.spec import OpSpec, compute_dtype

IGNORED = -100
_PLAIN = (IGNORED, 0.0, 0.0)  # no z-loss, no smoothing
# (log-probabilities [n], which tokens [n] they are of, logits / temperature [n, V] without a gradient) -> the sum of their losses
TokenLoss = Callable[[Tensor, slice, Tensor], Tensor]
# (logits / temperature [n, V], which tokens [n] they predict) -> the same with -inf where a token is not in the softmax
Hide = Callable[[Tensor, slice], Tensor]
# x [n, H], weight [V, H] -> logits [n, V]
Product = Callable[[Tensor, Tensor], Tensor]


def _launch(logits: Tensor, target: Tensor) -> Tensor:
    return _launch_fwd(logits, target, *_PLAIN)[0].neg_()


def _launch_backward(logits: Tensor, target: Tensor, d_logprob: Tensor) -> Tensor:
    rows = _launch_fwd(logits, target, *_PLAIN)[1]
    return _launch_bwd(logits, target, rows, -d_logprob, *_PLAIN)


def _cpu(logits: Tensor, target: Tensor) -> Tensor:
    counts = target != IGNORED
    found = torch.log_softmax(logits, dim=-1).gather(-1, torch.where(counts, target, 0)[:, None])[:, 0]
    return found * counts


def _cpu_backward(logits: Tensor, target: Tensor, d_logprob: Tensor) -> Tensor:
    counts = target != IGNORED
    d = d_logprob * counts
    return (
        torch.softmax(logits, dim=-1)
        .mul_(-d[:, None])
        .scatter_add_(-1, torch.where(counts, target, 0)[:, None], d[:, None])
    )


_chosen = register(
    "chosen_logprob(Tensor logits, Tensor target) -> Tensor",
    triton=_launch,
    cpu=_cpu,
    fake=lambda logits, target: logits.new_empty(logits.shape[0]),
)
_chosen_backward = register(
    "chosen_logprob_backward(Tensor logits, Tensor target, Tensor d_logprob) -> Tensor",
    triton=_launch_backward,
    cpu=_cpu_backward,
    fake=lambda logits, target, d_logprob: torch.empty_like(logits),
)


def _chunks(
    x: Tensor, *, weight: Tensor, temperature: float, rows: int, product: Product
) -> Iterator[tuple[slice, Tensor]]:
    """Chunks of tokens, and their logits / temperature [n, V] in float32, or float64."""
    for start in range(0, x.shape[0], rows):
        cut = slice(start, start + rows)
        logits = product(x[cut], weight).to(compute_dtype(x))
        yield cut, logits if temperature == 1.0 else logits / temperature


def _hidden(logits: Tensor, *, cut: slice, hide: Hide | None) -> Tensor:
    return logits if hide is None else hide(logits, cut)


class _Gradients:
    """Gradients of x and weight, in float32 or float64, accumulated from chunks of logits."""

    def __init__(self, x: Tensor, *, weight: Tensor, temperature: float) -> None:
        self._x, self._weight, self._temperature = x, operand(weight), temperature
        self.d_x = torch.empty_like(x, dtype=compute_dtype(x))
        self.d_weight = torch.zeros_like(weight, dtype=compute_dtype(x))

    def add(self, cut: slice, *, logits: Tensor, target: Tensor, d_logprob: Tensor) -> None:
        """Adds the gradients of the tokens `cut`. logits: [n, V]. target, d_logprob: [n]."""
        g = _chosen_backward(logits, target, d_logprob if self._temperature == 1.0 else d_logprob / self._temperature)
        g = operand(g.to(self._x.dtype))
        multiply(g, self._weight, out=self.d_x[cut])
        accumulate(self.d_weight, g=g, x=operand(self._x[cut]))


class _LinearLogprob(OnceFunction):
    @staticmethod
    def forward(ctx, x, weight, target, temperature, rows, product, hide):
        out = torch.empty(x.shape[0], dtype=compute_dtype(x), device=x.device)
        for cut, logits in _chunks(x, weight=weight, temperature=temperature, rows=rows, product=product):
            out[cut] = _chosen(_hidden(logits, cut=cut, hide=hide), target[cut])
        ctx.save_for_backward(x, weight, target)
        ctx.options = (temperature, rows, product, hide)
        return out

    @staticmethod
    def backward(ctx, d_logprob):
        x, weight, target = ctx.saved_tensors
        temperature, rows, product, hide = ctx.options
        found = _Gradients(x, weight=weight, temperature=temperature)
        d_logprob = d_logprob.contiguous()
        for cut, logits in _chunks(x, weight=weight, temperature=temperature, rows=rows, product=product):
            hidden = _hidden(logits, cut=cut, hide=hide)
            found.add(cut, logits=hidden, target=target[cut], d_logprob=d_logprob[cut])
        return found.d_x.to(x.dtype), found.d_weight.to(weight.dtype), None, None, None, None, None


class _LinearTokenLoss(OnceFunction):
    INSTEAD = "Compute the loss from the results of ztk.kernels.linear_logprob"

    @staticmethod
    def forward(ctx, x, weight, target, loss_of, temperature, rows, product, hide):
        found = _Gradients(x, weight=weight, temperature=temperature)
        total = torch.zeros((), dtype=compute_dtype(x), device=x.device)
        for cut, logits in _chunks(x, weight=weight, temperature=temperature, rows=rows, product=product):
            hidden = _hidden(logits, cut=cut, hide=hide)
            logprobs = _chosen(hidden, target[cut]).requires_grad_()
            with torch.enable_grad():
                loss = loss_of(logprobs, cut, logits)
            (d_logprob,) = torch.autograd.grad(loss, logprobs)
            found.add(cut, logits=hidden, target=target[cut], d_logprob=d_logprob.contiguous())
            total += loss.detach()
        ctx.save_for_backward(found.d_x, found.d_weight)
        ctx.dtypes = (x.dtype, weight.dtype)
        return total

    @staticmethod
    def backward(ctx, d_loss):
        scaled = ((d_loss * d).to(dtype) for d, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True))
        return *scaled, None, None, None, None, None, None


def chosen_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(logits) of `tokens` [n], logits [n, V] in float32, with the bits of `linear_logprob`: float32 [n], without a gradient."""
    if use_reference():
        return torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, None])[:, 0]
    return _chosen(logits.detach().contiguous(), tokens.contiguous())


def linear_logprob(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    chunk_bytes: int | None = None,
    product: Product = torch.nn.functional.linear,
    hide: Hide | None = None,
) -> Tensor:
    """log softmax(x @ weight^T / temperature) of the tokens `target`; gradients for x and weight.

    x: [T, H]; weight: [V, H], of x's dtype; target: int64 [T], -100 is ignored. product: computes the logits, as in the model's head.
    hide: leaves tokens out of the softmax, if given. At most `chunk_bytes` of float32 logits exist at a time (512 MiB; 32 MiB on CPU).
    Returns float32 [T], float64 for float64. Raises ValueError for other shapes and dtypes.
    """
    _check(x, weight=weight, target=target)
    if needs_reference():
        return linear_logprob_reference(x, weight, target, temperature=temperature, hide=hide)
    rows = _rows(x, weight=weight, chunk_bytes=chunk_bytes)
    return _LinearLogprob.apply(
        x.contiguous(), weight.contiguous(), target.contiguous(), temperature, rows, product, hide
    )


def linear_token_loss(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    loss_of: TokenLoss,
    temperature: float = 1.0,
    chunk_bytes: int | None = None,
    product: Product = torch.nn.functional.linear,
    hide: Hide | None = None,
) -> Tensor:
    """The sum over tokens of a loss of each token's log-probability, as `linear_logprob` gives it; its gradients are computed at once.

    loss_of: called once per chunk, with the logits of all tokens. Arguments otherwise as there. Returns float32 [], float64 for float64.
    Raises ValueError as there.
    """
    _check(x, weight=weight, target=target)
    rows = _rows(x, weight=weight, chunk_bytes=chunk_bytes)
    args = (x.contiguous(), weight.contiguous(), target.contiguous())
    return _LinearTokenLoss.apply(*args, loss_of, temperature, rows, product, hide)


def _check(x: Tensor, *, weight: Tensor, target: Tensor) -> None:
    fits = x.dim() == weight.dim() == 2 and x.shape[1] == weight.shape[1] and target.shape == x.shape[:1]
    if not fits or x.dtype != weight.dtype or target.dtype != torch.int64:
        raise ValueError(
            f"linear_logprob: x {tuple(x.shape)} {x.dtype}, weight {tuple(weight.shape)} {weight.dtype} and target {tuple(target.shape)} "
            f"{target.dtype} must be [T, H], [V, H] of the same dtype, and int64 [T]"
        )


def _rows(x: Tensor, *, weight: Tensor, chunk_bytes: int | None) -> int:
    if chunk_bytes is None:
        chunk_bytes = CPU_CHUNK_BYTES if x.device.type == "cpu" else CHUNK_BYTES
    itemsize = compute_dtype(x).itemsize
    return chunk_rows(tokens=x.shape[0], vocabulary=weight.shape[0], itemsize=itemsize, chunk_bytes=chunk_bytes)


def linear_logprob_reference(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    temperature: float = 1.0,
    chunk_bytes: int | None = None,
    product: Product = torch.nn.functional.linear,
    hide: Hide | None = None,
) -> Tensor:
    """From the full logits, in float32 or float64."""
    dtype = compute_dtype(x)
    logits = _hidden(x.to(dtype) @ weight.to(dtype).T / temperature, cut=slice(0, len(x)), hide=hide)
    logprobs = torch.log_softmax(logits, dim=-1)
    counts = target != IGNORED
    return torch.where(counts, logprobs.gather(-1, torch.where(counts, target, 0)[:, None])[:, 0], 0.0)


def _rounded(function):
    """The function's result in x's dtype, for comparisons: its error is the error of the rounded logits."""

    def run(x: Tensor, weight: Tensor, target: Tensor, **options) -> Tensor:
        return function(x, weight, target, **options).to(x.dtype)

    return run


def _make_inputs(shape, *, dtype, device, temperature=1.0, chunk_bytes=4096) -> dict[str, object]:
    T, H, V = shape
    target = torch.randint(0, V, (T,), device=device)
    target[T // 2] = IGNORED
    return {
        "x": torch.randn(T, H, device=device).to(dtype),
        "weight": (torch.randn(V, H, device=device) * H**-0.5).to(dtype),
        "target": target,
        "temperature": temperature,
        "chunk_bytes": chunk_bytes,
    }


SPEC = OpSpec(
    name="linear_logprob",
    op=_rounded(linear_logprob),
    reference=_rounded(linear_logprob_reference),
    make_inputs=_make_inputs,
    differentiable=("x", "weight"),
    small_shapes=((3, 8, 11), (20, 24, 130), (40, 16, 257)),
    bench_shapes=((8192, 4096, 131072), (8192, 2048, 32000)),
    variants=({}, {"temperature": 0.7}),
    num_bytes=lambda shape, itemsize: 2 * shape[0] * shape[2] * itemsize,  # the chunk is written and read
    num_bytes_backward=lambda shape, itemsize: 6 * shape[0] * shape[2] * itemsize,
    num_flops=lambda shape: 2 * shape[0] * shape[1] * shape[2],
    tolerance_ulps=4.0,  # the logits are rounded to the input's dtype
)
