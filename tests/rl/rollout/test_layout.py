"""Packed texts: each has the bits that it has alone, and the gradient of rows with padding behind."""

import dataclasses

import pytest
import torch

from tests.rl.rollout.runs import Batches
from ztk.core.policies.model import LoraPolicy
from ztk.inference import Generator, SamplingParams
from ztk.nn import Decoder, DecoderConfig
from ztk.nn.lora import add_adapters
from ztk.nn.self_attention import CausalAttention
from ztk.rl.rollout import EngineAttention, Requests, RolloutPolicy, answer_logits, lay_out, pack_exactly

CPU = torch.device("cpu")
SHAPE = DecoderConfig(
    vocab_size=97, dim=24, layers=2, heads=4, kv_heads=2, hidden_dim=40, max_seq_len=80, rope_theta=1e4, norm_eps=1e-5
)
LENGTHS = torch.tensor([3, 70, 1, 12, 12, 5])


def decoder(**changes) -> Decoder:
    torch.manual_seed(0)
    return Decoder(dataclasses.replace(SHAPE, **changes))


def texts() -> torch.Tensor:
    return torch.randint(97, (len(LENGTHS), 72), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_text_has_the_same_bits_in_any_pack(threads):
    """Widths at which an activation's last elements take another code path; the texts do not contain later draws."""
    model, tokens, before = decoder(), texts(), torch.get_num_threads()
    assert pack_exactly(model, device=CPU)
    options = {"packs": True, "device": CPU, "module": model}
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            layout = lay_out(tokens, lengths=LENGTHS, **options)
            together = layout.forward(model).flatten(0, 1)
            for row, length in enumerate(LENGTHS.tolist()):
                start = int(layout.starts[row])
                own = tokens[row : row + 1]
                for count in {1, length // 2 or 1, length}:
                    alone = lay_out(own, lengths=torch.tensor([count]), **options)
                    first = int(alone.starts[0])
                    found = alone.forward(model).flatten(0, 1)[first : first + count]
                    assert torch.equal(found, together[start : start + count]), (row, count)
    finally:
        torch.set_num_threads(before)


def test_four_threads_have_full_vectors_too():
    """Torch divides 72 x 1024 elements among three threads, with other boundaries alone and in a pack of 84."""
    model, before = decoder(dim=16, layers=1, hidden_dim=1024, max_seq_len=96), torch.get_num_threads()
    assert pack_exactly(model, device=CPU)
    generator = torch.Generator().manual_seed(2)
    lengths, tokens = torch.tensor([70, 12]), torch.randint(97, (2, 70), generator=generator)
    torch.set_num_threads(4)
    try:
        with torch.no_grad():
            packs = [
                lay_out(tokens[:count], lengths=lengths[:count], packs=True, device=CPU, module=model)
                for count in (1, 2)
            ]
            alone, together = (pack.forward(model).flatten(0, 1)[int(pack.starts[0]) :][:70] for pack in packs)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(alone, together)


@pytest.mark.parametrize("packs", [True, False])
def test_targets_are_the_next_tokens_of_answers(packs):
    """-100 elsewhere: before other tokens, at a text's last token, at padding and in the rest of a pack."""
    model, tokens = decoder(), texts()
    assert pack_exactly(model, device=CPU)
    mask = (torch.arange(72) < LENGTHS.unsqueeze(1)) & (torch.arange(72) % 3 > 0)
    layout = lay_out(tokens, lengths=LENGTHS, packs=packs, device=CPU, module=model)
    targets = layout.targets(mask)
    assert targets.shape == layout.tokens.shape and int((targets >= 0).sum()) == int(mask.sum()) > 0
    for row, length in enumerate(LENGTHS.tolist()):
        own = targets.flatten()[int(layout.starts[row]) :][:length].tolist()
        expected = torch.where(mask[row], tokens[row], -100)[1 : length + 1].tolist()
        assert own[: length - 1] == expected[: length - 1] and own[length - 1] == -100


def test_a_pack_has_the_gradient_of_rows():
    """Within float32's rounding: the same sums in another order."""
    rows, packed = decoder(), decoder()
    assert pack_exactly(packed, device=CPU)
    mask = torch.arange(72) < LENGTHS.unsqueeze(1)
    gradients = []
    for model, packs in ((rows, False), (packed, True)):
        layout = lay_out(texts(), lengths=LENGTHS, packs=packs, device=CPU, module=model if packs else None)
        logits = layout.forward(model).flatten(0, 1).index_select(0, layout.places(mask))
        assert logits.shape == (int(LENGTHS.sum()), 97)
        logits.log_softmax(-1).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def shared_texts() -> tuple[torch.Tensor, torch.Tensor]:
    """Texts, four with a common prompt and two without an answer, and the lengths of the prompts."""
    tokens = texts()
    tokens[1, :5] = tokens[3, :5] = tokens[4, :5] = tokens[5, :5]
    return tokens, torch.tensor([2, 5, 1, 5, 5, 5])


def test_prompts_that_texts_share_are_computed_once_with_the_bits_of_full_texts():
    """Logits, and log-probabilities of answers, whose first tokens are predicted from a shared place."""
    model, (tokens, prompts) = decoder(), shared_texts()
    assert pack_exactly(model, device=CPU)
    options = {"lengths": LENGTHS, "packs": True, "device": CPU, "module": model}
    full, shared = (lay_out(tokens, **options, **given) for given in ({}, {"prompt_lengths": prompts}))
    count = int(LENGTHS.sum()) - 3 * 5
    assert count <= shared.tokens.numel() < full.tokens.numel()
    at = torch.arange(72)
    mask, answers = at < LENGTHS.unsqueeze(1), (at >= prompts.unsqueeze(1)) & (at < LENGTHS.unsqueeze(1))
    assert torch.equal(shared.tokens.flatten()[shared.places(mask)], tokens[mask])
    assert torch.equal(shared.tokens.flatten()[shared.at(LENGTHS - 1)], tokens[torch.arange(6), LENGTHS - 1])
    assert torch.equal(shared.tokens.flatten()[shared.text(1, count=70)], tokens[1, :70])
    with torch.no_grad():
        one, other = (layout.forward(model).flatten(0, 1)[layout.places(mask)] for layout in (full, shared))
        assert torch.equal(one, other)
        alone = answer_logits(lambda *args, **given: model(*args, **given), layout=full, mask=answers)  # of all tokens
        assert torch.equal(answer_logits(_Engine(model), layout=shared, mask=answers), alone)
    with pytest.raises(ValueError, match="documents go on with others"):
        shared.forward(decoder())


def test_prompts_that_texts_share_have_the_gradient_of_full_texts():
    """Within float32's rounding: the same sums in another order."""
    tokens, prompts = shared_texts()
    at, gradients = torch.arange(72), []
    answers = (at >= prompts.unsqueeze(1)) & (at < LENGTHS.unsqueeze(1))
    for given in ({}, {"prompt_lengths": prompts}):
        model = decoder()
        assert pack_exactly(model, device=CPU)
        layout = lay_out(tokens, lengths=LENGTHS, packs=True, device=CPU, module=model, **given)
        logits = answer_logits(_Engine(model), layout=layout, mask=answers)
        logits.log_softmax(-1).square().mean().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_what_cannot_pack_exactly_stays_as_it_is():
    adapted = decoder()
    add_adapters(adapted, policy=LoraPolicy(rank=2, alpha=2.0, targets=("query",)), base="none")
    for model in (decoder().bfloat16(), decoder(experts=2, experts_per_token=1), adapted, torch.nn.Linear(2, 2)):
        assert not pack_exactly(decoder(), model, device=CPU)
        kinds = {type(part) for part in model.modules() if isinstance(part, CausalAttention)}
        assert EngineAttention not in kinds
    assert not pack_exactly(decoder(), device=torch.device("cuda"))


class _Engine(Batches):
    """The engine's attributes that forwards over answers use."""

    def __init__(self, module: Decoder) -> None:
        self.module = module

    def __call__(self, tokens: torch.Tensor, **options) -> torch.Tensor:
        return self.module(tokens, **options)


@torch.no_grad()
def test_answers_of_the_engine_have_the_modules_bits():
    model, lengths = decoder(dim=32, max_seq_len=160), torch.tensor([60, 60, 5, 60, 12, 59, 70, 70])
    options = {"length": 160, "micro_batch": 8, "max_tokens": 80, "stops": (3,), "pad": 0, "packs": True}
    assert pack_exactly(model, device=CPU)
    policy, tokens = RolloutPolicy(**options), torch.randint(97, (8, 160), generator=torch.Generator().manual_seed(1))
    tokens[1, :60] = tokens[3, :60] = tokens[0, :60]
    tokens[7, :70] = tokens[6, :70]
    prompts, numbers = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)], torch.arange(8)
    samples = Requests(prompts=prompts, numbers=numbers, prompt_numbers=numbers, copies=numbers * 0).begin(policy)
    sampling = [
        SamplingParams(max_tokens=80, stop_token_ids=policy.stops, seed=number, fp32_logprobs=True)
        for number in range(8)
    ]
    for row, [answer] in enumerate(Generator(model).generate(prompts, sampling=sampling)):
        count, first = len(answer.tokens), len(prompts[row])
        samples.tokens[row, first : first + count] = torch.tensor(answer.tokens)
        samples.logprobs[row, first : first + count] = answer.processed_logprobs
        samples.answer_lengths[row], samples.finished[row] = count, answer.finish_reason == "stop"
    assert 0 < int(samples.finished.sum()) < 8
    layout = lay_out(samples.tokens, lengths=samples.lengths, packs=True, device=CPU, module=model)
    mask = samples.answer_mask
    places = layout.places(mask)
    logits = layout.forward(model).flatten(0, 1).index_select(0, places - 1)
    chosen = layout.tokens.flatten().index_select(0, places).unsqueeze(1)
    assert torch.equal(torch.log_softmax(logits, -1).gather(1, chosen).squeeze(1), samples.logprobs[mask])
