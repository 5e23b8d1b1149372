"""The order of the data: the same for every number of ranks, resumable anywhere, every sequence once per epoch."""

import pytest
import torch

from ztk.data import Batch, Share, SyntheticStream, TokenStream, held_out_batches

DATA = torch.arange(1000, dtype=torch.int32)  # every token equals its position


def stream(rank=0, world_size=1, *, micro_batch=4, accumulation_steps=1, seq_len=7, seed=3, data=DATA) -> TokenStream:
    share = Share(micro_batch=micro_batch, accumulation_steps=accumulation_steps, rank=rank, world_size=world_size)
    return TokenStream(data, seq_len=seq_len, share=share, seed=seed, digest="d")


def synthetic(rank=0, world_size=1, *, micro_batch=4, accumulation_steps=1) -> SyntheticStream:
    share = Share(micro_batch=micro_batch, accumulation_steps=accumulation_steps, rank=rank, world_size=world_size)
    return SyntheticStream(vocab_size=256, seq_len=7, share=share, seed=3)


def global_steps(make, *, world_size, micro_batch, accumulation_steps, steps) -> list[torch.Tensor]:
    """Per step the tokens of all ranks in rank order [global_batch, seq_len]."""
    options = {"micro_batch": micro_batch, "accumulation_steps": accumulation_steps}
    ranks = [make(rank, world_size, **options) for rank in range(world_size)]
    return [
        torch.cat([rank.next_batch().tokens for rank in ranks for _ in range(accumulation_steps)]) for _ in range(steps)
    ]


def test_targets_follow_tokens():
    batch = stream().next_batch()
    assert isinstance(batch, Batch)
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert batch.tokens.shape == batch.targets.shape == (4, 7)
    assert torch.equal(batch.targets, batch.tokens + 1)


def test_every_sequence_once_per_epoch_and_epochs_differ():
    source = stream(micro_batch=1)
    assert source.num_sequences == 142  # (1000 - 1) // 7
    epochs = [[int(source.next_batch().tokens[0, 0]) for _ in range(142)] for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 142 * 7, 7))
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])
    assert source.epoch == 2.0


@pytest.mark.parametrize("make", [stream, synthetic])
@pytest.mark.parametrize(
    "world_size,micro_batch,accumulation_steps", [(2, 4, 1), (4, 2, 1), (8, 1, 1), (1, 2, 4), (2, 1, 4)]
)
def test_global_batch_does_not_depend_on_ranks(make, world_size, micro_batch, accumulation_steps):
    one = global_steps(
        make, world_size=1, micro_batch=8, accumulation_steps=1, steps=40
    )  # 320 sequences: over two epochs
    split = global_steps(
        make, world_size=world_size, micro_batch=micro_batch, accumulation_steps=accumulation_steps, steps=40
    )
    assert all(torch.equal(a, b) for a, b in zip(one, split, strict=True))


@pytest.mark.parametrize("make", [stream, synthetic])
def test_resume_continues_exactly_also_on_other_ranks(make):
    full = global_steps(make, world_size=2, micro_batch=4, accumulation_steps=1, steps=50)
    source = make(0, 2)
    for _ in range(33):
        source.next_batch()
    state = source.state_dict()
    resumed = [make(rank, 4, micro_batch=2) for rank in range(4)]
    for rank in resumed:
        rank.load_state_dict(state)
    for step in range(33, 50):
        assert torch.equal(torch.cat([rank.next_batch().tokens for rank in resumed]), full[step])


def test_state_is_refused_inside_a_step():
    source = stream(accumulation_steps=2)
    source.next_batch()
    with pytest.raises(ValueError, match="at forward 1 of 2"):
        source.state_dict()


def test_state_of_other_data_is_refused():
    state = stream().state_dict()
    for other in (stream(seq_len=8), stream(seed=4), stream(data=DATA[:900])):
        with pytest.raises(ValueError, match=r"checkpoint\.resume"):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="digest"):
        TokenStream(DATA, seq_len=7, share=Share(micro_batch=4), seed=3, digest="other").load_state_dict(state)


def test_seeds_give_different_orders():
    assert not torch.equal(stream(seed=1).next_batch().tokens, stream(seed=2).next_batch().tokens)


def test_synthetic_tokens_fill_the_vocabulary():
    source = synthetic(micro_batch=64)
    tokens = torch.cat([source.next_batch().tokens for _ in range(20)])
    assert tokens.min() >= 0
    assert tokens.max() == 255
    assert len(tokens.unique()) == 256


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_held_out_batches_are_the_same_sequences_for_every_split(world_size):
    def rows(rank):
        share = Share(micro_batch=8 // world_size, rank=rank, world_size=world_size)
        return [batch.tokens for batch in held_out_batches([DATA], seq_len=7, share=share, num_sequences=36)]

    parts = [rows(rank) for rank in range(world_size)]
    assert all(len(part) == 5 for part in parts)  # 36 in batches of 8
    joined = torch.cat([tokens for part in parts for tokens in part])
    assert joined[:, 0].tolist() == [i * 142 // 36 * 7 for i in range(36)]


def test_held_out_batches_are_as_many_as_there_are_sequences():
    share = Share(micro_batch=8, world_size=2)
    (batch,) = held_out_batches([DATA[:30]], seq_len=7, share=share, num_sequences=64)
    assert batch.tokens.shape == (2, 7) and batch.weight == 1.0


UNEVEN = [(3, 2, 8), (3, 1, 8), (5, 4, 7), (4, 8, 3), (2, 3, 5), (7, 2, 30)]


@pytest.mark.parametrize("world_size, micro_batch, total", UNEVEN)
def test_a_global_batch_that_does_not_divide_is_complete_and_weighted(world_size, micro_batch, total):
    shares = [
        Share.of_total(total, micro_batch=micro_batch, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    one = TokenStream(DATA, seq_len=7, share=Share(micro_batch=total), seed=3)
    ranks = [TokenStream(DATA, seq_len=7, share=share, seed=3) for share in shares]
    for _ in range(20):
        full = one.next_batch()
        parts = [stream.next_batch() for stream in ranks for _ in range(shares[0].accumulation_steps)]
        assert all(1 <= len(part.tokens) <= micro_batch for part in parts)
        used = [part.tokens for part in parts if part.weight]
        assert torch.equal(torch.cat(used), full.tokens)
        # any function of a sequence: the weighted mean of the parts' means is the mean
        mean = sum(part.weight * part.tokens.double().mean() for part in parts) / len(parts)
        assert mean.item() == pytest.approx(full.tokens.double().mean().item(), rel=1e-12)


@pytest.mark.parametrize("world_size", [1, 3, 5])
def test_held_out_batches_weigh_right_on_any_number_of_ranks(world_size):
    def weighted(rank):
        share = Share(micro_batch=4, rank=rank, world_size=world_size)
        batches = list(held_out_batches([DATA], seq_len=7, share=share, num_sequences=32))
        return [batch.weight * batch.tokens.double().mean() for batch in batches]

    values = torch.stack([value for rank in range(world_size) for value in weighted(rank)])
    assert values.mean().item() == pytest.approx(sum(i * 142 // 32 * 7 + 3 for i in range(32)) / 32, rel=1e-12)


def test_too_short_text_is_refused():
    for refuse in (
        lambda: stream(data=DATA[:7]),
        lambda: list(held_out_batches([DATA[:7]], seq_len=7, share=Share(micro_batch=1), num_sequences=1)),
    ):
        with pytest.raises(
            ValueError, match=r"data\.seq_len=7: a sequence needs 8 tokens .* has 7; use data\.seq_len=6"
        ):
            refuse()
    assert stream(data=DATA[:8], micro_batch=1).next_batch().tokens.tolist() == [list(range(7))]


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match=r"train\.micro_batch_size=0"):
        Share(micro_batch=0)
    with pytest.raises(ValueError, match=r"train\.accumulation_steps=0"):
        Share(micro_batch=1, accumulation_steps=0)
    with pytest.raises(ValueError, match=r"data\.seq_len=0"):
        stream(seq_len=0)
    with pytest.raises(ValueError, match=r"use train\.global_batch_size=8 or less"):
        Share(micro_batch=4, world_size=2, global_batch=9)
