"""Several callers of one generator, in turns and from several threads; and errors inside a step, which end the sequence they belong to."""

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.inference.models import build_decoder
from ztk.core.runtime import PeerLost
from ztk.inference import Generator, InferencePolicy, SamplingParams, stepping
from ztk.inference.sample import Draw, Drawn

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8], [9, 7]]
KERNELS = pytest.mark.parametrize("kernels", [False, True], ids=["products", "kernels"])


@pytest.fixture(scope="module")
def model():
    return build_decoder()


def sampling_of(number: int, **options: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "temperature": 0.8, "seed": number} | options)


def alone(model, *, kernels: bool) -> list[list[int]]:
    generator = Generator(model, policy=InferencePolicy(kernels=kernels))
    return [
        generator.generate([prompt], sampling=sampling_of(number))[0][0].tokens for number, prompt in enumerate(PROMPTS)
    ]


@KERNELS
def test_streams_in_turns_with_generate_and_submit_have_their_own_tokens(model, kernels):
    expected = alone(model, kernels=kernels)
    generator = Generator(model, policy=InferencePolicy(kernels=kernels))
    submitted = generator.submit(PROMPTS[0], sampling=sampling_of(0))
    streams = [generator.stream(PROMPTS[number], sampling=sampling_of(number)) for number in (1, 2)]
    found: list[list[int | None]] = [[], []]
    for turn in range(12):
        for own, stream in zip(found, streams, strict=True):
            own.append(next(stream).token)
        if turn == 3:
            [[answer]] = generator.generate([PROMPTS[3]], sampling=sampling_of(3))
    assert found == expected[1:3] and answer.tokens == expected[3]
    assert [list(stream) for stream in streams] == [[], []]
    outputs = []
    while generator.has_work:
        outputs += generator.step()
    assert [output.token for output in outputs] == expected[0]
    assert {output.request_id for output in outputs} == {submitted.id} and outputs[-1].finish_reason == "length"


@KERNELS
def test_threads_that_generate_stream_and_score_have_their_own_tokens(model, kernels):
    expected = alone(model, kernels=kernels)
    generator = Generator(model, policy=InferencePolicy(max_sequences=3, kernels=kernels))
    scores = generator.score(PROMPTS)

    def work(number: int) -> bool:
        which = number % len(PROMPTS)
        if number % 3 == 0:
            found = [output.token for output in generator.stream(PROMPTS[which], sampling=sampling_of(which))]
        elif number % 3 == 1:
            found = generator.generate([PROMPTS[which]], sampling=sampling_of(which))[0][0].tokens
        else:
            return all(torch.equal(*pair) for pair in zip(generator.score(PROMPTS), scores, strict=True))
        return found == expected[which]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(48)))
    assert not generator.has_work and not generator._inboxes


def test_who_stops_listening_while_another_thread_computes_frees_the_place(model):
    generator = Generator(model)
    stream = generator.stream(PROMPTS[0], sampling=sampling_of(0, max_tokens=200))
    next(stream)
    step, plan = generator._advance, generator._scheduler.plan

    def closing() -> list:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(stream.close).result()  # does not wait for the step that is being computed
        return plan()

    generator._scheduler.plan = closing
    step()
    generator._scheduler.plan = plan
    generator.step()
    assert not generator.has_work


@pytest.mark.parametrize("token", [True, 1.0, "1", None, [1]], ids=repr)
def test_tokens_that_are_no_integers_are_refused(model, token):
    """True is 1 to torch.tensor, and 1.0 makes a step's tokens floats."""
    generator = Generator(model)
    for call in (generator.submit, lambda prompt, sampling: generator.generate([prompt], sampling=sampling)):
        with pytest.raises(ValueError, match="tokens are integers"):
            call([1, token], sampling=SamplingParams())
    assert not generator.has_work


def poisoned(token: int):
    """`lines_of` that fails in steps with this token."""
    own = stepping.lines_of

    def fail(tokens: list[int], **options: object) -> list:
        if token in tokens:
            raise ArithmeticError(f"token {token}")
        return own(tokens, **options)

    return fail


@KERNELS
def test_an_error_of_a_step_ends_the_sequence_that_caused_it(model, kernels, monkeypatch, caplog):
    """The others have the tokens that they have alone, and the error is in the log with its traceback."""
    expected = alone(model, kernels=kernels)
    generator = Generator(model, policy=InferencePolicy(kernels=kernels))
    requests = [
        generator.submit(prompt, sampling=sampling_of(number)) for number, prompt in enumerate((*PROMPTS, [60, 95]))
    ]
    monkeypatch.setattr(stepping, "lines_of", poisoned(95))
    outputs = []
    with caplog.at_level(logging.ERROR):
        while generator.has_work:
            outputs += generator.step()
    for number, tokens in enumerate(expected):
        assert [one.token for one in outputs if one.request_id == requests[number].id] == tokens
    [broken] = [one for one in outputs if one.request_id == requests[4].id]
    assert broken.finish_reason == "error" and broken.error == "its step failed: ArithmeticError: token 95"
    assert caplog.records[0].exc_info is not None
    with pytest.raises(ArithmeticError, match="token 95"):
        generator.generate([PROMPTS[0], [95]], sampling=sampling_of(0))
    assert not generator.has_work
    assert generator.generate([PROMPTS[1]], sampling=sampling_of(1))[0][0].tokens == expected[1]


@KERNELS
def test_an_error_of_a_draw_ends_its_sequence(model, kernels, monkeypatch):
    expected = alone(model, kernels=kernels)
    generator = Generator(model, policy=InferencePolicy(kernels=kernels))
    good = generator.submit(PROMPTS[0], sampling=sampling_of(0))
    bad = generator.submit(PROMPTS[1], sampling=sampling_of(1, logprobs=1))
    draw_rows = stepping.draw_rows

    def failing(logits: torch.Tensor, *, draws: list[Draw]) -> list[Drawn]:
        return {}.popitem() if any(one.sampling.logprobs for one in draws) else draw_rows(logits, draws=draws)

    monkeypatch.setattr(stepping, "draw", lambda *args, **options: {}.popitem())
    monkeypatch.setattr(stepping, "draw_rows", failing)  # of both requests at once, then of each
    outputs = []
    while generator.has_work:
        outputs += generator.step()
    assert [one.token for one in outputs if one.request_id == good.id] == expected[0]
    [broken] = [one for one in outputs if one.request_id == bad.id]
    assert "KeyError" in broken.error


@KERNELS
def test_an_error_of_the_plan_is_raised_and_reset_goes_on(model, kernels, monkeypatch):
    """It belongs to no sequence. Afterwards nothing of it is left: no slot, no block, no prefix."""
    expected = alone(model, kernels=kernels)
    generator = Generator(model, policy=InferencePolicy(kernels=kernels))
    for prompt in PROMPTS:
        generator.submit(prompt * 30, sampling=sampling_of(0))
    generator.step()
    with monkeypatch.context() as patch:
        patch.setattr(generator._scheduler, "_admit", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generator.step()
    assert generator.has_work and not generator.is_lost
    generator.reset()
    assert not generator.has_work and len(generator._scheduler.slots._free) == generator.policy.max_sequences
    found = [
        generator.generate([prompt], sampling=sampling_of(number))[0][0].tokens for number, prompt in enumerate(PROMPTS)
    ]
    assert found == expected


def test_after_a_lost_rank_or_device_nothing_is_tried_again(model, monkeypatch):
    for error in (PeerLost("a rank is gone"), torch.AcceleratorError("an illegal memory access")):
        generator, calls = Generator(model), []
        for prompt in PROMPTS:
            generator.submit(prompt, sampling=sampling_of(0))

        def fail(*args: object, error: Exception = error, calls: list = calls, **options: object) -> list:
            calls.append(1)
            raise error

        monkeypatch.setattr(stepping, "lines_of", fail)
        with pytest.raises(type(error)):
            generator.step()
        assert generator.is_lost and len(calls) == 1
