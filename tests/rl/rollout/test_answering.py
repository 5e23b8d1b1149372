"""Answers in step: each has the bits of its text computed alone, in every batch."""

import pytest
import torch

from tests.inference.models import build, build_decoder
from ztk.inference import Generator
from ztk.inference import answer_step as shapes
from ztk.inference.model import InferenceModel
from ztk.inference.sample import fp32_logprobs
from ztk.inference.steps import Span
from ztk.rl.rollout import Requests, Samples, answering
from ztk.rl.rollout.answering import RolloutPolicy, answer, can_answer

# Prompts without a full block, with one, and with two; 70 tokens of an answer pass the end of a block in each.
LENGTHS, MAX_TOKENS = (3, 70, 3, 130, 64, 1, 130), 70
STOP = 7


def prompts_of(vocabulary: int) -> list[tuple[int, ...]]:
    draw = torch.Generator().manual_seed(3)
    own = [tuple(torch.randint(vocabulary, (length,), generator=draw).tolist()) for length in LENGTHS]
    return [prompt for number, prompt in enumerate(own) for _ in range(1 + number % 4)]  # one to four answers each


def model_of(name: str) -> InferenceModel:
    model = Generator(build_decoder() if name == "native" else build(name)).own_model
    assert model is not None and can_answer(model)
    return model


def answered(model: InferenceModel, *, prompts: list[tuple[int, ...]], rows: list[int] | None = None) -> Samples:
    """The answers. rows: the numbers of the prompts' draws."""
    draws = torch.rand(
        max(len(prompts), 32), MAX_TOKENS, generator=torch.Generator().manual_seed(4), dtype=torch.float64
    )
    options = {"length": max(map(len, prompts)) + MAX_TOKENS, "micro_batch": 1, "max_tokens": MAX_TOKENS}
    policy, numbers = RolloutPolicy(**options, stops=(STOP,), pad=0, temperature=1.5), torch.arange(len(prompts))
    samples = Requests(prompts=prompts, numbers=numbers, prompt_numbers=numbers, copies=numbers * 0).begin(policy)
    answer(model, policy=policy, samples=samples, draws=draws[: len(prompts)] if rows is None else draws[rows])
    return samples


def alone(model: InferenceModel, *, text: torch.Tensor, prompt: int) -> torch.Tensor:
    """Log-probabilities of the tokens after a prompt of so many, by a forward of the text, float32 [count]."""
    span, rows = Span(slot=0, start=0, length=len(text), row=0), list(range(prompt - 1, len(text) - 1))
    with torch.inference_mode():
        logits = model.own_logits(text, spans=[span], cache=model.scratch(len(text)), rows=rows)
    return fp32_logprobs(logits, temperature=1.5).gather(1, text[prompt:].unsqueeze(1)).squeeze(1)


def check(model: InferenceModel, *, prompts: list[tuple[int, ...]]) -> Samples:
    """Every answer has the bits of its text alone."""
    found = answered(model, prompts=prompts)
    tokens = found.tokens
    for row, prompt in enumerate(prompts):
        first, last = len(prompt), int(found.lengths[row])
        assert bool(found.finished[row]) == (STOP in tokens[row, first:last].tolist())
        assert torch.equal(found.logprobs[row, first:last], alone(model, text=tokens[row, :last], prompt=first)), row
        assert not found.logprobs[row, last:].any() and not tokens[row, last:].any()
    return found


# A window that hides entire blocks, a soft cap, ALiBi, learned positions, experts, several queries per key head.
@pytest.mark.parametrize("name", ["native", "mistral", "gemma2", "bloom", "gpt2", "qwen2_moe"])
@pytest.mark.parametrize("threads", [1, 2])
def test_answers_have_the_bits_of_their_texts_alone(name, threads, monkeypatch):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = model_of(name)
        prompts = prompts_of(model.description.vocab_size)
        found = check(model, prompts=prompts)
        assert 0 < int(found.finished.sum()) < len(prompts)  # some leave, at different times, and some are cut
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("lengths", [(5, 5, 5), (64, 64, 128), (6, 6, 70)])
def test_answers_that_write_at_one_place_have_the_same_bits(lengths):
    """Answers that write to the same position of their blocks: from the first token on, or once others of another length have ended."""
    model = model_of("native")
    draw = torch.Generator().manual_seed(5)
    texts = [tuple(torch.randint(model.description.vocab_size, (n,), generator=draw).tolist()) for n in lengths]
    prompts = [text for text in texts for _ in range(3)]
    assert len(set(check(model, prompts=prompts).answer_lengths.tolist())) > 1


def test_an_answer_does_not_depend_on_the_batch():
    model = model_of("native")
    prompts = prompts_of(model.description.vocab_size)
    every = answered(model, prompts=prompts)
    for rows in ([0], [4, 2], [9, 1, 8, 3]):
        found = answered(model, prompts=[prompts[row] for row in rows], rows=rows)
        width = found.tokens.shape[1]
        assert torch.equal(found.answer_lengths, every.answer_lengths[rows])
        assert torch.equal(found.tokens, every.tokens[rows, :width])
        assert torch.equal(found.logprobs, every.logprobs[rows, :width])


def test_prompts_are_copied_where_no_product_has_room_for_their_answers(monkeypatch):
    """Planted: a processor whose products of more than 4 rows have other bits, and which needs all 64 keys."""
    model = model_of("native")
    prompts = prompts_of(model.description.vocab_size)
    expected = answered(model, prompts=prompts)
    few = shapes.EqualShapes(rows=(4,), keys=(64,))
    monkeypatch.setattr("ztk.rl.rollout.answering.equal_shapes", lambda group, *, head_dim: few)
    found = answered(model, prompts=prompts)
    assert torch.equal(found.logprobs, expected.logprobs)


def test_only_answers_that_go_on_are_computed(monkeypatch):
    model, computed = model_of("native"), []
    forward = model.next_logits
    monkeypatch.setattr(
        model, "next_logits", lambda tokens, **options: computed.append(len(tokens)) or forward(tokens, **options)
    )
    prompts = prompts_of(model.description.vocab_size)
    found = answered(model, prompts=prompts)
    assert computed == [int((found.answer_lengths > index).sum()) for index in range(1, MAX_TOKENS)]


@pytest.mark.parametrize(("free", "count"), [(1 << 40, 64), (2 * 3 * 10 * (8 * 2 * 2 * 8 * 192), 10), (1, 1)])
def test_as_many_answers_are_drawn_at_once_as_have_room(free, count, monkeypatch):
    """Of 2 layers with 2 key heads of 8, in half of this rank's third."""
    monkeypatch.setattr(answering, "free_memory", lambda: free)
    assert answering.answers_at_once(model_of("native"), tokens=130, ranks=3) == count


def test_shapes_that_differ_are_not_taken(monkeypatch):
    """Planted: more than 8 rows of a product differ, and so does a product with fewer keys."""
    bmm = torch.bmm

    def other(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        is_odd = left.shape[1] > 8 or right.shape[2] in (16, 32)
        return bmm(left, right) * (1 + 2**-20 * is_odd)

    monkeypatch.setattr(shapes.torch, "bmm", other)
    shapes._equal_shapes.cache_clear()
    try:
        found = shapes.equal_shapes(2, head_dim=24)
    finally:
        shapes._equal_shapes.cache_clear()
    assert max(found.rows) == 8 and found.keys == (64,)
