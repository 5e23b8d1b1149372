"""Log-likelihoods of long texts and of choices against the logits of transformers' own modules."""

import itertools
import math

import pytest
import torch

from tests.inference.models import VOCABULARY, build
from ztk.inference import Generator, InferencePolicy, encode_choices, log_likelihoods, score_choices, windows

# Two fp32 computations of one logit, of size 20 at most here, differ by rounding: 3 layers of sums of up to 48 products and their norms
# leave below 100 roundings of 2^-24 each, and log p takes part in two of them.
PER_TOKEN = 2 * 100 * 20 * 2**-24


@pytest.fixture(scope="module")
def model():
    return build("llama")


@pytest.fixture(scope="module")
def generator(model):
    return Generator(model)


def tokens_of(count, *, seed=0):
    return torch.randint(3, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("count", [2, 3, 15, 16, 17, 40, 63])
@pytest.mark.parametrize("seq_len, stride", [(16, 1), (16, 8), (16, 15), (16, 5), (3, 2)])
@pytest.mark.parametrize("context", [1, 2])
def test_every_token_counts_once_with_as_much_before_it_as_fits(count, seq_len, stride, context):
    found = list(windows(count, context=context, seq_len=seq_len, stride=stride))
    scored = list(itertools.chain.from_iterable(range(one.scored, one.stop) for one in found))
    assert scored == list(range(context, count))
    for one in found:
        assert one.stop - one.start == min(seq_len, one.stop) and one.scored - one.start >= min(
            one.scored, seq_len - stride
        )


@pytest.mark.parametrize("wrong", [{"stride": 16}, {"stride": 0}, {"context": 0}, {"context": 16}])
def test_windows_that_leave_tokens_out_are_refused(wrong):
    with pytest.raises(ValueError, match=r"stride=|seq_len="):
        list(windows(40, **{"context": 1, "seq_len": 16, "stride": 8} | wrong))


def test_a_text_in_one_window_has_the_loss_of_transformers(model, generator):
    tokens = tokens_of(100)
    with torch.no_grad():
        loss = model(torch.tensor([tokens]), labels=torch.tensor([tokens])).loss.double()
    [found] = log_likelihoods(generator, sequences=[tokens], context=1, seq_len=128, stride=64)
    assert abs(-found / 99 - float(loss)) < PER_TOKEN and -found / 99 > math.log(VOCABULARY)


def test_windows_have_the_losses_of_transformers_over_the_same_tokens(model, generator):
    tokens, seq_len, stride = tokens_of(100), 24, 7
    expected = 0.0
    for one in windows(100, context=1, seq_len=seq_len, stride=stride):
        piece = torch.tensor([tokens[one.start : one.stop]])
        labels = piece.clone()
        labels[:, : one.scored - one.start] = -100
        with torch.no_grad():
            expected -= float(model(piece, labels=labels).loss.double()) * (one.stop - one.scored)
    counted = []
    [found] = log_likelihoods(
        generator, sequences=[tokens], context=1, seq_len=seq_len, stride=stride, on_scored=counted.append
    )
    assert abs(found - expected) < 99 * PER_TOKEN and sum(counted) == 99
    [other] = log_likelihoods(generator, sequences=[tokens], context=1, seq_len=128, stride=64)
    assert abs(found - other) > 1  # earlier tokens change a token's probability in this model


def test_sums_do_not_depend_on_the_batch(model, generator):
    sequences = [tokens_of(count, seed=count) for count in (2, 90, 31, 57)]
    together = log_likelihoods(generator, sequences=sequences, context=1, seq_len=24, stride=12)
    lone = Generator(model, policy=InferencePolicy(max_sequences=1, max_step_tokens=16))
    assert together == log_likelihoods(lone, sequences=sequences, context=1, seq_len=24, stride=12)


# Choices. The text is of small letters, one token each; "ab" is one token where both stand side by side.

AB = 90


def encode(text):
    found = []
    for letter in text:
        if letter == "b" and found and found[-1] == ord("a") - 90:
            found[-1] = AB
        else:
            found.append(ord(letter) - 90)
    return found


def encoded(prompt, choices, **options):
    return encode_choices(prompt, choices=choices, encode=encode, **{"begin": (), "first": 1} | options)


def test_choices_follow_the_tokens_of_the_prompt():
    found = encoded("cde", ["fg", "h"])
    assert found.context == encode("cde") and found.endings == [encode("fg"), encode("h")]
    assert encoded("cde", ["f", "g"], begin=(1,)).context == [1, *encode("cde")]


def test_a_token_across_the_boundary_counts_for_every_choice():
    found = encoded("cda", ["b", "c"])
    assert found.context == encode("cd") and found.endings == [[AB], encode("ac")]


def test_choices_without_a_prompt_follow_the_first_token():
    assert encoded("", ["c", "de"]).context == [1]
    with pytest.raises(ValueError, match="nothing is before the choices"):
        encoded("", ["c", "de"], first=None)


def test_a_long_prompt_keeps_its_end():
    found = encoded("cdefg", ["hij", "k"])
    assert found.cut_to(8) is found and not found.is_cut
    cut = found.cut_to(5)
    assert cut.context == encode("fg") and cut.endings == found.endings and cut.is_cut
    with pytest.raises(ValueError, match="a choice has 3 tokens"):
        found.cut_to(3)


def test_scores_are_sums_of_the_log_probabilities_of_transformers(model, generator):
    examples = [encoded("cda", ["b", "ce", "fghi"]), encoded("xyz", ["c", "d"])]
    found = score_choices(generator, examples=examples)
    assert [len(values) for values in found] == [3, 2]
    for example, values in zip(examples, found, strict=True):
        for ending, value in zip(example.endings, values, strict=True):
            tokens = example.context + ending
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0].double().log_softmax(-1)
            expected = sum(
                float(logits[place - 1, tokens[place]]) for place in range(len(example.context), len(tokens))
            )
            assert abs(value - expected) < len(ending) * PER_TOKEN
    lone = Generator(model, policy=InferencePolicy(max_sequences=1, max_step_tokens=16))
    assert score_choices(lone, examples=examples) == found
