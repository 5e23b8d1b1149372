"""Documents kept apart in a sequence: which targets count, where positions start, and weights that no division changes."""

import pytest
import torch

from ztk.data import Share, TokenStream, held_out_batches
from ztk.data.mixture import MixedStream
from ztk.nn import Documents

END = 0
DATA = torch.randint(5, (4000,), generator=torch.Generator().manual_seed(0)).to(
    torch.uint16
)  # a document of 5 tokens, on average


def stream(rank=0, world_size=1, *, micro_batch=6, accumulation_steps=1, mixed=False):
    share = Share(
        micro_batch=micro_batch,
        accumulation_steps=accumulation_steps,
        rank=rank,
        world_size=world_size,
        global_batch=6,
    )
    options = {"seq_len": 16, "share": share, "seed": 3, "end": END}
    if not mixed:
        return TokenStream(DATA, **options)
    sources = [TokenStream(DATA[:2000], **options), TokenStream(DATA[2000:], **options)]
    return MixedStream(sources, weights=(0.3, 0.7), share=share, seed=3)


def test_an_end_token_predicts_nothing_and_positions_start_behind_it():
    data = torch.tensor([7, 8, END, 5, END, END, 9, 4], dtype=torch.int32)
    batch = TokenStream(data, seq_len=7, share=Share(micro_batch=1), seed=0, end=END).next_batch()
    assert batch.tokens.tolist() == [[7, 8, 0, 5, 0, 0, 9]]
    assert batch.targets.tolist() == [[8, 0, -100, 0, -100, -100, 4]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 0]]
    documents = Documents.at(torch.cat([batch.positions, batch.positions]))
    assert documents.cu_seqlens.tolist() == [0, 3, 5, 6, 7, 10, 12, 13, 14] and documents.longest == 3


def weighted(batches) -> torch.Tensor:
    """A number per sequence that stands for its sum of losses, as training adds them: weight times mean over targets that count."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        counts = batch.targets != -100
        if batch.weight:
            total += batch.weight * batch.tokens.double()[counts].mean()
    return total / len(batches)


def over_tokens(batches) -> torch.Tensor:
    """The same for means over all tokens, as in router losses."""
    return sum(batch.token_weight * batch.tokens.double().mean() for batch in batches) / len(batches)


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize(
    "world_size,micro_batch,accumulation_steps", [(2, 3, 1), (3, 1, 2), (4, 2, 1), (1, 1, 6), (8, 1, 1)]
)
def test_the_mean_over_a_step_does_not_depend_on_its_division(mixed, world_size, micro_batch, accumulation_steps):
    entire = stream(mixed=mixed)
    options = {"micro_batch": micro_batch, "accumulation_steps": accumulation_steps, "mixed": mixed}
    ranks = [stream(rank, world_size, **options) for rank in range(world_size)]
    for _ in range(60):  # over more than an epoch of 249 sequences
        [one] = [entire.next_batch()]
        parts = [rank.next_batch() for rank in ranks for _ in range(accumulation_steps)]
        assert one.weight == 1.0
        torch.testing.assert_close(weighted(parts), weighted([one]), rtol=1e-12, atol=0)
        torch.testing.assert_close(over_tokens(parts), over_tokens([one]), rtol=1e-12, atol=0)
    assert all(rank.state_dict() == entire.state_dict() for rank in ranks)


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_held_out_mean_does_not_depend_on_ranks(world_size):
    def rows(rank, world):
        share = Share(micro_batch=2, rank=rank, world_size=world)
        read = {"seq_len": 16, "share": share, "num_sequences": 7, "end": END}
        return list(held_out_batches([DATA], **read))

    parts = [batch for rank in range(world_size) for batch in rows(rank, world_size)]
    torch.testing.assert_close(weighted(parts), weighted(rows(0, 1)), rtol=1e-12, atol=0)
