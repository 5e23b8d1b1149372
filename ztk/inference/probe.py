"""Checks when a model is loaded: its rows do not depend on each other, and it computes what its module computes."""

from typing import Any

import torch

from ztk.inference.cache import Cache
from ztk.inference.model import InferenceModel, Span
from ztk.nn.linear import linear

_ROWS = (2, 3, 5, 8, 17, 33, 64, 130)
_TOKENS = 48
# Of the largest logit. fp32: rounding stays below 1e-5, an option of config.json that is read wrongly shows as percents; 16 bits: the module
# itself rounds by 2^-8 in each operation.
_DIFFERENCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


def check_rows(model: InferenceModel) -> None:
    """One product per shape of weight, with several numbers of rows.

    Raises:
        ValueError: a row differs; then answers would depend on what is computed beside them.
    """
    weights = {}
    for layer in model.weights.layers[:1]:
        parts = [layer.query, layer.key, layer.out]
        for mlp in (layer.mlp, *(layer.experts or [])[:1]):
            parts += [] if mlp is None else [mlp.up, mlp.down]
        weights |= {tuple(part.weight.shape): part.weight for part in parts}
    head = model.weights.head.weight
    weights[tuple(head.shape)] = head
    for shape, weight in weights.items():
        x = torch.randn(max(_ROWS), shape[1], generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            full = linear(x, weight=weight)
            odd = [rows for rows in _ROWS if not torch.equal(linear(x[:rows], weight=weight), full[:rows])]
        if odd:
            raise ValueError(
                f"products with a weight of {list(shape)} differ between {odd[0]} and {max(_ROWS)} rows on this processor, so answers would "
                "depend on each other: set ONEDNN_MAX_CPU_ISA=AVX2, or use another build of torch"
            )


def check_module(model: InferenceModel, *, module: Any) -> None:
    """Computes one text by the engine and by `module`, a causal language model of transformers, itself.

    Raises:
        ValueError: the logits differ.
    """
    of = model.description
    dtype = next(module.parameters()).dtype
    tokens = torch.randint(of.vocab_size, (min(_TOKENS, of.max_len),), generator=torch.Generator().manual_seed(0))
    cache = Cache(of, slots=1)
    cache.reserve(len(tokens))
    implementation, was_training = module.config._attn_implementation, module.training
    module.eval()
    if of.softcap is not None:
        module.set_attn_implementation("eager")  # torch's fused attention leaves the cap out
    try:
        with torch.inference_mode():
            own = model.logits(
                model.forward(tokens, spans=[Span(slot=0, start=0, length=len(tokens), row=0)], cache=cache)
            )
            expected = module(tokens.unsqueeze(0), use_cache=False).logits[0].float()
    finally:
        module.train(was_training)
        if of.softcap is not None:
            module.set_attn_implementation(implementation)
    difference, largest = float((own - expected).abs().max()), float(expected.abs().max())
    if not difference <= _DIFFERENCE[dtype] * largest:
        raise ValueError(
            f"the inference engine's logits differ by {difference:.3g} from those of {type(module).__name__} (largest {largest:.3g}): it does "
            "something that the engine does not know, so answers would be wrong; generate with the model's own generate()"
        )
