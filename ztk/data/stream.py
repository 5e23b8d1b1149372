"""Batches for one data-parallel rank, the same whatever the number of ranks.

[Note: Global order]
Training reads one endless row of sequences, `position` counting them over all ranks: a step takes the next
`world_size * accumulation_steps * micro_batch` of them, rank r the r-th contiguous part, and each of its micro-batches
the next part of that. So the global batch of a step is the same sequences in the same order for every number of ranks
with the same global batch, and the position alone is the state.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ztk.data.permutation import Permutation
from ztk.runtime.seed import generator


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch of one rank, on CPU: `targets[b, t]` is the token that follows `tokens[b, t]`."""

    tokens: Tensor  # int64 [micro_batch, seq_len]
    targets: Tensor  # int64 [micro_batch, seq_len]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank takes of every step."""

    micro_batch: int  # sequences per forward
    accumulation_steps: int = 1  # forwards per step
    rank: int = 0  # coordinate among the data-parallel ranks
    world_size: int = 1  # number of data-parallel ranks

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size
        for name in ("micro_batch", "accumulation_steps"):
            if getattr(self, name) < 1:
                key = "micro_batch_size" if name == "micro_batch" else name
                raise ValueError(f"train.{key}={getattr(self, name)}: must be at least 1")

    @property
    def global_batch(self) -> int:
        """Sequences per step over all ranks."""
        return self.world_size * self.accumulation_steps * self.micro_batch


class _Stream:
    """The order of [Note: Global order]; a subclass says what the sequence at a position is."""

    def __init__(self, share: Share, *, seq_len: int) -> None:
        self.share = share
        self.seq_len = seq_len
        self._position = 0  # sequences used by finished steps, over all ranks
        self._micro_step = 0  # forwards done in the step under way

    def next_batch(self) -> Batch:
        """The next micro-batch of this rank."""
        share = self.share
        first = share.rank * share.accumulation_steps + self._micro_step
        start = self._position + first * share.micro_batch
        sequences = torch.stack([self._sequence(start + i) for i in range(share.micro_batch)])  # [B, T + 1]
        self._micro_step += 1
        if self._micro_step == share.accumulation_steps:
            self._position += share.global_batch
            self._micro_step = 0
        return _batch(sequences)

    def state_dict(self) -> dict[str, object]:
        """The position, the same on all ranks; valid between steps."""
        if self._micro_step:
            raise ValueError(
                f"the stream stands after forward {self._micro_step} of {self.share.accumulation_steps} of a step; "
                "save after the optimizer step"
            )
        return {"position": self._position, **self._identity()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continues where `state` was taken, on any number of ranks. ValueError if the data are not the same."""
        for key, value in self._identity().items():
            if state.get(key) != value:
                raise ValueError(
                    f"the checkpoint's data has {key} {state.get(key)}, this run {value}; resume with the same data, "
                    "sequence length and train.seed, or start a new run without checkpoint.resume"
                )
        self._position = int(state["position"])
        self._micro_step = 0

    def _sequence(self, position: int) -> Tensor:
        """The tokens of the sequence at a global position, int64 [seq_len + 1]."""
        raise NotImplementedError

    def _identity(self) -> dict[str, object]:
        """What must be equal for a position to mean the same."""
        raise NotImplementedError


class TokenStream(_Stream):
    """The sequences of a row of tokens, shuffled anew in every epoch, without end.

    Sequence i is `data[i * seq_len : (i + 1) * seq_len + 1]`, so that every token but the first is a target once per
    epoch. The rest shorter than a sequence is left out.
    """

    def __init__(self, data: Tensor, *, seq_len: int, share: Share, seed: int, digest: str = "") -> None:
        """`data` is uint8 or int [num_tokens], memory-mapped or not; `digest` identifies it in checkpoints.

        Raises ValueError if `data` is shorter than one sequence.
        """
        super().__init__(share, seq_len=seq_len)
        self.data = data
        self.num_sequences = _num_sequences(data, seq_len=seq_len)
        self._seed = seed
        self._digest = digest
        self._epoch = -1
        self._order = None

    @property
    def epoch(self) -> float:
        """How often the data has been read, over all ranks."""
        return self._position / self.num_sequences

    def _sequence(self, position: int) -> Tensor:
        epoch, index = divmod(position, self.num_sequences)
        if epoch != self._epoch:  # a batch may lie across the end of an epoch: this may go back and forth once
            self._epoch = epoch
            self._order = Permutation(self.num_sequences, seed=(self._seed, "data", epoch))
        return _window(self.data, index=self._order[index], seq_len=self.seq_len)

    def _identity(self) -> dict[str, object]:
        return {
            "seq_len": self.seq_len,
            "seed": self._seed,
            "num_sequences": self.num_sequences,
            "digest": self._digest,
        }


class SyntheticStream(_Stream):
    """Uniformly random tokens, a function of seed and position alone; nothing can be learned from them."""

    def __init__(self, *, vocab_size: int, seq_len: int, share: Share, seed: int) -> None:
        super().__init__(share, seq_len=seq_len)
        self.vocab_size = vocab_size
        self._seed = seed

    def _sequence(self, position: int) -> Tensor:
        return torch.randint(
            self.vocab_size, (self.seq_len + 1,), generator=generator(self._seed, "synthetic", position)
        )

    def _identity(self) -> dict[str, object]:
        return {"seq_len": self.seq_len, "seed": self._seed, "vocab_size": self.vocab_size}


def held_out_batches(data: Tensor, *, seq_len: int, share: Share, num_sequences: int) -> Iterator[Batch]:
    """This rank's micro-batches of about `num_sequences` sequences spread evenly over `data`; always the same ones.

    The number is rounded down to whole batches over all ranks, at least one, so every rank gets equally many and the
    mean of the ranks' mean losses is the mean over all tokens. Accumulation plays no part.
    Raises ValueError if `data` is shorter than one sequence.
    """
    available = _num_sequences(data, seq_len=seq_len)
    width = share.world_size * share.micro_batch
    num_batches = max(1, min(num_sequences, available) // width)
    count = num_batches * width
    for batch in range(num_batches):
        first = batch * width + share.rank * share.micro_batch
        picks = [(first + i) * available // count for i in range(share.micro_batch)]
        yield _batch(torch.stack([_window(data, index=pick, seq_len=seq_len) for pick in picks]))


def _num_sequences(data: Tensor, *, seq_len: int) -> int:
    if seq_len < 1:
        raise ValueError(f"data.seq_len={seq_len}: must be at least 1")
    if len(data) < seq_len + 1:
        raise ValueError(
            f"data.seq_len={seq_len}: a sequence needs {seq_len + 1} tokens and this part of the text has {len(data)}; "
            f"use data.seq_len={max(1, len(data) - 1)} or less, or name more text with data.path"
        )
    return (len(data) - 1) // seq_len


def _window(data: Tensor, *, index: int, seq_len: int) -> Tensor:
    start = index * seq_len
    return data[start : start + seq_len + 1].long()


def _batch(sequences: Tensor) -> Batch:
    return Batch(tokens=sequences[:, :-1].contiguous(), targets=sequences[:, 1:].contiguous())
