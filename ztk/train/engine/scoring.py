"""Log-likelihoods of texts, computed by the training engine in any layout. A text is a micro-batch, and its loss is the mean over the
scored tokens.

Replicas take turns over the texts. With sequence parallelism, texts are padded at the end with tokens that are not scored and that
causal attention hides from the text. Losses are float32; sums over a text are float64.
"""

import math

import torch
from torch import Tensor

from ztk.data.borders import IGNORED
from ztk.parallel.pipeline import MicroBatch
from ztk.train.engine.engine import Engine


class EngineScorer:
    """Scores texts by the loss of `engine`, whose model takes tokens and targets. Every rank must make the same calls.

    max_len: largest number of tokens that the model takes. multiple: texts are padded to a multiple of this many tokens.
    """

    def __init__(self, engine: Engine, *, max_len: int, vocabulary: int, multiple: int = 1) -> None:
        """vocabulary: number of tokens in the model's vocabulary. A collective call."""
        self.max_len = max_len // multiple * multiple
        self._engine, self._vocabulary, self._multiple = engine, vocabulary, multiple
        mesh = engine.process.mesh
        self._replica, self._replicas = mesh.replica, mesh.replicas
        own = torch.tensor([mesh.replica, mesh.is_last_stage], dtype=torch.float64, device=engine.process.device)
        places = engine.process.comm.gather_scalars(own, label="replicas").long().cpu()
        # The ranks that have the loss, or a part of it, per replica.
        self._sources = [((places[:, 0] == number) & (places[:, 1] == 1)) for number in range(self._replicas)]

    def score_ends(self, sequences: list[list[int]], *, counts: list[int]) -> list[float]:
        """Returns per sequence the sum of natural log p(token | previous tokens) over its last `counts` tokens, on every rank.

        Raises:
            ValueError: a sequence is too long for the model, or has a token outside the vocabulary.
            FloatingPointError: a loss is not finite.
        """
        self._check(sequences)
        rounds = -(-len(sequences) // self._replicas)
        numbers = [round_ * self._replicas + self._replica for round_ in range(rounds)]
        filled = [
            min(number, len(sequences) - 1) for number in numbers
        ]  # every rank must make the same number of calls
        batches = [self._micro_batch(sequences[number], count=counts[number]) for number in filled]
        losses = self._engine.eval_losses(batches).double()
        gathered = self._engine.process.comm.gather_scalars(losses, label="scores").cpu()
        means = torch.stack([gathered[sources].mean(0) for sources in self._sources])  # [replicas, rounds]
        found = [-float(means[n % self._replicas, n // self._replicas]) * count for n, count in enumerate(counts)]
        if odd := [number for number, value in enumerate(found) if not math.isfinite(value)]:
            raise FloatingPointError(f"sequence {odd[0]}: its loss is not finite")
        return found

    def _micro_batch(self, sequence: list[int], *, count: int) -> MicroBatch:
        size = -(-(len(sequence) - 1) // self._multiple) * self._multiple
        tokens = torch.zeros(1, size, dtype=torch.int64)
        targets = torch.full((1, size), IGNORED)
        length = len(sequence) - 1
        tokens[0, :length] = torch.tensor(sequence[:-1])
        targets[0, length - count : length] = torch.tensor(sequence[-count:])
        return MicroBatch(args=(self._placed(tokens), self._placed(targets)))

    def _placed(self, values: Tensor) -> Tensor:
        return values.to(self._engine.process.device)

    def _check(self, sequences: list[list[int]]) -> None:
        for sequence in sequences:
            if not 2 <= len(sequence) <= self.max_len:
                raise ValueError(f"a sequence has {len(sequence)} tokens, and the model is given 2 to {self.max_len}")
            if max(sequence) >= self._vocabulary or min(sequence) < 0:
                raise ValueError(f"a sequence has a token outside of the vocabulary of {self._vocabulary}")
