"""Every way to draw, by every kind of products, with every kind of head: log-probabilities and choices equal the model's own logits."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers

from tests.device_tagged import gpu_tensors
from tests.inference.models import _GROUPED, VOCABULARY, build, build_decoder
from tests.inference.test_blocks import Replayed
from tests.inference.test_masks import Counting
from ztk.inference import Generator, InferencePolicy, SamplingParams, graphs, sample
from ztk.inference import model as model_file
from ztk.inference.cache import Span
from ztk.inference.model import InferenceModel
from ztk.inference.sample import Draw, cut_of, penalised

PROMPT, COUNT = [5, 6, 7, 8, 9], 4
WAYS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": 7, "temperature": 1.3},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.1},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.7},
    "greedy with penalties": {"temperature": 0.0, "frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {3: 2.0, 4: -1.0}},
    "logprobs": {"logprobs": 4},
    "greedy with logprobs": {"temperature": 0.0, "logprobs": 4},
    "prompt_logprobs": {"prompt_logprobs": True},
    "vocabulary": {"vocabulary": VOCABULARY - 9},
    "allowed tokens": {"allowed_token_ids": tuple(range(10, 60))},
    "bad words": {"temperature": 0.0, "bad_words": ((11,), (12, 13))},
    "token_mask": {"token_mask": lambda answer: torch.arange(VOCABULARY) % 3 > 0},
    "grammar": {"grammar": Counting(first=12, last=90)},
    "a trainer's": {"fp32_logprobs": True, "temperature": 0.9},
    "a trainer's with top_k": {"fp32_logprobs": True, "top_k": 9},
}


def _phi():
    """A bias as large as the logits, in a vocabulary that fills no tile of a kernel."""
    model: Any = build("phi")
    with torch.no_grad():
        model.lm_head.bias.copy_(2 * torch.randn(VOCABULARY))
    return model


def _of_transformers(family, **options):
    """A model that the engine computes by its own modules. Rows of the inner width fill a processor's vectors."""
    torch.manual_seed(2)
    sizes = _GROUPED | {"head_dim": 16, "intermediate_size": 64}
    config = getattr(transformers, f"{family}Config")(**sizes, **options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


HEADS = {
    "plain": build_decoder,
    "with bias": _phi,
    "tied": lambda: build("qwen2"),
    "capped": lambda: build("gemma2", final_logit_softcapping=3.0),
    "divided (Granite)": lambda: _of_transformers("Granite", logits_scaling=4.0),
    "multiplied (Cohere)": lambda: _of_transformers("Cohere", logit_scale=0.25),
}
PLACES = {
    "products": {"kernels": False},
    "kernels": {"kernels": True},
    "kernels, weights in int8": {"kernels": True, "weights": "int8"},
    "graphs": {"device": "cuda:0"},
}


def _expected(model, *, tokens):
    """The module's own logits after each token: fp64 [T, V]."""
    with torch.no_grad():
        found = model(torch.tensor([tokens]))
    return (found if isinstance(found, torch.Tensor) else found.logits)[0].double()


def _check(answer, *, model, sampling, weights):
    tokens = [*PROMPT, *answer.tokens]
    logits = _expected(model, tokens=tokens) if weights is None else weights(tokens)
    assert len(answer.tokens) == COUNT
    for number, token in enumerate(answer.tokens):
        position = len(PROMPT) + number
        raw = logits[position - 1]
        # 200 terms of fp32 in another order, of logits below 20: 200 * 2^-24 * 20 = 2.4e-4 at most.
        assert answer.logprobs[number].item() == pytest.approx(float(raw.log_softmax(-1)[token]), abs=2.5e-4)
        scores = penalised(raw, draw=Draw(sampling=sampling, tokens=tokens[:position], prompt_length=len(PROMPT)))
        scores = scores.masked_fill(~_allowed(sampling, answer=answer.tokens[:number]), -torch.inf)
        if sampling.temperature == 0:
            assert float(scores.max() - scores[token]) < 1e-3
            continue
        p = torch.softmax(scores / sampling.temperature, -1)
        p = p * cut_of(sampling).kept(p.unsqueeze(0))[0]
        assert answer.processed_logprobs[number].item() == pytest.approx(float((p[token] / p.sum()).log()), abs=5e-4)
    if sampling.logprobs:
        for number, top in enumerate(answer.top_logprobs):
            best = logits[len(PROMPT) + number - 1].log_softmax(-1).topk(sampling.logprobs).values
            torch.testing.assert_close(torch.tensor(list(top.values())).double(), best, rtol=0, atol=2.5e-4)
    if sampling.prompt_logprobs:
        own = logits[: len(PROMPT) - 1].log_softmax(-1).gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1))[:, 0]
        torch.testing.assert_close(answer.prompt_logprobs.double(), own, rtol=0, atol=2.5e-4)


def _allowed(sampling, *, answer):
    mask = torch.ones(VOCABULARY, dtype=torch.bool)
    mask[sampling.vocabulary or VOCABULARY :] = False
    if sampling.allowed_token_ids:
        mask &= torch.isin(torch.arange(VOCABULARY), torch.tensor(sampling.allowed_token_ids))
    if sampling.token_mask is not None:
        mask &= sampling.token_mask(answer)
    for *before, last in sampling.bad_words:
        mask[last] &= bool(before) and answer[len(answer) - len(before) :] != before
    if sampling.grammar is not None:
        mask[:] = False
        start = answer[-1] if answer else sampling.grammar.first - 1
        mask[start + 1 : start + 3] = True
    return mask


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("head", HEADS)
def test_every_way_to_draw_has_the_logits_of_the_model(head, place, monkeypatch):
    """Each way alone, then all in one batch."""
    monkeypatch.setattr(graphs, "CudaCapture", lambda: Replayed.capture)
    model = HEADS[head]()
    every = {name: SamplingParams(max_tokens=COUNT, seed=3, **options) for name, options in WAYS.items()}
    with gpu_tensors() if place == "graphs" else nullcontext():
        generator = Generator(
            model, policy=InferencePolicy(max_model_len=64, cache_tokens=64 * len(every), **PLACES[place])
        )
        alone = {name: generator.generate([PROMPT], sampling=one)[0][0] for name, one in every.items()}
        together = generator.generate([PROMPT] * len(every), sampling=list(every.values()))
        scores = generator.score([PROMPT])[0]
    if place == "graphs" and isinstance(generator._model, InferenceModel):
        assert (drawn := generator._stepper.graphs) is not None and drawn.captured > 0
    rounded = None
    if "weights" in PLACES[place]:
        rounded = lambda tokens: _logits_of(generator, tokens=tokens)  # noqa: E731
    else:
        own = _expected(model, tokens=PROMPT)[:-1].log_softmax(-1).gather(1, torch.tensor(PROMPT[1:]).unsqueeze(1))
        torch.testing.assert_close(scores.double(), own[:, 0], rtol=0, atol=2.5e-4)
    for (name, sampling), [other] in zip(every.items(), together, strict=True):
        assert (alone[name].tokens, alone[name].logprobs.tolist()) == (other.tokens, other.logprobs.tolist()), name
        _check(other, model=model, sampling=sampling, weights=rounded)


def _logits_of(generator, *, tokens):
    """Of weights as the engine rounds them: fp64 [T, V]."""
    model = generator._model
    span, cache = Span(slot=0, start=0, length=len(tokens), row=0), model.scratch(len(tokens))
    with torch.inference_mode():
        found = model.own_logits(torch.tensor(tokens), spans=[span], cache=cache, rows=list(range(len(tokens))))
    return found.double()


def test_a_way_that_leaves_a_part_of_the_head_out_is_refused_at_loading(monkeypatch):
    """The bias, or the cap: by kernels and in graphs, in kernels that draw from hidden states and in kernels that draw from logits."""
    monkeypatch.setattr(graphs, "CudaCapture", lambda: Replayed.capture)
    kernel, select_rows = model_file.draw_rows, sample.select_rows
    policy = InferencePolicy(kernels=True, max_model_len=64, cache_tokens=64)

    def without_bias(x, weight, scales, bias, *others, **options):
        return kernel(x, weight, scales, None, *others, **options)

    def without_cap(*given, softcap):
        return kernel(*given)

    def of_scores(logits, scores, *others):
        return select_rows(2 * logits, scores, *others)

    for model, file, name, wrong in (
        (_phi(), model_file, "draw_rows", without_bias),
        (HEADS["capped"](), model_file, "draw_rows", without_cap),
        (build_decoder(), sample, "select_rows", of_scores),
    ):
        Generator(model, policy=policy)
        with monkeypatch.context() as patch:
            patch.setattr(file, name, wrong)
            with pytest.raises(ValueError, match="draws by .* have other log-probabilities than the model's logits"):
                Generator(model, policy=policy)
