"""The engine's interface: answers, streams, scores, errors, weights from a training engine."""

import re
from dataclasses import replace

import pytest
import torch

import ztk
from tests.inference.models import PAIRS, VOCABULARY, build, build_decoder
from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.inference.masks import packed_mask
from ztk.inference.sample import Cut, Draw, draw, draw_rows, select, selects, uniform
from ztk.inference.schedule import Scheduler

PROMPT = [3, 1, 4, 1, 5]


@pytest.fixture(scope="module")
def model():
    return build_decoder()


def test_a_stream_has_the_tokens_of_generate(model):
    sampling = SamplingParams(max_tokens=12, temperature=0.8, seed=7)
    [[answer]] = Generator(model).generate([PROMPT], sampling=sampling)
    outputs = list(Generator(model).stream(PROMPT, sampling=sampling))
    assert [output.token for output in outputs] == answer.tokens and len(answer.tokens) == 12
    assert [output.finish_reason for output in outputs] == [None] * 11 + ["length"]
    for name, expected in (("logprob", answer.logprobs), ("processed_logprob", answer.processed_logprobs)):
        assert torch.equal(torch.tensor([getattr(output, name) for output in outputs]), expected), name


def test_changed_weights_need_a_load():
    model = build_decoder()
    generator, sampling = Generator(model), SamplingParams(max_tokens=4, temperature=0)
    before = generator.generate([PROMPT], sampling=sampling)[0][0]
    with torch.no_grad():
        model.blocks[0].mlp.up.weight += 0.1
    for asked in (
        lambda: generator.generate([PROMPT], sampling=sampling),
        lambda: next(generator.stream(PROMPT)),
        lambda: generator.submit(PROMPT, sampling=sampling),
        lambda: generator.score([PROMPT]),
        lambda: generator.embed(PROMPT),
    ):
        with pytest.raises(ValueError, match=r"blocks.0.mlp.up.weight has changed since .* call load\(model\)"):
            asked()
    generator.load(model)
    found = generator.generate([PROMPT], sampling=sampling)[0][0]
    [[expected]] = Generator(model).generate([PROMPT], sampling=sampling)
    assert torch.equal(found.logprobs, expected.logprobs) and not torch.equal(found.logprobs, before.logprobs)
    for parameter in model.parameters():
        parameter.data.mul_(0.9)  # torch counts no such write
    with pytest.raises(ValueError, match="has changed"):
        generator.generate([PROMPT], sampling=sampling)


def test_who_stops_listening_frees_the_slot(model):
    generator = Generator(model, policy=InferencePolicy(max_sequences=1))
    stream = generator.stream(PROMPT, sampling=SamplingParams(max_tokens=50))
    next(stream)
    stream.close()
    assert not generator.has_work
    assert len(generator.generate([PROMPT], sampling=SamplingParams(max_tokens=2))[0][0].tokens) == 2


def test_a_long_prompt_leaves_steps_short_for_those_who_wait_for_tokens(model, monkeypatch):
    """A token takes 0.01 s here: a prompt alone gets the whole step, and 0.4 s of it while another answer is drawn."""
    plan, steps = Scheduler.plan, []
    prompts, sampling = [PROMPT, [number % 7 for number in range(150)]], SamplingParams(max_tokens=30, temperature=0)
    monkeypatch.setattr(Scheduler, "plan", lambda self: steps.append(plan(self)) or steps[-1])
    monkeypatch.setattr(
        Scheduler,
        "measured",
        lambda self, works, *, seconds, measured=Scheduler.measured: measured(
            self, works, seconds=0.01 * sum(len(work.tokens) for work in works)
        ),
    )

    def lengths(**options):
        steps.clear()
        generator = Generator(model, policy=InferencePolicy(max_step_tokens=70, **options))
        generator.generate([[5] * 100], sampling=replace(sampling, max_tokens=1))
        first = generator.submit(prompts[0], sampling=sampling)
        outputs = generator.step()
        steps.clear()
        second = generator.submit(prompts[1], sampling=sampling)
        while generator.has_work:
            outputs += generator.step()
        works = [max((len(work.tokens) for work in works), default=0) for works in steps]
        answers = [[one.token for one in outputs if one.request_id == request.id] for request in (first, second)]
        return [length for length in works if length > 1], answers

    found, tokens = lengths(step_seconds=0.4)
    assert found == [40, 40, 40, 30]
    assert lengths() == ([69, 69, 12], tokens)


def test_one_slow_step_does_not_keep_later_ones_short(model, monkeypatch):
    """The first step takes 10 s a token, as where kernels are compiled; the shortest steps after it are measured, too."""
    plan, steps, measured, paces = Scheduler.plan, [], Scheduler.measured, iter([10.0])
    monkeypatch.setattr(Scheduler, "plan", lambda self: steps.append(plan(self)) or steps[-1])
    monkeypatch.setattr(
        Scheduler,
        "measured",
        lambda self, works, *, seconds: measured(
            self, works, seconds=next(paces, 0.001) * sum(len(work.tokens) for work in works)
        ),
    )
    sampling = SamplingParams(max_tokens=30, temperature=0)
    generator = Generator(model, policy=InferencePolicy(max_step_tokens=70, step_seconds=0.4))
    generator.generate([[5] * 40], sampling=replace(sampling, max_tokens=1))
    generator.submit(PROMPT, sampling=sampling)
    generator.step()
    steps.clear()
    generator.submit([number % 7 for number in range(150)], sampling=sampling)
    while generator.has_work:
        generator.step()
    lengths = [max(len(work.tokens) for work in works) for works in steps if works]
    assert [length for length in lengths if length > 1] == [32, 69, 49]


def test_answers_follow_the_distribution_they_report(model):
    """4,000 first tokens: the frequencies of the ten likeliest match their processed log-probabilities within 4 standard deviations."""
    count = 4000
    sampling = [
        SamplingParams(max_tokens=1, temperature=0.7, top_p=0.95, draw_key=(number,), logprobs=VOCABULARY)
        for number in range(count)
    ]
    answers = [found[0] for found in Generator(model).generate([PROMPT] * count, sampling=sampling)]
    raw = torch.tensor([answers[0].top_logprobs[0][token] for token in range(VOCABULARY)], dtype=torch.float64)
    tempered = torch.softmax(raw / 0.7, -1)
    order = tempered.argsort(descending=True)
    kept = order[(tempered[order].cumsum(-1) - tempered[order]) < 0.95]
    expected = torch.zeros_like(tempered).index_put((kept,), tempered[kept] / tempered[kept].sum())
    counts = torch.bincount(torch.tensor([answer.tokens[0] for answer in answers]), minlength=VOCABULARY)
    assert counts[expected == 0].sum() == 0
    for token in order[:10].tolist():
        p = float(expected[token])
        assert abs(float(counts[token]) - count * p) <= 4 * (count * p * (1 - p)) ** 0.5
    for answer in answers[:20]:
        assert float(answer.processed_logprobs[0]) == pytest.approx(float(expected[answer.tokens[0]].log()), rel=1e-6)
        assert float(answer.logprobs[0]) == pytest.approx(float(raw[answer.tokens[0]]), rel=1e-6)


def test_rows_that_are_drawn_together_have_the_bits_of_each_alone():
    """A trainer's log-probabilities among them, several temperatures, and other steps."""
    logits = torch.randn(12, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 4
    heat = [1.0, 0.7, 1.3, 0.0]
    steps = {4: {"top_k": 9}, 7: {"presence_penalty": 0.5}, 8: {"logprobs": 3}, 9: {"top_p": 0.7}, 10: {"min_p": 0.1}}
    sampling = [
        SamplingParams(
            temperature=heat[row % 4],
            fp32_logprobs=row in (1, 2, 5, 6),
            seed=row,
            draw_key=("text", row) if row % 3 else row,
            **steps.get(row, {}),
        )
        for row in range(12)
    ]
    draws = [
        Draw(sampling=one, tokens=[1] * 5 + [2] * row, prompt_length=5, sample=row % 2)
        for row, one in enumerate(sampling)
    ]
    for row, found in enumerate(draw_rows(logits, draws=draws)):
        assert found == draw(logits[row], by=draws[row]), row


def test_requested_logprobs_change_no_draw_of_a_trainer():
    """Over all tokens, and over kept ones."""
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(0))
    for top_p in (1.0, 0.5):
        plain = SamplingParams(fp32_logprobs=True, top_p=top_p)
        found, alone = (
            draw(logits, by=Draw(sampling=one, tokens=[1], prompt_length=1))
            for one in (replace(plain, logprobs=2), plain)
        )
        assert (found.token, found.processed_logprob) == (alone.token, alone.processed_logprob)
        assert list(found.top) == logits.topk(2).indices.tolist() and alone.top is None


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"logit_bias": {90: 50.0, 3: 1.0}}]
)
def test_a_vocabulary_is_drawn_from_without_a_mask(model, options):
    """Draws equal draws with a mask. Rows drawn together have the bits of each alone, also with other vocabularies among them."""
    size, logits = 60, torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 4
    logits[:, size:] += 20
    mask = torch.arange(VOCABULARY) < size
    every = [SamplingParams(seed=row, vocabulary=size if row < 5 else None, **options) for row in range(6)]
    draws = [Draw(sampling=one, tokens=[70], prompt_length=1) for one in every]
    for row, found in enumerate(draw_rows(logits, draws=draws)):
        assert found == draw(logits[row], by=draws[row])
        if row < 5:
            masked = replace(every[row], vocabulary=None, token_mask=lambda answer: mask)
            bits = packed_mask(masked, state=None, answer=[], size=VOCABULARY)
            expected = draw(logits[row], by=replace(draws[row], sampling=masked, mask=bits))
            assert found.token == expected.token < size and found.logprob == expected.logprob
            if not options.keys() - {"temperature"} and (heat := every[row].temperature):
                wanted = float((logits[row, :size].double() / heat).log_softmax(0)[found.token])
                assert found.processed_logprob == pytest.approx(wanted, rel=1e-9)
    assert selects(every[1])  # no row of logits for the host
    generator = Generator(model, policy=InferencePolicy(kernels=True))
    found = generator.generate([PROMPT], sampling=SamplingParams(max_tokens=12, vocabulary=20, **options))
    assert max(found[0][0].tokens) < 20


def test_draws_are_even():
    """Kolmogorov-Smirnov over 10,000 places: below 1.95 / sqrt(n), which chance exceeds once in 1,000."""
    draws = torch.tensor(sorted(uniform(0, (), 0, place) for place in range(10_000)), dtype=torch.float64)
    steps = torch.arange(1, 10_001) / 10_000
    assert float((draws - steps).abs().max()) < 1.95 / 100


@pytest.mark.parametrize(
    "options, check",
    [
        ({"top_k": 1}, lambda tokens, best: tokens == best),
        ({"logit_bias": {17: 1e4}}, lambda tokens, best: set(tokens) == {17}),
        (
            {"token_mask": lambda answer: torch.arange(VOCABULARY) == len(answer) + 40},
            lambda tokens, best: tokens == list(range(40, 48)),
        ),
        ({"temperature": 0, "frequency_penalty": 2.0}, lambda tokens, best: len(set(tokens)) == 8),
        ({"temperature": 0, "presence_penalty": 2.0}, lambda tokens, best: len(set(tokens)) == 8),
        ({"temperature": 0, "repetition_penalty": 1e9}, lambda tokens, best: not set(tokens) & set(PROMPT)),
        ({"min_p": 1.0}, lambda tokens, best: tokens == best),
        ({"top_p": 1e-9}, lambda tokens, best: tokens == best),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_each_sampling_step_has_its_effect(model, options, check):
    generator = Generator(model)
    best = generator.generate([PROMPT], sampling=SamplingParams(max_tokens=8, temperature=0))[0][0].tokens
    found = generator.generate([PROMPT], sampling=SamplingParams(max_tokens=8, **options))[0][0].tokens
    assert len(found) == 8 and check(found, best)


@pytest.mark.parametrize("kernels", [False, True], ids=["products", "kernels"])
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda answer: torch.full((VOCABULARY,), len(answer) < 2), "sampling.token_mask allows no token"),
        (lambda answer: torch.ones(VOCABULARY if len(answer) < 2 else 3, dtype=torch.bool), r"bool \[3\]: must be bool \[96\]"),
        (lambda answer: torch.full((VOCABULARY,), bool(1 // max(0, 2 - len(answer)) + 1)), "failed: ZeroDivisionError"),
    ],
    ids=["nothing", "another size", "an error"],
)  # fmt: skip
def test_a_mask_that_leaves_nothing_ends_its_request_alone(model, mask, message, kernels):
    """Also when the mask checks drafts."""
    policy = InferencePolicy(lookup_tokens=4, kernels=kernels)
    expected = Generator(model, policy=policy).generate([PAIRS], sampling=SamplingParams(max_tokens=8, temperature=0))
    generator = Generator(model, policy=policy)
    sampling = [
        SamplingParams(max_tokens=8, temperature=0),
        SamplingParams(max_tokens=8, temperature=0, token_mask=mask),
    ]
    [other], [broken] = generator.generate([PAIRS, PAIRS], sampling=sampling)
    assert other.tokens == expected[0][0].tokens
    assert broken.finish_reason == "error" and re.search(message, broken.error) and len(broken.tokens) == 2
    assert not generator.has_work and len(generator._scheduler.slots._free) == 32


def test_a_stop_token_ends_the_answer(model):
    generator = Generator(model)
    [[full]] = generator.generate([PROMPT], sampling=SamplingParams(max_tokens=20, temperature=0))
    stop = full.tokens[6]
    first = full.tokens.index(stop)
    [[answer]] = generator.generate(
        [PROMPT], sampling=SamplingParams(max_tokens=20, temperature=0, stop_token_ids=(stop,))
    )
    assert answer.tokens == full.tokens[: first + 1] and answer.finish_reason == "stop"


def test_drafts_that_are_right_save_steps():
    """A text that repeats itself: prompt lookup needs fewer steps for the same tokens."""
    model = build_decoder()
    with torch.no_grad():  # a model that counts, whatever came before
        model.embedding.weight.zero_()
        model.head.weight.zero_()
        for place in range(32):
            model.embedding.weight[place, place] = 40
            model.head.weight[(place + 1) % 32, place] = 40
    prompt = [*range(32), *range(20)]
    steps = {}
    for lookup in (0, 4):
        generator = Generator(model, policy=InferencePolicy(lookup_tokens=lookup))
        request = generator.submit(prompt, sampling=SamplingParams(max_tokens=40, temperature=0))
        outputs, steps[lookup] = [], 0
        while generator.has_work:
            outputs += generator.step()
            steps[lookup] += 1
        assert [output.token for output in outputs] == [(20 + place) % 32 for place in range(40)], request
    assert steps == {0: 40, 4: 9}  # the prompt gives one token, each further step the draft's four and one more


def test_logits_that_are_not_finite_end_their_request_alone_and_name_the_layer():
    model = build("llama")
    generator = Generator(model)
    good = generator.submit(PROMPT, sampling=SamplingParams(max_tokens=4, temperature=0))
    bad = generator.submit([50, 51], sampling=SamplingParams(max_tokens=4, temperature=0))
    expected = Generator(model).generate([PROMPT], sampling=SamplingParams(max_tokens=4, temperature=0))[0][0].tokens
    model.model.embed_tokens.weight.data[50] = float("nan")  # the engine shares the module's memory
    outputs = []
    while generator.has_work:
        outputs += generator.step()
    broken = [output for output in outputs if output.request_id == bad.id]
    assert len(broken) == 1 and broken[0].token is None and "after layer 0 of 3" in broken[0].error
    assert [output.token for output in outputs if output.request_id == good.id] == expected


@pytest.mark.parametrize(
    "prompt, sampling, message",
    [
        ([], {}, "the prompt is empty"),
        ([96], {}, "token 96 is outside the vocabulary of 96"),
        ([1], {"logit_bias": {-1: 5.0}}, "token -1 is outside the vocabulary of 96"),
        ([1], {"logit_bias": {3: 1.0, 96: 5.0}}, "token 96 is outside the vocabulary of 96"),
        ([1] * 250, {"max_tokens": 10}, "a prompt of 250 tokens and an answer of up to 10 are more than the 256"),
    ],
)
def test_prompts_that_cannot_be_answered_are_refused(model, prompt, sampling, message):
    generator = Generator(model)
    for call in (generator.submit, lambda prompt, sampling: generator.generate([prompt], sampling=sampling)):
        with pytest.raises(ValueError, match=message):
            call(prompt, sampling=SamplingParams(**sampling))
    assert not generator.has_work


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -1},
        {"temperature": 1e-310},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": {3: 1e39}},
        {"top_p": 0},
        {"n": 0},
        {"max_tokens": 0},
        {"min_p": 2},
        {"top_k": -1},
        {"repetition_penalty": 0},
    ],
)
def test_numbers_without_sense_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"sampling.{name}="):
        SamplingParams(**options)


def test_a_module_that_does_something_else_is_refused():
    model = build("llama")
    model.model.layers[1].mlp.act_fn = torch.nn.ReLU()
    with pytest.raises(ValueError, match="logits differ"):
        Generator(model)


def test_a_weight_that_is_not_finite_is_refused():
    model = build_decoder()
    with torch.no_grad():
        model.head.weight[0, 0] = float("nan")
    with pytest.raises(
        ValueError, match=r"head.weight is not finite: a model whose parameters are sharded is passed as its engine"
    ):
        Generator(model)


def _train_and_generate(process: ztk.Process, *, stage: int) -> tuple[list[int], list[int], list[int]]:
    """Answers before, after two steps by `load`, and of a generator that is made of the engine."""
    engine = ztk.parallelize(
        build_decoder(), process=process, optimizer=ztk.OptimizerPolicy(lr=1e-2), zero=ztk.ZeroPolicy(stage=stage)
    )
    generator = Generator(engine)
    sampling = SamplingParams(max_tokens=24, temperature=0)
    before = generator.generate([PROMPT], sampling=sampling)[0][0].tokens
    for step in range(2):
        tokens = (torch.arange(64).view(2, 32) * (process.rank + 2) + step) % VOCABULARY
        engine.backward(engine(tokens, tokens.roll(-1, 1)))
        engine.step()
    generator.load(engine)
    after = generator.generate([PROMPT], sampling=sampling)[0][0].tokens
    fresh = Generator(engine).generate([PROMPT], sampling=sampling)[0][0].tokens
    return before, after, fresh


def test_weights_come_from_a_training_engine_at_any_stage(ranks):
    found = {stage: ranks(2).run(_train_and_generate, stage=stage) for stage in (0, 2, 3)}
    before, after, fresh = found[0][0]
    assert before != after == fresh
    assert all(answers == (before, after, fresh) for runs in found.values() for answers in runs)


def test_loading_into_a_busy_engine_is_refused(model):
    generator = Generator(model)
    generator.submit(PROMPT, sampling=SamplingParams())
    with pytest.raises(RuntimeError, match="requests are not answered yet"):
        generator.load(model)


@pytest.mark.parametrize("spread, rounds", [(1.0, False), (3.0, False), (6.0, True)])
def test_top_p_keeps_the_tokens_of_a_sorted_vocabulary(spread, rounds, monkeypatch):
    """The likeliest are found in parts; of equal ones all are kept."""
    logits = spread * torch.randn(40_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    p = torch.softmax(logits.mul(4).round().div(4) if rounds else logits, dim=-1)
    ordered, sizes, topk = p.sort(descending=True).values, [], torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda self, count: sizes.append(count) or topk(self, count))
    for top_p in (1e-9, 0.5, 0.9, 0.999999):
        least = ordered[ordered.cumsum(-1) - ordered < top_p * p.sum()][-1]
        assert torch.equal(Cut(top_p=top_p).kept(p.unsqueeze(0))[0], p >= least)
    assert sizes[0] == 1024 and (spread < 6 or sizes[:3] == [1024] * 3)  # the vocabulary is not sorted


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.6}, {"min_p": 0.5}])
@pytest.mark.parametrize("options", [{}, {"logprobs": 1}, {"fp32_logprobs": True}, {"repetition_penalty": 1.0001}])
def test_equally_likely_tokens_are_all_kept(cut, options):
    """On the host, for a trainer, and by the kernel: 1 and 3 are as likely, after 0."""
    logits = torch.tensor([2.0, 1.5, 0.0, 1.5, -1.0])
    draws = [
        Draw(sampling=SamplingParams(draw_key=(seed,), **cut, **options), tokens=[4], prompt_length=1)
        for seed in range(200)
    ]
    every = logits.expand(200, -1).contiguous()
    for found in [draw_rows(every, draws=draws), *([select(every, draws=draws)] if selects(draws[0].sampling) else [])]:
        assert {one.token for one in found} == {0, 1, 3}
