"""The reference of `task=dpo`: the policy before its first step, as a separate engine, as precomputed numbers, or none."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ztk import checkpoint
from ztk.config import Config
from ztk.config.adapters import reference_has_adapters
from ztk.core.runtime import Process
from ztk.experiments import policies
from ztk.experiments.alignment import start_from
from ztk.experiments.examples import ExampleStream, Step
from ztk.experiments.models import Values, build
from ztk.nn.lora import adapters_off
from ztk.report import RunFolder
from ztk.rl.align import PairLogprobs, Sequences, counted_logprobs, segment_sums
from ztk.rl.rollout import Layout, answer_logits, answer_logprobs, has_large_logits, token_logprobs
from ztk.train.engine import Engine

FOLDER = "reference"  # folder of a run with the checkpoint of its frozen reference


class BaseModel:
    """The frozen model below an engine's adapters, with the interface of an engine in evaluation and the same memory."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self.process = engine, engine.process

    @property
    def module(self) -> nn.Module:
        """The engine's module, whose adapters are on."""
        return self._engine.module

    def __call__(self, tokens: Tensor, **given: Any) -> Tensor:
        """Runs tokens int64 [B, T], with other arguments of the forward -> logits [B, T, V], without gradients. A collective call."""
        with adapters_off(self._engine.module):
            return self._engine(tokens, **given)

    def compute(self, micro_batches: Iterable) -> list[Any]:
        """Same as `Engine.compute`. A collective call."""
        with adapters_off(self._engine.module):
            return self._engine.compute(micro_batches)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Enters the engine's evaluation mode."""
        with self._engine.evaluating():
            yield


def build_frozen(config: Config, *, process: Process, first_values: Values | None) -> Engine:
    """Builds the policy before its first step, which never trains.

    New adapters have no effect, so it is the base alone; adapters of `warm_start.path` belong to it.
    """
    options = {"is_trained": False, "has_adapters": reference_has_adapters(config), "strategy": config.reference}
    engine = build(config, process=process, values=first_values, **options)
    start_from(config, engine=engine)
    return engine


def row_logprobs(engine: Engine | BaseModel, *, tokens: Tensor, temperature: float, size: int) -> Tensor:
    """Returns the log-probability of every token of rows [S, T], float32 [S, T] on the CPU, in forwards of `size` rows. A collective call."""
    parts = []
    with engine.evaluating():
        for part in tokens.split(size):
            rows = part.to(engine.process.device)
            parts.append(token_logprobs(engine(rows), tokens=rows, temperature=temperature).cpu())
    return torch.cat(parts)


class Reference:
    """dpo.reference=none, and the interface of the others, which provide log-probabilities.

    engine: computes them for any text; None if nothing does.
    """

    engine: Engine | BaseModel | None = None

    def begin(self) -> None:
        """Starts a new run, before the policy's first step. A collective call."""

    def resume(self, loaded: checkpoint.LoadReport) -> None:
        """Continues from a checkpoint. A collective call. Raises ValueError if it has no such reference."""

    def of(self, step: Step, *, index: int) -> PairLogprobs | None:
        """Returns the log-probabilities of micro-batch `index`, without gradients, or None without a reference."""
        if self.engine is None:
            return None
        with self.engine.evaluating():
            return pair_logprobs(self.engine, step=step, index=index)

    def state_dict(self) -> Mapping[str, Any]:
        """Returns the reference's part of a policy's checkpoint."""
        return {}

    def close(self) -> None:
        """Closes engines."""


def pair_logprobs(engine: Engine | BaseModel, *, step: Step, index: int, whole_texts: bool = False) -> PairLogprobs:
    """Returns the log-probabilities of `engine` for the answers of micro-batch `index`, without gradients. A collective call.

    whole_texts: also for the prompts of chosen ones.
    """
    layout, logprobs_of = pair_forward(engine, step=step, index=index, whole_texts=whole_texts)
    names = [field.name for field in fields(PairLogprobs)]

    def values_of(model: Any) -> list[Tensor | None]:
        found = logprobs_of(model)
        return [getattr(found, name) for name in names]

    (values,) = engine.compute([layout.micro_batch(values_of)])
    return PairLogprobs(**dict(zip(names, values, strict=True)))


def pair_forward(
    engine: Engine | BaseModel, *, step: Step, index: int, whole_texts: bool = False
) -> tuple[Layout, Callable[[Any], PairLogprobs]]:
    """Returns the layout of micro-batch `index`, and the function from the model to `pair_logprobs` with gradients."""
    own, device = step.micro_batches[index].sequences, engine.process.device
    if not whole_texts:
        layout, logprobs_of = text_forward(engine, step=step, index=index)
        return layout, lambda model: PairLogprobs.of(logprobs_of(model), sequences=own.to(device))
    is_chosen = torch.arange(len(own)) < len(own) // 2
    whole = is_chosen.repeat_interleave(own.lengths) & (own.positions > 0)
    counted = replace(own, answer=whole | own.answer)
    layout, logprobs_of = text_forward(engine, step=step, index=index, counted=counted)

    def pairs_of(model: Any) -> PairLogprobs:
        found, sequences = logprobs_of(model), own.to(device)
        answers = PairLogprobs.of(torch.where(sequences.answer, found, 0.0), sequences=sequences)
        texts, _ = segment_sums(found, lengths=sequences.lengths).chunk(2)
        return replace(answers, chosen_texts=texts)

    return layout, pairs_of


def text_forward(
    engine: Engine | BaseModel, *, step: Step, index: int, counted: Sequences | None = None
) -> tuple[Layout, Callable[[Any], Tensor]]:
    """Returns the layout of micro-batch `index`, and the function from the model to the log-probabilities of its tokens, [T].

    They are 0 for tokens that do not count. counted: the same texts with another mask.
    """
    batch, device = step.micro_batches[index], engine.process.device
    layout = step.layout(batch, module=engine.module, device=device, shares=True)
    sequences = counted or batch.sequences
    mask = sequences.mask(length=step.length)

    def logprobs_of(model: Any) -> Tensor:
        own = sequences.to(device)
        if has_large_logits(model, tokens=mask.numel()):
            found = answer_logprobs(model, layout=layout, mask=mask)
            return found.new_zeros(len(own.tokens)).index_copy(0, own.answer.nonzero().squeeze(1), found)
        return counted_logprobs(answer_logits(model, layout=layout, mask=mask), sequences=own)

    return layout, logprobs_of


class FrozenReference(Reference):
    """dpo.reference=frozen: a second engine under the run's strategy, which never steps. Its checkpoint is written once, unless its
    weights come from `model.path` unchanged.
    """

    def __init__(self, config: Config, *, process: Process, first_values: Values | None) -> None:
        is_base = config.lora.rank > 0 and not reference_has_adapters(config)
        self._is_saved_elsewhere = is_base and policies.trained_only(config)
        self.engine: Engine = build_frozen(config, process=process, first_values=first_values)
        saves = config.checkpoint.saves and not self._is_saved_elsewhere
        self._folder = RunFolder(config.output_dir).path / FOLDER if saves else None
        self._local = bool(config.checkpoint.local)

    def begin(self) -> None:
        """Writes the checkpoint, if the run writes any."""
        if self._folder is not None:
            retention = checkpoint.Retention(keep=1)
            with checkpoint.Saver(self.engine, folder=self._folder, retention=retention, local=self._local) as saver:
                saver.save()

    def resume(self, loaded: checkpoint.LoadReport) -> None:
        """Loads the checkpoint from the folder next to the policy's checkpoints."""
        if self._is_saved_elsewhere:
            return
        source = loaded.path.parent.parent / FOLDER
        checkpoint.load(self.engine, path=source, local=self._local)
        if self._folder is not None and self._folder.resolve() != source.resolve():
            self.begin()

    def close(self) -> None:
        self.engine.close()


class LoraOffReference(Reference):
    """dpo.reference=lora_off: the policy's own frozen base, in a second forward."""

    def __init__(self, policy: Engine) -> None:
        self.engine = BaseModel(policy)


class PrecomputedReference(Reference):
    """dpo.reference=precomputed: the log-probabilities of all examples of the run, float32 [examples, 2], computed with the policy
    itself.
    """

    def __init__(self, config: Config, *, policy: Engine, stream: ExampleStream) -> None:
        self._policy, self._stream, self._batch = policy, stream, config.train.global_batch_size
        examples = stream.examples
        trained = examples.num_records
        self._count = len(examples.held_out) + (config.train.steps * self._batch if trained is None else trained)
        self._table = torch.zeros(0, 2)

    def begin(self) -> None:
        """Computes them in the micro-batches of training, without repetitions."""
        held = len(self._stream.examples.held_out)
        starts = [*range(0, held, self._batch), *range(held, self._count, self._batch)]
        ends = [min(start + self._batch, held if start < held else self._count) for start in starts]
        with self._policy.evaluating():
            parts = [self._computed(range(start, end)) for start, end in zip(starts, ends, strict=True)]
        self._table = torch.cat(parts)

    def _computed(self, numbers: range) -> Tensor:
        """Returns float32 [numbers, 2] on every rank."""
        step, device = self._stream.step_of(numbers), self._policy.process.device
        own = torch.zeros(len(numbers), 2, dtype=torch.float64, device=device)
        for index, batch in enumerate(step.micro_batches):
            found = pair_logprobs(self._policy, step=step, index=index)
            if not batch.is_filler:
                rows = torch.tensor(batch.numbers, device=device) - numbers.start
                own[rows] = torch.stack([found.chosen, found.rejected], dim=1).double()
        gathered = self._policy.process.mesh.gather_scalars(own.flatten(), label="reference")
        return gathered.sum(0).view(-1, 2).float().cpu()

    def resume(self, loaded: checkpoint.LoadReport) -> None:
        """Restores them from the policy's checkpoint, because the policy has changed since."""
        table = (loaded.data_state or {}).get("reference")
        if table is None:
            raise ValueError(
                f"{loaded.path} has no precomputed reference: use the dpo.reference of the run that saved it, or start a new run from its "
                "parameters with warm_start.path"
            )
        if len(table) < self._count:
            raise ValueError(
                f"{loaded.path} has reference log-probabilities of {len(table)} examples and train.steps needs {self._count}: use the "
                "train.steps of the run that saved it"
            )
        numbering = self._stream.examples.numbering
        saved = loaded.data_state.get("reference_numbering", numbering)  # older checkpoints lack this
        if saved != numbering:
            raise ValueError(
                f"{loaded.path} has reference log-probabilities of other examples: {saved[0]} were held out and train.seed was {saved[1]}, "
                f"here they are {numbering[0]} and {numbering[1]}; use the train.eval_batches, train.global_batch_size and train.seed of "
                "the run that saved it"
            )
        self._table = torch.tensor(table, dtype=torch.float32)

    def of(self, step: Step, *, index: int) -> PairLogprobs | None:
        batch, device = step.micro_batches[index], self._policy.process.device
        chosen, rejected = self._table[list(batch.numbers)].to(device).unbind(1)
        tokens = batch.sequences.answer_lengths.to(device).chunk(2)
        return PairLogprobs(chosen=chosen, rejected=rejected, chosen_tokens=tokens[0], rejected_tokens=tokens[1])

    def state_dict(self) -> Mapping[str, Any]:
        return {"reference": self._table.tolist(), "reference_numbering": self._stream.examples.numbering}
