"""From named text to batches: tokenizers, mixtures, any number of ranks, resuming, bits per byte."""

import collections
import hashlib
import json

import pytest
import torch

from ztk.data import ReadPolicy, Share, SubwordTokenizer, TextPolicy, open_tokens
from ztk.data.mixture import BLOCK, shares_of
from ztk.data.sources import standard_library

LINES = [f"def function_{number}(x):\n    return x + {number}\n" * (1 + number % 3) for number in range(120)]


@pytest.fixture
def text(tmp_path):
    """Two sources: jsonl and text files."""
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES))
    (tmp_path / "b").mkdir()
    for number in range(30):
        (tmp_path / "b" / f"{number}.txt").write_text(f"Sentence {number} of another kind. " * 9)
    return tmp_path


def policy(tmp_path, *names: str, **options) -> TextPolicy:
    options = {"read": ReadPolicy(share=0.1), "cache_dir": str(tmp_path / "cache")} | options
    return TextPolicy(paths=tuple(str(tmp_path / name) for name in names), **options)


def steps(corpus, *, ranks: int, micro_batch: int, count: int, first: int = 0, state=None) -> list[torch.Tensor]:
    """The tokens of every step over all ranks, [12, seq_len + 1]."""
    shares = [Share.of_total(12, micro_batch=micro_batch, rank=rank, world_size=ranks) for rank in range(ranks)]
    streams = [corpus.stream(seq_len=8, share=share, seed=5) for share in shares]
    if state is not None:
        for stream in streams:
            stream.load_state_dict(json.loads(json.dumps(state)))
    found = []
    for _ in range(count):
        batches = [stream.next_batch() for stream in streams for _ in range(stream.share.accumulation_steps)]
        found.append(torch.cat([batch.tokens for batch in batches if batch.weight]))
    return found


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("ranks, micro_batch", [(2, 6), (3, 2), (5, 1), (1, 4)])
def test_a_step_has_the_same_sequences_on_any_ranks_also_resumed(text, mixed, ranks, micro_batch):
    weights = (0.7, 0.3) if mixed else None
    corpus = open_tokens(policy(text, "a.jsonl", "b", tokenizer="train", vocab_size=400, weights=weights))
    one = steps(corpus, ranks=1, micro_batch=12, count=60)
    other = steps(corpus, ranks=ranks, micro_batch=micro_batch, count=60)
    assert all(a.equal(b) for a, b in zip(one, other, strict=True))
    stream = corpus.stream(seq_len=8, share=Share(micro_batch=12), seed=5)
    for _ in range(37):
        stream.next_batch()
    resumed = steps(corpus, ranks=ranks, micro_batch=micro_batch, count=23, state=stream.state_dict())
    assert all(a.equal(b) for a, b in zip(one[37:], resumed, strict=True))


@pytest.mark.parametrize("ranks", [(4, 2), (1, 3)])
def test_a_run_that_resumes_on_other_ranks_has_the_hash_of_every_step(text, ranks):
    """In the middle of the third epoch; hashes of the tokens of all ranks."""
    corpus = open_tokens(policy(text, "a.jsonl", tokenizer="train", vocab_size=400))

    def hashes(tokens: list[torch.Tensor]) -> list[str]:
        return [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in tokens]

    per_epoch = (len(corpus.parts[0].train) - 1) // 8
    saved, count = int(2.5 * per_epoch / 12), int(3.5 * per_epoch / 12)
    straight = hashes(steps(corpus, ranks=ranks[0], micro_batch=3, count=count))
    state = corpus.stream(seq_len=8, share=Share(micro_batch=12), seed=5)
    for _ in range(saved):
        state.next_batch()
    resumed = steps(corpus, ranks=ranks[1], micro_batch=2, count=count - saved, state=state.state_dict())
    assert straight[saved:] == hashes(resumed) and len(set(straight)) == len(straight) > 30


def test_a_mixture_has_its_proportions_and_every_sequence_once_per_epoch(text):
    corpus = open_tokens(policy(text, "a.jsonl", "b", weights=(0.75, 0.25)))
    stream = corpus.stream(seq_len=8, share=Share(micro_batch=1), seed=5)
    found = [stream.source_of(position) for position in range(2 * BLOCK)]
    counts = collections.Counter(source for source, _ in found[:BLOCK])
    assert counts == {0: 7500, 1: 2500}
    early = sum(source for source, _ in found[:400])
    assert abs(early - 100) < 4 * (400 * 0.25 * 0.75) ** 0.5
    for source in (0, 1):
        numbers = [number for which, number in found if which == source]
        assert sorted(numbers) == list(range(len(numbers)))
    assert stream.source_of(10**15)[1] > 10**14


def test_shares_are_exact():
    assert shares_of([1, 1, 1]) == [3334, 3333, 3333]
    assert sum(shares_of([0.123456, 0.7, 0.2])) == BLOCK
    for weights in ([1, 0], [-1, 2], [], [float("nan"), 1], [float("inf"), 1], [1, 1e-9]):
        with pytest.raises(ValueError, match=r"data\.mixture="):
            shares_of(weights)


def test_another_mixture_is_another_order(text):
    first = open_tokens(policy(text, "a.jsonl", "b", weights=(0.75, 0.25)))
    other = open_tokens(policy(text, "a.jsonl", "b", weights=(0.5, 0.5)))
    share = Share(micro_batch=4)
    state = first.stream(seq_len=8, share=share, seed=5).state_dict()
    with pytest.raises(ValueError, match=r"has shares \[7500, 2500\]"):
        other.stream(seq_len=8, share=share, seed=5).load_state_dict(state)


def test_a_tokenizer_is_trained_once_on_training_documents(text, monkeypatch):
    wanted = policy(text, "a.jsonl", tokenizer="train", vocab_size=400)
    seen = []
    train = SubwordTokenizer.train

    def recorded(texts, **options):
        seen.extend(texts)
        return train(seen, **options)

    monkeypatch.setattr(SubwordTokenizer, "train", staticmethod(recorded))
    corpus = open_tokens(wanted)
    assert len(seen) == corpus.parts[0].counts.train_documents < 120
    again = open_tokens(wanted)
    assert len(seen) == corpus.parts[0].counts.train_documents  # no second training
    assert again.digest == corpus.digest and again.tokenizer.digest == corpus.tokenizer.digest
    named = open_tokens(policy(text, "a.jsonl", tokenizer=str(corpus.tokenizer.folder)))
    assert named.digest == corpus.digest
    shown = corpus.tokenizer.decode(corpus.parts[0].train.long())
    assert shown == "".join(seen)


def test_bits_per_byte_count_the_bytes_of_held_out_text(text):
    corpus = open_tokens(policy(text, "a.jsonl", tokenizer="train", vocab_size=400))
    counts = corpus.parts[0].counts
    decoded = corpus.tokenizer.decode(corpus.parts[0].held_out.long())
    assert corpus.bytes_per_token(seq_len=8, num_sequences=4) == pytest.approx(len(decoded) / counts.held_out_tokens)
    as_bytes = open_tokens(policy(text, "a.jsonl"))
    assert as_bytes.parts[0].counts.held_out_bytes == counts.held_out_bytes  # the same documents, so the losses compare
    mixed = open_tokens(policy(text, "a.jsonl", "b", weights=(3, 1)))
    batches = list(mixed.held_out_batches(seq_len=8, share=Share(micro_batch=5), num_sequences=40))
    assert sum(len(batch.tokens) for batch in batches) == 40
    ratios = [part.counts.held_out_bytes / part.counts.held_out_tokens for part in mixed.parts]
    expected = 0.75 * ratios[0] + 0.25 * ratios[1]
    assert mixed.bytes_per_token(seq_len=8, num_sequences=40) == pytest.approx(expected)


def test_the_standard_library_has_tokens(tmp_path, monkeypatch):
    found = standard_library()
    assert any(not file.size for file in found)
    some = sorted(found, key=lambda file: file.size)[:40]  # empty files among them
    monkeypatch.setattr("ztk.data.tokens.standard_library", lambda: some)
    corpus = open_tokens(TextPolicy(tokenizer="train", vocab_size=300, cache_dir=str(tmp_path)))
    counts = corpus.parts[0].counts
    assert counts.train_documents + counts.held_out_documents == sum(bool(file.size) for file in some)
    assert corpus.skipped == 0 and "documents to train on" in corpus.describe()[0]
