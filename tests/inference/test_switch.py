"""New weights between two steps: requests under way go on as if the tokens that they have were their prompt."""

from contextlib import contextmanager

import pytest
import torch

import ztk
from tests.inference.models import build, build_decoder
from ztk.inference import Generator, InferencePolicy, SamplingParams, UnreadModel

PROMPTS = [[3, 1, 4], [5] * 20, [(7 * i + 3) % 96 for i in range(70)]]


def changed(module, *, by=0.5):
    """The parameters of a module, scaled."""
    return {name: own.detach() * by for name, own in module.named_parameters()}


def switching(module, *, states, **options):
    """A generator that takes the states by name."""

    @contextmanager
    def open_weights(name):
        yield UnreadModel(module=module, state=states[name])

    return Generator(module, open_weights=open_weights, **options)


def fresh(module, *, state, **options):
    own = Generator(UnreadModel(module=module, state=state), **options)
    return lambda prompt, count: own.generate([prompt], sampling=SamplingParams(max_tokens=count, temperature=0))[0][0]


def run_to_end(generator, *, drawn):
    while generator.has_work:
        for output in generator.step():
            drawn.setdefault(output.request_id, []).append(output)
    return drawn


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weights": "int8"},
        {"lookup_tokens": 3},
        {"cache_tokens": 192},
        {"cache_dtype": "fp8"},
        {"kernels": True, "max_model_len": 128},
    ],
    ids=["stored", "int8", "drafts", "preempted", "fp8 cache", "kernels"],
)
def test_tokens_after_the_switch_are_the_new_models(options):
    module, policy = build_decoder(), InferencePolicy(max_step_tokens=48, **options)
    states = {"new": changed(module)}
    generator = switching(module, states=states, policy=policy)
    sampling = SamplingParams(max_tokens=12, temperature=0)
    requests = [generator.submit(prompt, sampling=sampling) for prompt in PROMPTS]
    drawn = {}
    for _ in range(6):
        for output in generator.step():
            drawn.setdefault(output.request_id, []).append(output)
    assert sum(map(len, drawn.values())) > 4
    generator.switch("new", version="v1")
    run_to_end(generator, drawn=drawn)
    alone = {
        None: fresh(module, state=dict(module.named_parameters()), policy=policy),
        "v1": fresh(module, state=states["new"], policy=policy),
    }
    for request in requests:
        outputs = drawn[request.id]
        tokens = [output.token for output in outputs]
        old = sum(output.version is None for output in outputs)
        assert len(tokens) == 12 and all(output.version == "v1" for output in outputs[old:])
        if old:
            assert alone[None](request.prompt, old).tokens == tokens[:old]
        if old < 12:
            rest = alone["v1"]([*request.prompt, *tokens[:old]], 12 - old)
            assert rest.tokens == tokens[old:]
            assert torch.equal(rest.logprobs, torch.tensor([output.logprob for output in outputs[old:]]))


@pytest.mark.parametrize("steps", [1, 6], ids=["in the prompt", "in the answer"])
def test_prompts_are_scored_by_one_version(steps):
    module, state = build_decoder(), changed(build_decoder())
    generator = switching(module, states={"new": state}, policy=InferencePolicy(max_step_tokens=16))
    sampling = SamplingParams(max_tokens=3, temperature=0, prompt_logprobs=True)
    request, drawn = generator.submit(PROMPTS[2], sampling=sampling), {}
    for _ in range(steps):
        for output in generator.step():
            drawn.setdefault(output.request_id, []).append(output)
    assert len(drawn) == (steps > 1)
    generator.switch("new", version="v1")
    outputs = run_to_end(generator, drawn=drawn)[request.id]
    scored_by = module if steps > 1 else UnreadModel(module=module, state=state)
    scores = [one.value for one in outputs[0].prompt_logprobs]
    assert scores == pytest.approx(Generator(scored_by).score([request.prompt])[0].tolist(), abs=1e-6)
    assert len(outputs) == 3


def test_weights_that_do_not_fit_change_nothing():
    module = build_decoder()
    state = changed(module)
    name = next(name for name in state if "down" in name)
    broken = state | {name: torch.full_like(state[name], torch.nan)}
    lacking = {own: value for own, value in state.items() if own != name}
    generator = switching(module, states={"broken": broken, "lacking": lacking})
    greedy = SamplingParams(max_tokens=8, temperature=0)
    before = generator.generate(PROMPTS, sampling=greedy)
    for which, words in (("broken", "is not finite"), ("lacking", f"lack {name}")):
        with pytest.raises(ValueError, match=words):
            generator.switch(which, version="v1")
    assert generator.version is None
    after = generator.generate(PROMPTS, sampling=greedy)
    assert [one.tokens for [one] in after] == [one.tokens for [one] in before]


def switched_on_ranks(process: ztk.Process) -> list:
    """Tokens after a version that fits, and the error of one that does not."""
    module = build("llama")
    state = changed(module)
    name = next(name for name in state if "down" in name)
    states = {"new": state, "broken": state | {name: torch.full_like(state[name], torch.nan)}}
    generator = switching(module, states=states, comm=process.comm)
    if generator.follows:
        generator.follow()
        return []
    sampling, drawn = SamplingParams(max_tokens=8, temperature=0), {}
    requests = [generator.submit(prompt, sampling=sampling) for prompt in PROMPTS]
    for _ in range(4):
        for output in generator.step():
            drawn.setdefault(output.request_id, []).append(output)
    with pytest.raises(ValueError, match="is not finite"):
        generator.switch("broken", version="v0")
    generator.prepare("new")  # a step goes on next to it
    for output in generator.step():
        drawn.setdefault(output.request_id, []).append(output)
    generator.switch("new", version="v1")
    run_to_end(generator, drawn=drawn)
    generator.close()
    found = []
    for request in requests:
        old = sum(output.version is None for output in drawn[request.id])
        found.append((request.prompt, old, [output.token for output in drawn[request.id]]))
    return found


def test_ranks_take_their_parts(ranks):
    module = build("llama")
    alone = fresh(module, state=changed(module))
    answers = ranks(2).run(switched_on_ranks)[0]
    assert len(answers) == len(PROMPTS)
    for prompt, old, tokens in answers:
        assert alone([*prompt, *tokens[:old]], len(tokens) - old).tokens == tokens[old:]


def test_packed_layers_and_other_generators_take_none():
    with pytest.raises(RuntimeError, match="open_weights"):
        Generator(build_decoder()).switch("new", version="v1")
