"""Checks at load time that a model's rows do not depend on each other, that draws follow its logits, and that these equal its module's."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ztk.inference.base import Model
from ztk.inference.cache import Span
from ztk.inference.describe import Description
from ztk.inference.graphs import DecodeGraphs, graphs_of
from ztk.inference.masks import NothingDrawn
from ztk.inference.model import InferenceModel
from ztk.inference.parallel import Computing
from ztk.inference.policy import SamplingParams
from ztk.inference.products import Product
from ztk.inference.requests import Sequence, Work
from ztk.inference.sample import Drawn, draw
from ztk.inference.stepping import lines_of
from ztk.kernels.shared.cached_attention import differing_tile

_log = logging.getLogger(__name__)

_ROWS = (2, 3, 5, 8, 17, 33, 64, 130)
_PIECES = (1, 2, 5, 8, 17, 33, 64)  # rows of steps by kernels
_THIRDS = (16, 1, 31)  # of steps of a model's own modules
_TOKENS = 48
# Of the largest logit. fp32: rounding stays below 1e-5, an option of config.json that is read wrongly shows as percents; 16 bits: the module
# itself rounds by 2^-8 in each operation.
_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}

# One of each path from logits or hidden states to a token: see `ztk.inference.stepping`.
_WAYS = {
    "temperature=0": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_k": SamplingParams(top_k=4),
    "frequency_penalty": SamplingParams(frequency_penalty=0.5),
    "logprobs": SamplingParams(logprobs=1),
    "fp32_logprobs": SamplingParams(fp32_logprobs=True),
    "prompt_logprobs": SamplingParams(prompt_logprobs=True),
}
_ROUNDED_DRAW = 1e-3  # of the largest logit: sums in another order, in fp32


def check_model(model: Model) -> frozenset[tuple[str, tuple[int, int]]]:
    """Checks that a row's bits do not depend on other rows: `check_tiles` and `check_rows`, or `differing_piece` of a model that runs its own
    modules. By kernels logs a warning: the model still answers, as with `exact=False`. Returns as `check_rows`.

    Raises:
        ValueError: a row differs.
    """
    if model.placement.by_kernels:
        if model.placement.exact and (odd := differing_piece(model, pieces=_PIECES, is_alone=True)) is not None:
            _log.warning(
                "steps of %d rows differ on this device from one of all: an answer depends on the sequences of its batch, as with "
                "inference.exact=false",
                odd,
            )
        return frozenset()
    check_tiles(model.description)
    if isinstance(model, InferenceModel):
        return check_rows(model)
    exact = check_products(model.products())
    if differing_piece(model, pieces=_THIRDS, is_alone=False) is not None:
        raise ValueError(
            f"model_type={model.description.family}: its own modules' results for a sequence depend on other sequences of the step on this "
            "processor, so answers would not be exact; generate with the model's own generate()"
        )
    return exact


def settle_products(model: Model, *, exact: frozenset[tuple[str, tuple[int, int]]]) -> None:
    """Fixes the memory of products. Products of the kinds and shapes in `exact` compute a lone row once, the others twice."""
    for product in model.products():
        product.settle(doubles=product_key(product) not in exact)


def check_rows(model: InferenceModel) -> frozenset[tuple[str, tuple[int, int]]]:
    """One product per kind and shape of weight, the norm and the MLP, with several numbers of rows.

    Returns kind and shape of the products whose single row has the same bits as many rows; those need not compute it twice.

    Raises:
        ValueError: a row differs, so answers would depend on the rest of the step.
    """
    exact = check_products(model.products())
    x = random_rows(max(_ROWS), columns=model.description.dim)
    mlps = {
        (mlp.up.shape, mlp.down.shape): mlp
        for layer in model.weights.held
        for mlp in (layer.mlp, *(layer.experts[:1] if isinstance(layer.experts, list) else []))
        if mlp is not None
    }
    for name, compute in (
        ("norms", lambda rows: model.ops.norm(rows, by=model.weights.norm)),
        *(("an MLP", partial(model.ops.mlp, weights=mlp)) for mlp in mlps.values()),
    ):
        odd = _differ(compute, x=x, counts=(1, *_ROWS))
        if odd:
            raise ValueError(_message(name, odd=odd))
    return exact


@torch.inference_mode()
def check_tiles(of: Description) -> None:
    """Compares attention's products alone and in calls with others. Raises ValueError if a row differs."""
    odd = differing_tile(of.heads // of.kv_heads, head_dim=of.head_dim, kv_heads=of.kv_heads)
    if odd is not None:
        raise ValueError(
            f"attention's products of {of.heads} query and {of.kv_heads} key heads of {of.head_dim} differ with {odd} in a call on this "
            f"processor and {torch.get_num_threads()} threads, so answers would depend on each other: use another number of threads "
            "(OMP_NUM_THREADS), or another build of torch"
        )


def check_products(products: list[Product]) -> frozenset[tuple[str, tuple[int, int]]]:
    """Like `check_rows`, for one product per kind and shape of weight.

    Raises:
        ValueError: a row differs.
    """
    exact = set()
    for key, product in {product_key(product): product for product in products}.items():
        x = random_rows(max(_ROWS), columns=product.shape[1])
        odd = _differ(product.multiply, x=x)
        if odd:
            raise ValueError(_message(f"products with a weight of {list(product.shape)}", odd=odd))
        if torch.equal(product.multiply(x[:1]), product.multiply(x[:2])[:1]):
            exact.add(key)
    return frozenset(exact)


@torch.inference_mode()
def differing_piece(model: Model, *, pieces: tuple[int, ...], is_alone: bool) -> int | None:
    """Computes a text in one piece, and in pieces of so many rows, next to pieces of another text unless `is_alone`. Returns the rows of the
    first piece with other logits, or None."""
    of = model.description
    text = random_tokens(of.vocab_size, count=min(sum(pieces), of.max_len))
    span, cache = Span(slot=0, start=0, length=len(text), row=0), model.scratch(len(text))
    expected = model.own_logits(text, spans=[span], cache=cache, rows=list(range(len(text))))
    cache, start = model.scratch(len(text), slots=1 if is_alone else 3), 0
    for count in pieces:
        tokens = part = text[start : start + count]
        if not len(part):
            break
        spans = [Span(slot=0, start=start, length=len(part), row=0)]
        if not is_alone:
            tokens = torch.cat([part.flip(0), part])
            spans.append(spans[0]._replace(slot=2, row=len(part)))
        rows = list(range(len(tokens) - len(part), len(tokens)))
        found = model.own_logits(tokens, spans=spans, cache=cache, rows=rows)
        if not torch.equal(found, expected[start : start + count]):
            return count
        start += count
    return None


@torch.inference_mode()
def check_draws(model: Model) -> None:
    """Draws the third token of some texts, each by one of `_WAYS`, as a step of requests does, and compares it with that step's logits; on a
    GPU also with the forward in a graph. A collective call of the ranks that share the model.

    Raises:
        ValueError: a draw has another log-probability, or is not the likeliest token where it must be.
    """
    size, slots = model.description.vocab_size, range(len(_WAYS))
    cache = model.scratch(2, slots=len(slots))
    computing, graphs = Computing(model, cache=cache), graphs_of(model, cache=cache)
    works = [
        Work(sequence=_drawing(slot, sampling=sampling, vocabulary=size), start=1, tokens=[slot % size])
        for slot, sampling in enumerate(_WAYS.values())
    ]
    spans = [Span(slot=slot, start=0, length=1, row=slot) for slot in slots]
    computing.logits([work.sequence.tokens[0] for work in works], spans=spans, rows=[])
    _compare_draws(works, computing=computing, graphs=None)
    if graphs is not None:
        _compare_draws(works, computing=computing, graphs=graphs)


def _drawing(slot: int, *, sampling: SamplingParams, vocabulary: int) -> Sequence:
    tokens = [(slot + 1) % vocabulary, slot % vocabulary]
    return Sequence(
        request_id=0, sample=0, sampling=sampling, tokens=tokens, prompt_length=len(tokens), limit=1, slot=slot
    )


def _compare_draws(works: list[Work], *, computing: Computing, graphs: DecodeGraphs | None) -> None:
    """Does the comparison of `check_draws` for works with one token each."""
    tokens = [work.tokens[0] for work in works]
    spans = [Span(slot=work.sequence.slot, start=1, length=1, row=row) for row, work in enumerate(works)]
    logits = computing.logits(tokens, spans=spans, rows=list(range(len(works)))).double().cpu()
    if not logits.isfinite().all():
        return  # weights that are not finite: each request is answered with the layer's name
    step = {"works": works, "needed": [[0]] * len(works), "spans": spans, "computing": computing, "graphs": graphs}
    for name, own, work, [line] in zip(_WAYS, logits, works, lines_of(tokens, **step), strict=True):
        assert not isinstance(line, NothingDrawn), "no way leaves out all tokens"
        drawn = line if isinstance(line, Drawn) else draw(line, by=work.sequence.draw([], vocabulary=len(own)))
        bound = _ROUNDED_DRAW * float(own.abs().max())
        is_likeliest = work.sequence.sampling.temperature > 0 or float(own.max() - own[drawn.token]) <= bound
        expected = float(own.log_softmax(-1)[drawn.token])
        if not is_likeliest or not abs(drawn.logprob - expected) <= bound:
            raise ValueError(
                f"draws by {name}{'' if graphs is None else ' in graphs'} have other log-probabilities than the model's logits: "
                f"{drawn.logprob:.4g} instead of {expected:.4g}, so answers would be wrong; generate with the model's own generate(), and "
                "report the model"
            )


def random_tokens(vocabulary: int, *, count: int) -> Tensor:
    """The same int64 [count] every time, without advancing torch's own generator."""
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(0))


def product_key(product: Product) -> tuple[str, tuple[int, int]]:
    """Products with the same key are computed alike."""
    return type(product).__name__, product.shape


def random_rows(rows: int, *, columns: int) -> Tensor:
    """The same fp32 [rows, columns] every time, without advancing torch's own generator."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def _differ(compute: Callable[[Tensor], Tensor], *, x: Tensor, counts: tuple[int, ...] = _ROWS) -> int | None:
    """The first number of rows whose results differ from the results of all rows."""
    with torch.inference_mode():
        full = compute(x)
        return next((count for count in counts if not torch.equal(compute(x[:count]), full[:count])), None)


def _message(subject: str, *, odd: int) -> str:
    return (
        f"{subject} differ between {odd} and {max(_ROWS)} rows on this processor, so answers would depend on each other: set "
        "ONEDNN_MAX_CPU_ISA=AVX2, or use another build of torch"
    )


def check_module(model: Model, *, module: Any, eager: bool = False) -> None:
    """Computes one text by the engine and by `module`, a causal language model of transformers, itself. eager: by its eager attention.

    Raises:
        ValueError: the logits differ.
    """
    of = model.description
    parameter = next(module.parameters())
    dtype, device = parameter.dtype, parameter.device
    tokens = random_tokens(of.vocab_size, count=min(_TOKENS, of.max_len))
    cache = model.scratch(len(tokens))
    span, eager = Span(slot=0, start=0, length=len(tokens), row=0), eager or of.softcap is not None
    implementation, was_training = module.config._attn_implementation, module.training
    module.eval()
    if eager:
        module.set_attn_implementation("eager")  # torch's fused attention leaves the cap out
    try:
        with torch.no_grad():  # a sharded module gathers parameters meanwhile, which later training writes
            own = model.own_logits(tokens, spans=[span], cache=cache, rows=list(range(len(tokens))))
            expected = module(tokens.unsqueeze(0).to(device), use_cache=False).logits[0].cpu().float()
    finally:
        module.train(was_training)
        if eager:
            module.set_attn_implementation(implementation)
    difference, largest = float((own - expected).abs().max()), float(expected.abs().max())
    if not difference <= _DIFFERENCE[dtype] * largest:
        raise ValueError(
            f"the inference engine's logits differ by {difference:.3g} from {type(module).__name__}'s (largest {largest:.3g}): it does "
            "something that the engine does not support, so answers would be wrong; generate with the model's own generate()"
        )
