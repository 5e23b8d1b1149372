"""The trainer's forward of new tokens with the inference engine's model, whose weights are packed once per rollout in oneDNN's layout.

[Note: The bits of packed weights] Products with a packed weight, and with the joined weights of query, key and value, are bitwise equal
to the trainer's; the engine computes everything else like the trainer (see [Note: The cache's bits] in `attention`). This is tested on
this processor with the model itself, once per shape: a text in pieces over the cache, and equal answers in step, are compared with the
trainer's forward. A step of 32 texts of up to 70 tokens with 1.6 million parameters on two cores of an EPYC with AVX512 takes 2.0 ms, and
5.1 ms with the trainer's module (medians of 6).
"""

import torch
from torch import Tensor

from ztk.inference.describe import describe
from ztk.inference.model import InferenceModel
from ztk.inference.plan import free_memory
from ztk.inference.probe import random_tokens
from ztk.inference.slab_cache import SlabCache
from ztk.inference.steps import Span
from ztk.inference.weights import collect
from ztk.nn import Decoder, DecoderConfig
from ztk.rl.rollout.answering import can_answer, given_answer
from ztk.rl.rollout.layout import has_cache, lay_out
from ztk.train.engine import Engine

_PIECES = (2, 3, 5, 1, 8, 17, 33, 61)  # tokens of a test text per forward
_PROMPTS, _ANSWER, _COPIES = (1, 66, 126), 4, 5  # tokens, with and without a full block; equal answers
_agrees: dict[tuple[DecoderConfig, int], bool] = {}  # by shape and number of threads


def pack_weights(engine: Engine) -> InferenceModel | None:
    """Returns a copy of the weights that is bitwise equal to the engine's module. A collective call.

    Returns None if the module itself must be used, which is slower: its attention has no cache, its parameters are gathered for forwards,
    or on some rank twice the parameters do not fit into the free memory, or the processor computes other bits.
    """
    module = engine.module
    if not isinstance(module, Decoder) or engine.zero.policy.shards_parameters:
        return None
    nbytes = sum(parameter.nbytes for parameter in module.parameters())
    is_possible = has_cache(module) and 2 * nbytes <= free_memory() // engine.process.local_world_size
    state = {name: value for name, value in engine.zero.full_parameters() if is_possible}
    model = _model_of(state, module=module) if is_possible else None
    # All ranks must run the module's forwards equally often, and a rank that packs would not count them.
    return model if _all(engine, flag=model is not None) else None


def _model_of(state: dict[str, Tensor], *, module: Decoder) -> InferenceModel | None:
    """Returns None if the bits differ."""
    subject = describe(module)
    model = InferenceModel(subject, weights=collect(state, description=subject.description))
    key = module.config, torch.get_num_threads()
    if key not in _agrees:
        _agrees[key] = _agree(model, module=module)
    return model if _agrees[key] else None


def _all(engine: Engine, *, flag: bool) -> bool:
    """Returns whether all ranks have this flag. A collective call."""
    if engine.comm.size == 1:
        return flag
    own = torch.tensor([float(flag)], device=engine.process.device)
    return bool(engine.comm.gather_scalars(own, label="packed weights").all())


def _agree(model: InferenceModel, *, module: Decoder) -> bool:
    """Returns whether both compute bitwise equal logits: for a text in pieces, and for the same answer several times in step."""
    of = model.description
    text, found = random_tokens(of.vocab_size, count=min(sum(_PIECES), of.max_len)), []
    layout = lay_out(text[None], lengths=torch.tensor([len(text)]), packs=True, device=text.device, module=module)
    first = int(layout.starts[0])
    expected = layout.forward(module).flatten(0, 1)[first : first + len(text)]
    cache, start = SlabCache(of, slots=1), 0
    cache.reserve(len(text))
    for count in _PIECES:
        piece = text[start : start + count]
        if not len(piece):
            break
        span = Span(slot=0, start=start, length=len(piece), row=0)
        found.append(model.own_logits(piece, spans=[span], cache=cache, rows=list(range(len(piece)))))
        start += len(piece)
    if not torch.equal(torch.cat(found), expected) or not can_answer(model):
        return False
    for length in _PROMPTS:
        prompt, answer = text[:length], text[length : length + _ANSWER]
        if not len(answer):
            break
        logits = given_answer(model, prompt=tuple(prompt.tolist()), answer=answer.tolist(), copies=_COPIES)
        wanted = expected[length - 1 :][: len(answer) + 1]
        if not all(torch.equal(logits[:, copy], wanted) for copy in range(_COPIES)):
            return False
    return True
