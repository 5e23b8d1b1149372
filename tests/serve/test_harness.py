"""The class for lm-evaluation-harness, which is not installed here: its base and its registry are a few lines of the same form."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.hf.small import save_model

EOS, BOS = 1, 2
# Two fp32 computations of log p of 40 tokens at most; see PER_TOKEN in tests/inference/test_scoring.py.
ABSOLUTE = 40 * 2 * 100 * 20 * 2**-24


@pytest.fixture(scope="module")
def harness():
    """`ztk.serve.harness` over a stand-in for lm_eval."""
    registered: dict[str, type] = {}

    class LM:
        def __init__(self) -> None:
            self.cache_hook = None

    def register_model(name: str):
        return lambda kind: registered.setdefault(name, kind)

    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.models", "lm_eval.api")}
    modules["lm_eval.api.model"] = SimpleNamespace(LM=LM)
    modules["lm_eval.api.registry"] = SimpleNamespace(register_model=register_model)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in modules.items():
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "ztk.serve.harness", raising=False)
        made = importlib.import_module("ztk.serve.harness")
        assert registered == {"ztk": made.HarnessModel}
        yield made
        sys.modules.pop("ztk.serve.harness", None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def subject(harness, folder):
    return harness.HarnessModel(folder, max_length=24, batch_size=1, device="cpu")


@pytest.fixture(scope="module")
def model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def requests(*args: tuple) -> list:
    return [SimpleNamespace(args=each) for each in args]


def tokens_of(text: str) -> list[int]:
    """See tests/hf/small.py: <pad>, <eos>, <bos>, letters, digits."""
    letters = [*map(chr, range(ord("a"), ord("z") + 1)), *map(str, range(10))]
    return [3 + letters.index(letter) for letter in text]


def log_p(model, tokens: list[int], *, count: int) -> tuple[float, bool]:
    """Of the last `count` tokens, by transformers; whether each is the likeliest."""
    with torch.no_grad():
        scores = model(torch.tensor([tokens])).logits[0, -count - 1 : -1].double().log_softmax(-1)
    ending = torch.tensor(tokens[-count:])
    return float(scores.gather(1, ending[:, None]).sum()), bool((scores.argmax(-1) == ending).all())


def test_log_likelihoods_equal_transformers(subject, model):
    context, long = "abcde", "fghij0123456789klmnopqrs"
    likeliest = next(letter for letter in "abcdefghijklmnopqrstuvwxyz0123456789" if greedy(model, context) == letter)
    found = subject.loglikelihood(requests((context, "xy"), ("", "xyz"), (context + long, "ab"), (context, likeliest)))
    expected = [
        log_p(model, tokens_of("abcdexy"), count=2),
        log_p(model, [BOS, *tokens_of("xyz")], count=3),  # the prefix token
        log_p(model, tokens_of(context + long + "ab")[-25:], count=2),  # 24 are read
        log_p(model, tokens_of(context + likeliest), count=1),
    ]
    assert [greedily for _, greedily in found] == [greedily for _, greedily in expected] and found[-1][1]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=ABSOLUTE)


def greedy(model, context: str) -> str:
    with torch.no_grad():
        token = int(model(torch.tensor([tokens_of(context)])).logits[0, -1].argmax())
    return [*map(chr, range(ord("a"), ord("z") + 1)), *map(str, range(10))][token - 3]


def test_long_texts_are_scored_in_windows(subject, model):
    text = "abcdefghij0123456789klmnopqrstuvwxyz" * 2  # 72 tokens: three windows of 24
    tokens = [BOS, *tokens_of(text)]
    expected = sum(log_p(model, tokens[stop - 25 : stop], count=24)[0] for stop in (25, 49, 73))
    rolled, short, empty = subject.loglikelihood_rolling(requests((text,), ("ab",), ("",)))
    assert rolled == pytest.approx(expected, abs=3 * ABSOLUTE)
    assert short == pytest.approx(log_p(model, [BOS, *tokens_of("ab")], count=2)[0], abs=ABSOLUTE) and empty == 0.0


def test_answers_end_with_a_stop_text_or_the_limit(subject, model):
    answer = ""
    while len(answer) < 6:
        answer += greedy(model, "abc" + answer)
    stop = answer[3]
    found = subject.generate_until(
        requests(
            ("abc", {"until": [], "max_gen_toks": 6, "do_sample": False}),
            ("abc", {"until": [stop], "max_new_tokens": 6}),
            ("abc", {"until": stop, "max_gen_toks": 6, "temperature": 0.0}),
        )
    )
    assert found == [answer, answer.split(stop)[0], answer.split(stop)[0]]
    drawn = {"do_sample": True, "temperature": 5.0, "max_gen_toks": 6, "seed": 1}
    assert subject.generate_until(requests(("abc", drawn))) != [answer]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_length": 999}, "max_length=999: the model takes 64 tokens"),
        ({"device": "cuda"}, "device=cuda: ztk.Generator computes on the CPU"),
        ({"dtype": "float16"}, "model_args: dtype are not known; use model, weights"),
    ],
)
def test_arguments_that_cannot_act_are_refused(harness, folder, options, message):
    with pytest.raises(ValueError, match=message):
        harness.HarnessModel(folder, **options)


def test_what_does_not_fit_is_refused(subject):
    with pytest.raises(ValueError, match="a continuation has 30 tokens, and the model reads 24"):
        subject.loglikelihood(requests(("a", "b" * 30)))
    with pytest.raises(ValueError, match="max_gen_toks=24: the model reads 24 tokens"):
        subject.generate_until(requests(("a", {"max_gen_toks": 24})))
    with pytest.raises(ValueError, match="num_beams are not known to ztk.Generator"):
        subject.generate_until(requests(("a", {"num_beams": 4})))
