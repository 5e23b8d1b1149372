"""Sets of tokens and grammars that a draw keeps to, and the sequences next to them."""

from dataclasses import dataclass, field

import pytest
import torch

from tests.inference.models import PAIRS, VOCABULARY, build_decoder
from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.inference.masks import pack, packed_mask, refused_by
from ztk.inference.sample import Draw, draw, draw_rows

PROMPT = [3, 1, 4, 1, 5]
KERNELS = pytest.mark.parametrize("kernels", [False, True], ids=["products", "kernels"])


@dataclass
class Counting:
    """Answers count upwards from `first` in steps of one or two, up to `last`."""

    first: int
    last: int
    seen: list[list[int]] = field(default_factory=list)

    def begin(self):
        return self

    def mask(self, answer):
        steps = [after - before for before, after in zip([self.first - 1, *answer], answer, strict=False)]
        if not set(steps) <= {1, 2}:
            return None
        self.seen.append(list(answer))
        start = answer[-1] if answer else self.first - 1
        following = torch.zeros(VOCABULARY, dtype=torch.bool)
        following[start + 1 : min(start + 3, self.last + 1)] = True
        return pack(following)

    def advance(self, answer):
        return answer[-1] >= self.last


def generated(kernels, *, sampling, prompt=PROMPT, **options):
    generator = Generator(build_decoder(), policy=InferencePolicy(kernels=kernels, **options))
    found = generator.generate([prompt] * len(sampling), sampling=sampling)
    assert not generator.has_work
    return [answer for [answer] in found]


def test_packed_masks_name_their_tokens():
    allowed = torch.rand(99, generator=torch.Generator().manual_seed(0)) < 0.5
    allowed[31] = allowed[63] = True  # sign bits
    packed, shifts = pack(allowed), torch.arange(32, dtype=torch.int32)
    assert torch.equal(((packed.unsqueeze(1) >> shifts) & 1).flatten()[:99].bool(), allowed)
    refused = refused_by([pack(allowed), None, pack(~allowed)], size=99)
    assert torch.equal(refused[0], ~allowed) and torch.equal(refused[2], allowed) and not refused[1].any()


def test_masked_draws_have_the_bits_of_single_ones_and_the_allowed_tokens_probabilities():
    """Also where the allowed tokens together are less likely than a double can say next to the others."""
    chance = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 400, generator=chance) * 4
    allowed = torch.rand(6, 400, generator=chance) < 0.3
    logits[1] -= 900.0 * allowed[1]
    masks = [pack(row) for row in allowed]
    masks[3] = None
    sampling = [SamplingParams(temperature=heat, seed=row) for row, heat in enumerate((0.8, 0.9, 0.0, 0.7, 1.0, 1.3))]
    draws = [
        Draw(sampling=one, tokens=[0] * 7, prompt_length=7, mask=mask)
        for one, mask in zip(sampling, masks, strict=True)
    ]
    for row, (one, own) in enumerate(zip(sampling, draw_rows(logits, draws=draws), strict=True)):
        assert draw(logits[row], by=draws[row]) == own
        scores = logits[row].double().masked_fill(~allowed[row], -torch.inf) if row != 3 else logits[row].double()
        if one.temperature:
            wanted = float(torch.log_softmax(scores / one.temperature, dim=-1)[own.token])
            assert own.processed_logprob == pytest.approx(wanted, rel=1e-9)
        else:
            assert own.token == int(scores.argmax()) and own.processed_logprob == 0
        assert own.logprob == float(torch.log_softmax(logits[row].double(), dim=-1)[own.token])


@KERNELS
def test_each_set_of_tokens_is_kept_to(kernels):
    plain = generated(kernels, sampling=[SamplingParams(max_tokens=8, temperature=0)])[0].tokens
    first, second = plain[:2]
    assert first != second
    sampling = [
        SamplingParams(max_tokens=8, allowed_token_ids=(7, 31, 63)),
        SamplingParams(max_tokens=8, temperature=0, bad_words=((first,),)),
        SamplingParams(max_tokens=8, temperature=0, bad_words=((first, second), (second, first))),
        SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(second,), min_tokens=5),
        SamplingParams(max_tokens=8, temperature=0, stop_token_ids=(second,), min_tokens=1),
    ]
    few, without, apart, late, early = [one.tokens for one in generated(kernels, sampling=sampling)]
    assert set(few) <= {7, 31, 63} and len(few) == 8
    assert first not in without
    assert apart[0] == first and apart[1] != second
    assert second not in late[:5]
    assert early == plain[:2]


@KERNELS
@pytest.mark.parametrize("lookup", [0, 3])
def test_a_grammar_applies_to_its_answer_only(kernels, lookup):
    """Also after drafts, whose states are taken back; bits of the others are those without it."""
    options = {"prompt": PAIRS, "lookup_tokens": lookup}
    others = [SamplingParams(max_tokens=9, seed=seed, temperature=0.7 * (seed % 2)) for seed in range(4)]
    others.append(SamplingParams(max_tokens=9, seed=9, top_k=5))
    alone = generated(kernels, sampling=others, **options)
    counting = [SamplingParams(max_tokens=20, seed=seed, grammar=Counting(10, 20)) for seed in range(2)]
    found = generated(kernels, sampling=[*others, *counting], **options)
    for one, own in zip(alone, found[:5], strict=True):
        assert one.tokens == own.tokens and torch.equal(one.logprobs, own.logprobs)
        assert torch.equal(one.processed_logprobs, own.processed_logprobs)
    for answer in found[5:]:
        steps = [after - before for before, after in zip([9, *answer.tokens], answer.tokens, strict=False)]
        assert set(steps) <= {1, 2} and answer.tokens[-1] == 20 and answer.finish_reason == "stop"
    assert found[5].tokens != found[6].tokens


@KERNELS
def test_sets_that_exclude_each_other_end_their_request_alone(kernels):
    model = build_decoder()
    generator = Generator(model, policy=InferencePolicy(kernels=kernels))
    broken = SamplingParams(max_tokens=4, allowed_token_ids=(5,), bad_words=((5,),))
    numbers = [generator.submit(PROMPT, sampling=one).id for one in (SamplingParams(max_tokens=4), broken)]
    outputs = []
    while generator.has_work:
        outputs += generator.step()
    assert [output.token is not None for output in outputs if output.request_id == numbers[0]] == [True] * 4
    [ended] = [output for output in outputs if output.request_id == numbers[1]]
    assert ended.is_by_request and "no token is left" in ended.error


def test_names_outside_the_vocabulary_are_refused():
    generator = Generator(build_decoder())
    for sampling in (SamplingParams(allowed_token_ids=(10**6,)), SamplingParams(bad_words=((1, -1),))):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            generator.submit(PROMPT, sampling=sampling)
    assert packed_mask(SamplingParams(), state=None, answer=[], size=5) is None
