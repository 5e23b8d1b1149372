"""The examples of `task=sft`, `reward`, `dpo` and `distill`, generated or read from a file, and a rank's part of each step."""

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ztk.config import Config
from ztk.config.text import encoding_of
from ztk.core.policies.runs import ANSWER_TASKS, as_paths, data_paths, is_labelled
from ztk.core.runtime import Process
from ztk.data import Share, SubwordTokenizer
from ztk.data.permutation import Permutation
from ztk.experiments.lengths import histogram
from ztk.experiments.prompts import PAD, STOP
from ztk.experiments.tasks import TASKS, name_of
from ztk.report import RunFolder
from ztk.rl.align import Encoding, Example, Part, RecordFormat, Sequences, Text, read_examples, without_rejected
from ztk.rl.rollout import Layout, has_engine_attention, lay_out

HELD_OUT = 2**40  # number of the first built-in prompt for evaluations
ANOTHER = 2**50  # added to the number of a prompt without a wrong answer
ROW_UNIT = 8  # rows are padded to the longest text of a step, rounded up to a multiple of this


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """One forward of this rank. sequences: one per chat or labelled answer; 2P for P pairs, all chosen ones first. margins: one per pair,
    float32 [P].
    numbers: the examples' in the run, [P]. labels: single answers', bool [P]. is_filler: whether it repeats another rank's example
    with weight 0, because every rank runs the same number of forwards.
    """

    sequences: Sequences
    margins: Tensor
    numbers: tuple[int, ...]
    labels: Tensor
    is_filler: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """This rank's micro-batches of a step, and totals over all ranks: its examples, its tokens, and the answer tokens of chats or chosen
    texts.

    num_text_tokens: tokens of chats or chosen texts, without their first. length: length of every row. parts: micro-batches of all ranks.
    packs: forwards take the texts without padding. mismatched: for answers with labels, the same prompts with the answers to the previous
    prompts.
    """

    micro_batches: list[MicroBatch]
    num_examples: int
    num_tokens: int
    num_answer_tokens: int
    num_text_tokens: int
    length: int
    parts: int
    packs: bool
    mismatched: "Step | None" = None

    def layout(self, batch: MicroBatch, *, module: nn.Module, device: torch.device, shares: bool = False) -> Layout:
        """Returns the layout of a micro-batch for a forward of `module`. shares: computes a common prompt of several texts once, if the
        module can.
        """
        sequences = batch.sequences
        options: dict[str, Any] = {"lengths": sequences.lengths, "packs": self.packs, "device": device}
        if has_engine_attention(module):
            options["module"] = module  # packing must not change its results
            options["prompt_lengths"] = self.mask(batch).int().argmax(1) if shares else None
        return lay_out(sequences.rows(length=self.length, pad=PAD), **options)

    def token_weight(self, batch: MicroBatch) -> float:
        """Returns the weight of a micro-batch in means over all tokens of the step, such as losses of routers."""
        return 0.0 if batch.is_filler else len(batch.sequences.tokens) * self.parts / self.num_tokens

    def mask(self, batch: MicroBatch) -> Tensor:
        """Returns whether a token counts: bool [S, length]."""
        return batch.sequences.mask(length=self.length)


class Examples:
    """The training examples by position, endless and reshuffled in every pass over a file, and the held-out examples.

    An example's number is its index among the held-out ones, followed by the others.
    """

    def __init__(self, config: Config, *, process: Process) -> None:
        """Raises ValueError for an invalid record, and if machines have different files with the same names."""
        self._seed, data = config.train.seed, config.data
        self._is_pair, self._is_labelled = config.task.name not in ANSWER_TASKS, is_labelled(config)
        self._masks = config.task.name != "sft" or bool(config.sft.mask_prompts)
        self.held_out: list[Example] = []
        self.num_rejected = 0  # records of KTO that are left out
        self._records: list[Example] | None = None
        self._epoch, self._task_name = -1, name_of(config)  # the epoch of `_order`
        if data.path is None:
            count = config.train.eval_batches * config.train.global_batch_size
            self.held_out = [self._made(HELD_OUT + number) for number in range(count)]
            return
        encoding = encoding_of(config)
        read = partial(
            read_examples,
            record_format=RecordFormat(data.name.value),
            seq_len=data.seq_len,
            encoding=encoding,
            fields=data.fields,
            labelled=is_labelled(config),
        )
        if isinstance(encoding.tokenizer, SubwordTokenizer) and process.rank == 0:
            encoding.tokenizer.save(RunFolder(config.output_dir).tokenizer)
        found, self.num_rejected = self._learnt(read(data_paths(config)))
        held = max(1, round(len(found) * data.validation_fraction)) if data.validation_fraction else 0
        order = self._order = Permutation(len(found), seed=(self._seed, "held out"))
        shuffled = [found[order[index]] for index in range(len(found))]
        self.held_out, self._records = shuffled[:held], shuffled[held:]
        if data.eval_path is not None:
            self.held_out, _ = self._learnt(read(as_paths(data.eval_path)))
        digests = process.comm.gather_objects(self.digest)
        if others := [rank for rank, digest in enumerate(digests) if digest != digests[0]]:
            raise ValueError(
                f"data.path: ranks {others} read other records than rank 0; name files that all machines share"
            )

    def _learnt(self, found: Sequence[Example]) -> tuple[list[Example], int]:
        """Returns the examples to learn, and the number of KTO's rejected ones that are left out."""
        kept = found if self._is_pair else without_rejected(found)
        return [own for example in kept for own in self._shaped(example)], len(found) - len(kept)

    @property
    def numbering(self) -> list[int]:
        """Values that determine an example's number in addition to the records: the number of held-out ones, and the seed of generated
        ones.
        """
        return [len(self.held_out), self._seed]

    @property
    def num_records(self) -> int | None:
        """The number of records to train on, or None if examples are generated."""
        return None if self._records is None else len(self._records)

    @property
    def records(self) -> list[Example]:
        """All records that were read, held-out ones first."""
        return [*self.held_out, *(self._records or [])]

    @functools.cached_property
    def digest(self) -> str:
        """Identifies the records, for checkpoints."""
        if self._records is None:
            return self._task_name
        digest = hashlib.blake2b(digest_size=16)
        for example in self.records:
            for text in example.texts:
                digest.update(text.tokens.numpy().tobytes() + b"\0" + bytes(text.answer.tolist()))
            if example.label is not None:
                digest.update(bytes([example.label]))
        return digest.hexdigest()

    def number(self, position: int) -> int:
        """Returns the number of the example at a position of the training order."""
        if self._records is None:
            return len(self.held_out) + position
        epoch, index = divmod(position, len(self._records))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, Permutation(len(self._records), seed=(self._seed, "examples", epoch))
        return len(self.held_out) + self._order[index]

    def __getitem__(self, number: int) -> Example:
        index = number - len(self.held_out)
        if index < 0:
            return self.held_out[number]
        return self._made(index) if self._records is None else self._records[index]

    def _made(self, number: int) -> Example:
        """Generates a prompt of the task, the right answer, and for a pair a wrong one."""
        task, side = TASKS[self._task_name], 0
        if self._is_labelled:
            number, side = divmod(number, 2)
        while True:
            prompt = task.prompt(seed=self._seed, number=number)
            assert prompt.answer is not None
            wrong = task.wrong(prompt.text, seed=self._seed, number=number)
            if wrong != prompt.answer:
                break
            number += ANOTHER
        answers = (prompt.answer, wrong)
        encoding, asked = Encoding(stop=STOP), Part(text=prompt.text)
        texts = tuple(encoding.text([asked, Part(text=answer, is_answer=True, ends=True)]) for answer in answers)
        return self._shaped(Example(texts=texts))[side]

    def _shaped(self, example: Example) -> list[Example]:
        """Returns the texts to learn: one for supervised fine-tuning, where prompts may count too; two answers with labels if a pair is
        learnt so.
        """
        if self._is_labelled and example.label is None:
            return [Example(texts=(text,), label=not side) for side, text in enumerate(example.texts)]
        if self._is_pair:
            return [example]
        text = example.texts[0]
        counts = text.answer if self._masks else torch.arange(len(text)) > 0
        return [Example(texts=(Text(tokens=text.tokens, answer=counts),))]


class ExampleStream:
    """Steps of a run; see [Note: Global order] in `ztk.data.stream`. packs: packs the texts of the following steps."""

    def __init__(self, examples: Examples, *, config: Config, share: Share) -> None:
        """If the model's layers are cut, all rows have the same length, so that every part has fixed shapes."""
        self.examples, self.position, self.packs = examples, 0, False
        self._share, self._seq_len = share, config.data.seq_len
        self._most_held_out = (config.train.eval_batches or 0) * share.global_batch
        if config.data.eval_path is not None:
            self._most_held_out = len(examples.held_out)
        degrees = config.topology
        self._fixed = max(degrees.pipeline, degrees.tensor, degrees.sequence) > 1

    def next_step(self) -> Step:
        """Returns this rank's part of the next `train.global_batch_size` examples."""
        first, self.position = self.position, self.position + self._share.global_batch
        return self.step_of([self.examples.number(position) for position in range(first, self.position)])

    def step_of(self, numbers: Sequence[int]) -> Step:
        """Returns this rank's part of the examples with these numbers, in micro-batches."""
        share = Share.of_total(
            len(numbers),
            micro_batch=self._share.micro_batch,
            rank=self._share.rank,
            world_size=self._share.world_size,
        )
        examples = [self.examples[number] for number in numbers]
        step = self._step(examples, numbers=numbers, share=share)
        if examples[0].label is None:
            return step
        mismatched = _mismatched(examples)
        return replace(step, mismatched=self._step(mismatched, numbers=numbers, share=share))

    def _step(self, examples: Sequence[Example], *, numbers: Sequence[int], share: Share) -> Step:
        texts = [text for example in examples for text in example.texts]
        longest = max(map(len, texts))
        return Step(
            micro_batches=[
                _micro_batch(examples, numbers=numbers, own=share.sequences(step))
                for step in range(share.accumulation_steps)
            ],
            num_examples=len(examples),
            num_tokens=sum(map(len, texts)),
            num_answer_tokens=sum(int(example.texts[0].answer.sum()) for example in examples),
            num_text_tokens=sum(len(example.texts[0]) - 1 for example in examples),
            length=self._seq_len if self._fixed else min(self._seq_len, -(-longest // ROW_UNIT) * ROW_UNIT),
            parts=share.accumulation_steps * share.world_size,
            packs=self.packs,
        )

    def held_out(self) -> Step | None:
        """Returns this rank's part of the held-out examples, up to `train.eval_batches` global batches, or None if there are none."""
        count = min(len(self.examples.held_out), self._most_held_out)
        return self.step_of(range(count)) if count else None

    def state_dict(self) -> dict[str, object]:
        """Returns the position, the same on all ranks."""
        examples = self.examples
        return {"position": self.position, "digest": examples.digest, "held_out": len(examples.held_out)}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continues at the position of `state`, on any number of ranks. Raises ValueError if the records or the held-out part differ."""
        held = len(self.examples.held_out)
        # Older checkpoints lack this. Generated examples are held out separately from those trained on.
        is_moved = self.examples.num_records is not None and state.get("held_out", held) != held
        if is_moved or state["digest"] != self.examples.digest:
            raise ValueError(
                "the checkpoint's run had other records, or held others out: resume with the same data, or start from its parameters with "
                "warm_start.path"
            )
        assert isinstance(state["position"], int)
        self.position = state["position"]


def lengths_of(examples: Examples, *, step: int) -> str:
    """Describes the number of texts and their lengths in tokens, for the screen. step: `train.global_batch_size`."""
    known = examples.records if examples.num_records is not None else examples.held_out
    lengths = [len(text) for example in known for text in example.texts]
    made = "" if examples.num_records is not None else " held out, others are generated"
    rejected = f"\n{count:,} records with label false are left out" if (count := examples.num_rejected) else ""
    few = ""
    if examples.num_records is not None and examples.num_records < step:
        few = f"\na step of train.global_batch_size={step} repeats the {examples.num_records} records that train: a smaller one is faster"
    return f"texts: {len(lengths)}{made}, {histogram(lengths)}{rejected}{few}"


def _mismatched(examples: Sequence[Example]) -> list[Example]:
    """Returns every prompt with the answer of the previous example. `data.seq_len` has room for the longest prompt with the longest answer."""
    found = []
    for number, example in enumerate(examples):
        (own,), (other,) = example.texts, examples[number - 1].texts
        start, first = own.first_answer, other.first_answer
        parts = ((own.tokens[:start], own.answer[:start]), (other.tokens[first:], other.answer[first:]))
        tokens, answer = (torch.cat(values) for values in zip(*parts, strict=True))
        found.append(Example(texts=(Text(tokens=tokens, answer=answer),), label=example.label))
    return found


def _micro_batch(examples: Sequence[Example], *, numbers: Sequence[int], own: range) -> MicroBatch:
    picked = own or range(1)
    chosen = [examples[index] for index in picked]
    sides = range(len(chosen[0].texts))
    return MicroBatch(
        sequences=Sequences.of(
            [(example.texts[side].tokens, example.texts[side].answer) for side in sides for example in chosen]
        ),
        margins=torch.tensor([example.margin for example in chosen], dtype=torch.float32),
        numbers=tuple(numbers[index] for index in picked),
        labels=torch.tensor([bool(example.label) for example in chosen]),
        is_filler=not own,
    )
