"""`8_from_base_to_served.py`: its data and checks, and all of its cells with a tiny random model. The model that it is about needs minutes."""

import json
from functools import partial
from statistics import NormalDist

import numpy
import pytest

from tests.inference.models import build
from tests.notebooks.test_notebooks import ROOT, quick  # noqa: F401  # a fixture
from tests.rl.align.chats import PLAIN, train_tokenizer

# Claims that hold for any model.
HOLDS = (
    "no prompt is learnt and held out",
    "the same seed has the same losses",
    "the exported folder answers as the run",
    "transformers answers as ztk, token by token",
    "the server answers as task=generate",
)


@pytest.fixture
def story(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "notebooks"))
    import story

    return story


def test_held_out_prompts_are_not_learnt(story):
    """Nor a sum with its numbers exchanged, nor a person's name. The same seed has the same data."""
    learnt, tested = story.sums(largest=20, held_out=60, seed=0)
    pairs = [
        {frozenset(question(one).removeprefix("What is ").rstrip("?").split(" plus ")) for one in part}
        for part in (learnt, tested)
    ]
    assert len(pairs[1]) == len(tested) == 60 and not pairs[0] & pairs[1] and len(learnt) == 400 - 120 + doubled(tested)
    people = story.people(count=50, held_out=20, seed=0)
    names = [{json.loads(one["solution"])["person"]["name"] for one in part} for part in people]
    assert not names[0] & names[1] and [len(part) for part in people] == [50, 20]
    assert story.sums(largest=20, held_out=60, seed=0) == (learnt, tested)
    assert story.sums(largest=20, held_out=60, seed=1) != (learnt, tested)


def question(record: dict) -> str:
    return record["messages"][0]["content"]


def doubled(records: list[dict]) -> int:
    """How many sums add a number to itself, which has one order alone."""
    words = [question(one).removeprefix("What is ").rstrip("?").split(" plus ") for one in records]
    return sum(left == right for left, right in words)


def test_answers_are_checked_and_rewarded(story):
    assert [story.in_words(number) for number in (0, 13, 20, 42)] == ["zero", "thirteen", "twenty", "forty-two"]
    assert story.is_sum(" twelve\n", solution="twelve") and not story.is_sum("It is twelve.", solution="twelve")
    right = '{"person": {"name": "Ada", "age": 36}, "home": {"city": "Oslo"}}'
    texts = {
        '{"home": {"city": "Oslo"}, "person": {"age": 36, "name": "Ada"}}': 1.0,
        '{"person": {"name": "Ada", "age": 35}, "home": {"city": "Oslo"}}': 0.45,
        '{"name": "Ada", "age": 36, "city": "Oslo"}': 0.2,
        '["person"]': 0.2,
        f"```json\n{right}\n```": 0.0,
    }
    given = {"task": ["people"] * len(texts), "solution": [right] * len(texts)}
    assert story.reward_object(list(texts), **given) == list(texts.values())
    assert story.reward_sum(list(texts), **given) == [None] * len(texts)
    chat = [[{"role": "assistant", "content": "twelve"}]]
    assert story.reward_sum(chat, task=["sums"], solution=["twelve"]) == [1.0]
    assert story.reward_object(chat, task=["sums"], solution=["twelve"]) == [None]
    [told] = story.people(count=1, held_out=0, seed=0)[0]
    [keyed] = story.keyed([told])
    person, home = json.loads(told["solution"]).values()
    assert json.loads(keyed["solution"]) == person | home and "keys name, age and city" in question(keyed)
    assert story.FORMS["keys"](keyed["solution"]) and not story.FORMS["keys"](told["solution"])
    records = [{"messages": [], "solution": "one"}, {"messages": [], "solution": "two"}]
    [pair] = story.preferences(records, rejected=["one", "It is two."])
    assert (pair["chosen"], pair["rejected"]) == ("two", "It is two.")


def test_a_run_with_other_words_or_data_is_not_taken_for_this_one(story, tmp_path, monkeypatch):
    first = story.write_lines([{"a": 1}], to=tmp_path / "chats.jsonl")
    assert story.write_lines([{"a": 1}], to=tmp_path / "chats.jsonl") == first
    assert story.write_lines([{"a": 2}], to=tmp_path / "chats.jsonl") != first
    (tmp_path / "overrides.json").write_text(json.dumps({"task": "sft", "data.path": str(first), "train.steps": "12"}))
    monkeypatch.setattr(story, "read_status", lambda folder: story.Status.done)
    monkeypatch.setattr(story.ztk, "load", lambda folder: "the record")
    words = ("task=sft", f"data.path={first}")
    assert story.run_once(*words, "train.steps=12", folder=tmp_path) == "the record"
    for others in ([*words, "train.steps=13"], words):
        with pytest.raises(ValueError, match=r"other values of train\.steps; delete it"):
            story.run_once(*others, folder=tmp_path)


def unguarded(*words: str, folder, start):
    """A random model ends few of its answers, at which GRPO would stop."""
    return start(*words, *["rollout.stop_truncated_above=null"] * ("task=grpo" in words), folder=folder)


@pytest.mark.slow
def test_all_stages_run(story, quick, tmp_path, monkeypatch):  # noqa: F811
    """Claims that need a trained model are evaluated, not judged."""
    import charts

    tokenizer = train_tokenizer()
    tokenizer.chat_template = PLAIN
    model = build("llama", hidden_size=64, intermediate_size=96, vocab_size=len(tokenizer), max_position_embeddings=512)
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    sizes = story.Sizes(
        largest=4, people=8, held_sums=2, held_people=2, chats=4, sft_steps=2, lora_steps=2, drawn=4, pairs=4, dpo_steps=2, prompts=4, group=2,
        grpo_steps=2, served=2,
    )  # fmt: skip
    claims = {}
    monkeypatch.setattr(story, "MODEL", tmp_path / "model")
    monkeypatch.setattr(story, "QUICK", sizes)
    monkeypatch.setattr(charts, "claim", lambda text, *, holds, full_only=False: claims.update({text: holds}))
    monkeypatch.setattr(story, "run_once", partial(unguarded, start=story.run_once))
    quick(ROOT / "notebooks" / "8_from_base_to_served.py")
    assert {text for text, holds in claims.items() if holds} >= set(HOLDS) and len(claims) == 17
    assert (tmp_path / "charts" / "from_base_to_served.csv").read_text().count("measured") == 51


def test_the_interval_of_a_share_is_wilsons(story):
    """Its ends solve the score equation (share - p)^2 = z^2 p (1 - p) / n. It contains the true share as often as it claims."""
    z = NormalDist().inv_cdf(0.975)
    for successes, n in ((7, 20), (0, 10), (10, 10), (1, 1)):
        found = story.share_interval(successes, n=n)
        assert 0 <= found.low <= found.share <= found.high <= 1
        for end in (found.low, found.high):
            assert (found.share - end) ** 2 == pytest.approx(z**2 * end * (1 - end) / n, abs=1e-12)
    draws = numpy.random.default_rng(0).binomial(50, 0.3, 2000)
    covered = [story.share_interval(int(draw), n=50) for draw in draws]
    assert 0.92 < sum(one.low <= 0.3 <= one.high for one in covered) / 2000 < 0.98
    with pytest.raises(ValueError, match="successes=3 of n=2"):
        story.share_interval(3, n=2)
