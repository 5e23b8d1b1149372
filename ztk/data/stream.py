"""Batches for one data-parallel rank. The global batch does not depend on the number of ranks.

[Note: Global order]
Training reads one endless order of sequences; `position` counts them over all ranks. A step takes the next `global_batch` sequences. Rank
r takes the r-th contiguous part of them, and each of its micro-batches takes the next part of that. So a step has the same sequences in
the same order for any number of ranks, and the position is the only state.

[Note: Uneven parts]
If the number of ranks does not divide the global batch, the first parts have one more sequence: 8 sequences on 3 ranks are split as 3, 3
and 2. All ranks run the same number of forwards, because every forward has collectives. The weight of a micro-batch compensates for its
size: the mean over ranks and micro-batches of `weight * mean loss of the micro-batch` is the mean over the global batch, and the same
holds for gradients. A micro-batch without a sequence uses an arbitrary one with weight 0.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ztk.core.runtime.seed import generator
from ztk.data.borders import num_targets, positions_of, share_of_targets, without_borders
from ztk.data.mapping import READ_AROUND, drop_pages
from ztk.data.permutation import Permutation

MAPPED_BYTES = 1 << 26  # approximate resident bytes of a mapped file per stream


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One micro-batch of one rank, on CPU: `targets[b, t]` is the token that follows `tokens[b, t]`.

    weight: factor on its mean loss; see [Note: Uneven parts]. 1 if all micro-batches have the same number of counted targets.
    token_weight: factor on means over all its tokens, counted or not, such as router losses. 1 if all micro-batches have the same number
    of sequences.
    positions: positions in documents; see [Note: Documents in a sequence]. None unless documents are kept apart.
    """

    tokens: Tensor  # int64 [micro_batch, seq_len]
    targets: Tensor  # int64 [micro_batch, seq_len], -100 if not counted
    weight: float = 1.0
    token_weight: float = 1.0
    positions: Tensor | None = None  # int64 [micro_batch, seq_len]


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One rank's share of every step. Raises ValueError for a global batch that does not fit into all micro-batches together."""

    micro_batch: int  # most sequences per forward
    accumulation_steps: int = 1  # forwards per step
    rank: int = 0  # index among the data-parallel ranks
    world_size: int = 1  # number of data-parallel ranks
    global_batch: int = 0  # sequences per step over all ranks; 0 fills all micro-batches

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.world_size
        for name in ("micro_batch", "accumulation_steps"):
            if getattr(self, name) < 1:
                key = "micro_batch_size" if name == "micro_batch" else name
                raise ValueError(f"train.{key}={getattr(self, name)}: must be at least 1")
        most = self.world_size * self.accumulation_steps * self.micro_batch
        if not self.global_batch:
            object.__setattr__(self, "global_batch", most)
        if not 0 < self.global_batch <= most:
            raise ValueError(
                f"train.global_batch_size={self.global_batch}: {self.world_size} ranks with {self.accumulation_steps} "
                f"micro-batches of {self.micro_batch} take {most} at most; use train.global_batch_size={most} or less"
            )

    @staticmethod
    def of_total(total: int, *, micro_batch: int, rank: int, world_size: int) -> "Share":
        """Returns the share of `total` sequences in as few micro-batches as possible."""
        steps = -(-total // (world_size * micro_batch))
        return Share(
            micro_batch=micro_batch, accumulation_steps=steps, rank=rank, world_size=world_size, global_batch=total
        )

    def sequences(self, micro_step: int) -> range:
        """Returns the indices within a step of the sequences in micro-batch `micro_step` of the rank. See [Note: Uneven parts]."""
        own = _part(range(self.global_batch), index=self.rank, parts=self.world_size)
        return _part(own, index=micro_step, parts=self.accumulation_steps)

    def items(self, micro_step: int, *, read: Callable[[int], Any]) -> list[Any]:
        """Returns `read(number)` of the sequences in a micro-batch, or of an arbitrary one if there is none."""
        numbers = self.sequences(micro_step)
        return [read(number) for number in numbers or [numbers.start]]

    def weight(self, micro_step: int) -> float:
        """Returns the weight of the micro-batch; see [Note: Uneven parts]."""
        return len(self.sequences(micro_step)) * self.world_size * self.accumulation_steps / self.global_batch


class Stream:
    """The order of [Note: Global order]. A subclass defines the sequence at a position.

    end: the token that ends a document, if documents are kept apart.
    """

    def __init__(self, share: Share, *, seq_len: int, end: int | None = None) -> None:
        self.share = share
        self.seq_len = seq_len
        self.end = end
        self._targets = 0  # counted targets of the current step, if documents are kept apart
        self._position = 0  # sequences used by finished steps, over all ranks
        self._micro_step = 0  # forwards done in the current step

    def next_batch(self) -> Batch:
        """Returns the next micro-batch of this rank."""
        share, step = self.share, self._micro_step
        batch = self._batch(share.items(step, read=self._read), step=step)
        self._micro_step += 1
        if self._micro_step == share.accumulation_steps:
            self._position += share.global_batch
            self._micro_step = 0
        return batch

    def _read(self, number: int) -> Tensor:
        """Reads sequence `number` of the current step."""
        return self.sequence(self._position + number)

    def _batch(self, sequences: list[Tensor], *, step: int) -> Batch:
        if not step:
            self._targets = _count_targets(self.share.global_batch, read=self._read, end=self.end)
        return _batch(sequences, share=self.share, step=step, total=self._targets, end=self.end)

    def state_dict(self) -> dict[str, object]:
        """Returns the position, the same on all ranks. Raises ValueError within a step."""
        if self._micro_step:
            raise ValueError(
                f"the stream is at forward {self._micro_step} of {self.share.accumulation_steps} of a step; "
                "save after the optimizer step"
            )
        return {"position": self._position, **self.identity()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continues at the position of `state`, on any number of ranks. Raises ValueError if the data differ."""
        for key, value in self.identity().items():
            if state.get(key) != value:
                raise ValueError(
                    f"the checkpoint's data has {key} {state.get(key)}, this run {value}; resume with the same data, "
                    "sequence length and train.seed, or start a new run without checkpoint.resume"
                )
        self._position = int(state["position"])
        self._micro_step = 0

    def sequence(self, position: int) -> Tensor:
        """Returns the tokens of the sequence at a global position, int64 [seq_len + 1]."""
        raise NotImplementedError

    def identity(self) -> dict[str, object]:
        """Returns the values that must be equal for a position to mean the same sequence."""
        raise NotImplementedError


class TokenStream(Stream):
    """The sequences of a token array, endless and reshuffled every epoch.

    Sequence i is `data[i * seq_len : (i + 1) * seq_len + 1]`, so that every token except the first is a target once per epoch. Tokens
    after the last full sequence are not used.
    """

    def __init__(
        self, data: Tensor, *, seq_len: int, share: Share, seed: int, digest: str = "", end: int | None = None
    ) -> None:
        """data: uint8 or int [num_tokens], memory-mapped or not. digest: identifies it in checkpoints. end: the same as in `Stream`.

        Raises ValueError if `data` is shorter than one sequence.
        """
        super().__init__(share, seq_len=seq_len, end=end)
        self.data = data
        self.num_sequences = sequences_in(data, seq_len=seq_len)
        self._seed = seed
        self._digest = digest
        self._epoch = -1
        self._order = None
        self._mapped = 0  # bytes of a mapped file read since its pages were last released

    @property
    def epoch(self) -> float:
        """Returns the number of passes over the data so far, over all ranks."""
        return self._position / self.num_sequences

    def sequence(self, position: int) -> Tensor:
        epoch, index = divmod(position, self.num_sequences)
        if epoch != self._epoch:  # a batch across the end of an epoch switches back and forth once
            self._epoch = epoch
            self._order = Permutation(self.num_sequences, seed=(self._seed, "data", epoch))
        self._mapped += (self.seq_len + 1) * self.data.element_size() + READ_AROUND
        if self._mapped > MAPPED_BYTES:
            drop_pages(self.data)
            self._mapped = 0
        return window(self.data, index=self._order[index], seq_len=self.seq_len)

    def identity(self) -> dict[str, object]:
        return {
            "seq_len": self.seq_len,
            "seed": self._seed,
            "num_sequences": self.num_sequences,
            "digest": self._digest,
        }


class SyntheticStream(Stream):
    """Uniformly random tokens from seed and position, with nothing to learn."""

    def __init__(self, *, vocab_size: int, seq_len: int, share: Share, seed: int) -> None:
        super().__init__(share, seq_len=seq_len)
        self.vocab_size = vocab_size
        self._seed = seed

    def sequence(self, position: int) -> Tensor:
        return torch.randint(
            self.vocab_size, (self.seq_len + 1,), generator=generator(self._seed, "synthetic", position)
        )

    def identity(self) -> dict[str, object]:
        return {"seq_len": self.seq_len, "seed": self._seed, "vocab_size": self.vocab_size}


def batches_of(count: int, *, share: Share, read: Callable[[int], Tensor], end: int | None = None) -> Iterator[Batch]:
    """Yields this rank's micro-batches of `count` sequences, the same number on every rank.

    The mean over ranks and batches of their weighted mean losses is the mean over all counted targets; see [Note: Uneven parts].

    read: number -> tokens, int64 [seq_len + 1]. end: the same as in `Stream`.
    """
    own = Share.of_total(count, micro_batch=share.micro_batch, rank=share.rank, world_size=share.world_size)
    total = _count_targets(count, read=read, end=end)
    for step in range(own.accumulation_steps):
        sequences = own.items(step, read=lambda number: read(min(number, count - 1)))
        yield _batch(sequences, share=own, step=step, total=total, end=end)


def _count_targets(count: int, *, read: Callable[[int], Tensor], end: int | None) -> int:
    """Returns the number of counted targets in `count` sequences, if documents are kept apart."""
    return 0 if end is None else sum(num_targets(read(number), end=end) for number in range(count))


def sequences_in(data: Tensor, *, seq_len: int) -> int:
    """Returns the number of full sequences in `data`, tokens [n]. Raises ValueError if there is none."""
    if seq_len < 1:
        raise ValueError(f"data.seq_len={seq_len}: must be at least 1")
    if len(data) < seq_len + 1:
        raise ValueError(
            f"data.seq_len={seq_len}: a sequence needs {seq_len + 1} tokens and this part of the text has {len(data)}; "
            f"use data.seq_len={max(1, len(data) - 1)} or less, or name more text with data.path"
        )
    return (len(data) - 1) // seq_len


def window(data: Tensor, *, index: int, seq_len: int) -> Tensor:
    """Returns sequence `index` of `data` and the token after it, int64 [seq_len + 1]."""
    start = index * seq_len
    return data[start : start + seq_len + 1].long()


def _batch(sequences: list[Tensor], *, share: Share, step: int, total: int, end: int | None) -> Batch:
    """Makes a batch from the tokens of its sequences, int64 [seq_len + 1] each. With `end`, documents are kept apart.

    step: index of the micro-batch. total: counted targets of the optimizer step.
    """
    stacked = torch.stack(sequences)
    tokens, targets = stacked[:, :-1].contiguous(), stacked[:, 1:].contiguous()
    weight = share.weight(step)
    batch = Batch(tokens=tokens, targets=targets, weight=weight, token_weight=weight)
    if end is None:
        return batch
    counts = [num_targets(sequence, end=end) for sequence in sequences] if share.sequences(step) else []
    return replace(
        batch,
        weight=share_of_targets(counts, total=total, parts=share.world_size * share.accumulation_steps),
        targets=without_borders(targets, tokens=tokens, end=end),
        positions=positions_of(tokens, end=end),
    )


def _part(numbers: range, *, index: int, parts: int) -> range:
    """Returns part `index` of `parts` contiguous parts. If `parts` does not divide the range, the first parts are longer by one."""
    size, longer = divmod(len(numbers), parts)
    start = index * size + min(index, longer)
    return numbers[start : start + size + (index < longer)]
