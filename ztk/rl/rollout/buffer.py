"""Stores the samples of one rollout, from generation to the last optimizer step that uses them."""

import base64
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import torch
from torch import Tensor

from ztk.rl.rollout.kept import Entries, Kept

# gathers a JSON value of every rank, in rank order
GatherObjects = Callable[[Any], list[Any]]


@dataclass(kw_only=True, slots=True)
class Samples:
    """This rank's samples: S rows of T tokens, prompt, answer, padding.

    With an environment, the answer is everything after the prompt: turns of the policy and observations.

    tokens: int64 [S, T]. numbers: the sample's number in the step over all ranks, int64 [S]. prompts: its prompt's number in the run,
    int64 [S].
    prompt_lengths, answer_lengths: int64 [S]. finished: whether the answer ended by itself, bool [S]. logprobs:
    log-probabilities of the answer's tokens when they were sampled, float32 [S, T], 0 elsewhere.
    late: whether `Requests.late` ended the answer, bool [S], or None if nothing could.
    rewards: float64 [S]. included: whether the sample has a reward, bool [S].
    kept: the tokens that top-k, top-p and min-p kept, or None if nothing was cut. observed: whether an environment wrote the token, bool
    [S, T], or None without an environment. steps: optimizer steps of the weights that drew the token, int64 [S, T], 0 elsewhere, or None if
    nobody needs them. experts: the inference engine's choices for each token in each layer with experts, int16
    [S, T, layers, choices], or None if they were not kept.
    """

    tokens: Tensor
    numbers: Tensor
    prompts: Tensor
    prompt_lengths: Tensor
    answer_lengths: Tensor
    finished: Tensor
    logprobs: Tensor
    rewards: Tensor
    included: Tensor
    kept: Kept | None = None
    observed: Tensor | None = None
    steps: Tensor | None = None
    late: Tensor | None = None
    experts: Tensor | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rows: slice | Tensor) -> "Samples":
        return Samples(**{name: None if value is None else value[rows] for name, value in self._values()})

    @property
    def lengths(self) -> Tensor:
        """Tokens of prompt and answer, int64 [S]."""
        return self.prompt_lengths + self.answer_lengths

    @property
    def answer_mask(self) -> Tensor:
        """bool [S, T]: whether the policy wrote the token."""
        positions = torch.arange(self.tokens.shape[1]).unsqueeze(0)
        first = self.prompt_lengths.unsqueeze(1)
        answers = (positions >= first) & (positions < first + self.answer_lengths.unsqueeze(1))
        return answers if self.observed is None else answers & ~self.observed

    def answer(self, row: int, *, with_end: bool = True) -> Tensor:
        """Returns the tokens of an answer, int64 [n]. with_end: includes the token that ended it."""
        first = int(self.prompt_lengths[row])
        last = first + int(self.answer_lengths[row])
        return self.tokens[row, first : last if with_end else last - int(self.finished[row])]

    def keep(self, entries: Sequence[Entries]) -> None:
        """Adds the tokens that a cut kept at further places, if there are any."""
        if entries:
            before = [] if self.kept is None else [self.kept.entries()]
            self.kept = Kept.of([*before, *entries], shape=self.tokens.shape)

    @classmethod
    def joined(cls, parts: Sequence["Samples"]) -> Self:
        """Concatenates the rows of all `parts`."""
        names = [f.name for f in fields(cls) if f.name != "kept" and getattr(parts[0], f.name) is not None]
        kept = [part.kept for part in parts if part.kept is not None]
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in names}
        return cls(**joined, kept=Kept.joined(kept) if kept else None)

    def to_json(self) -> dict[str, Any]:
        """Returns a lossless JSON value."""
        found = {name: _packed(value) for name, value in self._values() if isinstance(value, Tensor)}
        if self.kept is not None:
            found["kept"] = {"tokens": _packed(self.kept.tokens), "counts": _packed(self.kept.counts)}
        return found

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Restores the result of `to_json`."""
        kept = {name: _unpacked(value) for name, value in values.get("kept", {}).items()}
        tensors = {name: _unpacked(value) for name, value in values.items() if name != "kept"}
        return cls(**tensors, kept=Kept(**kept) if kept else None)

    def _values(self) -> Iterator[tuple[str, Any]]:
        return ((field.name, getattr(self, field.name)) for field in fields(self))


class Buffer:
    """The samples of a rollout and the number of optimizer steps that have used them. `state_dict` supports checkpoints in between.

    updates: number of optimizer steps that use the samples. position: number of those done.
    """

    def __init__(self, *, updates: int) -> None:
        self.updates, self.position = updates, updates
        self.samples: Samples | None = None  # of this rank
        self.extra: dict[str, Tensor] = {}  # further values per sample, [S, ...], such as advantages

    @property
    def is_used_up(self) -> bool:
        """Whether the next step needs a new rollout."""
        return self.position >= self.updates

    def fill(self, samples: Samples, **extra: Tensor) -> None:
        """Starts the steps of a new rollout. extra: values per sample, [S, ...]."""
        self.samples, self.extra, self.position = samples, extra, 0

    def state_dict(self, *, gather: GatherObjects) -> dict[str, Any]:
        """Returns a JSON value, the same on all ranks. A collective call."""
        own = None
        if self.samples is not None and not self.is_used_up:
            extra = {name: _packed(value) for name, value in self.extra.items()}
            own = {"samples": self.samples.to_json(), "extra": extra}
        return {"position": self.position, "updates": self.updates, "ranks": gather(own)}

    def load_state_dict(self, state: Mapping[str, Any], *, per_update: int, rank: int, world_size: int) -> None:
        """Restores the result of `state_dict`, on any number of ranks. Samples stay in the order of their numbers.

        per_update: samples of an optimizer step, over all ranks. Raises ValueError if a rollout was interrupted with other sizes, whose
        loss weights are for other steps, and if `world_size` does not divide the samples.
        """
        ranks = [part for part in state["ranks"] if part is not None]
        if not ranks:  # used up, regardless of the number of steps
            self.position, self.samples, self.extra = self.updates, None, {}
            return
        self.position = state["position"]
        samples = Samples.joined([Samples.from_json(part["samples"]) for part in ranks])
        extra = {name: torch.cat([_unpacked(part["extra"][name]) for part in ranks]) for name in ranks[0]["extra"]}
        saved = state.get("updates", self.updates)  # older checkpoints lack this
        if (saved, len(samples)) != (self.updates, self.updates * per_update):
            raise ValueError(
                f"the checkpoint is in the middle of a rollout of {len(samples)} samples for {saved} optimizer steps, and this run has "
                f"{self.updates * per_update} samples for {self.updates}: resume with its rollout.prompts, rollout.group_size and "
                "train.global_batch_size, or from a checkpoint at the end of a rollout"
            )
        if len(samples) % (self.updates * world_size):
            raise ValueError(
                f"the checkpoint has a rollout of {len(samples)} samples, which {world_size} ranks cannot divide: resume on "
                f"{len(ranks)} ranks, or on another divisor"
            )
        order = samples.numbers.argsort().view(self.updates, world_size, -1)[:, rank].flatten()
        self.samples, self.extra = samples[order], {name: value[order] for name, value in extra.items()}


def share_of_rank(*, updates: int, per_update: int, rank: int, world_size: int) -> Tensor:
    """Returns the numbers of a rank's samples, int64 [updates * per_update / world_size]: its part of every update, in order.

    Raises ValueError if the ranks cannot divide the samples of an update.
    """
    if per_update % world_size:
        raise ValueError(f"{per_update} samples of an update cannot be divided over {world_size} ranks")
    return torch.arange(updates * per_update).view(updates, world_size, -1)[:, rank].flatten()


def _packed(values: Tensor) -> dict[str, Any]:
    data = values.detach().cpu().contiguous()
    raw = data.view(torch.uint8).numpy().tobytes() if data.numel() else b""
    return {
        "dtype": str(data.dtype).removeprefix("torch."),
        "shape": list(data.shape),
        "data": base64.b64encode(raw).decode(),
    }


def _unpacked(packed: Mapping[str, Any]) -> Tensor:
    dtype = getattr(torch, packed["dtype"])
    raw = bytearray(base64.b64decode(packed["data"]))
    if not raw:
        return torch.empty(packed["shape"], dtype=dtype)
    return torch.frombuffer(raw, dtype=dtype).view(packed["shape"])
