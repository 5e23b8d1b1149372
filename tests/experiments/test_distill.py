"""Runs of task=distill on warm ranks: a small student, and a teacher of another size from a run folder."""

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.experiments.test_alignment import (
    CPU,
    LAYOUTS,
    SMALL,
    config_of,
    laid_out,
    losses_of,
    play,
    record_of,
    written,
)
from tests.rl.rollout.test_served import served
from ztk.config import Config, ConfigError, compose, save
from ztk.core.runtime import Process
from ztk.experiments import distill, policies
from ztk.experiments.alignment import open_stream
from ztk.experiments.distill import DistillStream, prompts_of, stops_of
from ztk.experiments.examples import Step
from ztk.experiments.models import build
from ztk.nn import loss as losses
from ztk.rl.align import DistillPolicy, Sequences, distill_losses

LARGER = ("model.layers=1", "model.dim=48", "model.heads=4", "model.hidden_dim=96", "train.eval_every=0")


@pytest.fixture(scope="module")
def teacher(ranks, tmp_path_factory) -> Path:
    """The folder of a run of task=sft with another model than the student's."""
    folder = tmp_path_factory.mktemp("teacher")
    config = config_of("sft", *LARGER, "checkpoint=last", "optimizer.lr=1e-2", "train.steps=40", folder=folder, ranks=1)
    ranks(1).run(play, configs=[config])
    save(config, path=folder / "config.yaml")
    return folder


def student(*overrides: str, teacher: Path, folder: Path, ranks: int = 2) -> Config:
    return config_of("distill", f"distill.teacher={teacher}", *overrides, folder=folder, ranks=ranks)


# The same numbers


def test_losses_have_the_same_bits_at_every_stage_and_tier(ranks, teacher, tmp_path):
    folders = {layout: tmp_path / f"{layout[0]}{layout[1]}" for layout in LAYOUTS}
    configs = [laid_out(student(teacher=teacher, folder=folder), *layout) for layout, folder in folders.items()]
    ranks(2).run(play, configs=configs)
    expected = record_of(folders[0, "none"])
    assert len({row["loss"] for row in expected}) == 4 and {row["own"] for row in expected} == {0.0, 1.0}
    for layout, folder in folders.items():
        assert record_of(folder) == expected, layout


@pytest.mark.parametrize("words", [("distill.fraction=0", "train.global_batch_size=7"), ("distill.fraction=1",)])
def test_losses_do_not_depend_on_micro_batches_and_ranks(words, ranks, teacher, tmp_path):
    """Of the data's answers in uneven parts, and of the student's own."""
    for name, count, micro in (("one", 1, 8), ("two", 2, 2)):
        size = f"train.micro_batch_size={micro}"
        ranks(count).run(play, configs=[student(*words, size, teacher=teacher, folder=tmp_path / name, ranks=count)])
    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-5)


def chunked(process: Process, *, config: Config) -> None:
    """A run on this rank whose logits count as large."""
    module = importlib.import_module("ztk.kernels.ops.linear_logits")
    before = losses.LARGE_LOGITS, module.CPU_CHUNK_BYTES
    losses.LARGE_LOGITS, module.CPU_CHUNK_BYTES = 0, 256 * 4 * 8 * 4  # eight rows of a vocabulary of bytes
    try:
        play(process, configs=[config])
    finally:
        losses.LARGE_LOGITS, module.CPU_CHUNK_BYTES = before


@pytest.mark.parametrize("stage", [0, 3])
def test_a_run_without_large_logits_has_the_same_losses(stage, ranks, teacher, tmp_path):
    configs = [laid_out(student(teacher=teacher, folder=tmp_path / name), stage, "none") for name in ("all", "chunks")]
    ranks(2).run(play, configs=configs[:1])
    ranks(2).run(chunked, config=configs[1])
    assert losses_of(tmp_path / "chunks") == pytest.approx(losses_of(tmp_path / "all"), rel=1e-5)


def test_a_resumed_run_equals_one_that_was_not_interrupted(ranks, teacher, tmp_path):
    options = ("checkpoint=periodic", "checkpoint.every=2")
    full, resumed = (student(*options, teacher=teacher, folder=tmp_path / name) for name in ("full", "resumed"))
    resumed.checkpoint.resume = str(tmp_path / "full" / "checkpoints" / "step-000002")
    ranks(2).run(play, configs=[full])
    ranks(2).run(play, configs=[resumed])
    assert record_of(tmp_path / "resumed") == record_of(tmp_path / "full")[2:]


# Draws


def test_a_student_is_drawn_by_servers(ranks, teacher, tmp_path):
    words = ("distill.fraction=1", "train.steps=2")
    config = student(*words, teacher=teacher, folder=tmp_path / "own")
    ranks(2).run(play, configs=[config])
    with served(config, folder=tmp_path) as urls:
        other = student(*words, teacher=teacher, folder=tmp_path / "served")
        other.rollout.servers, other.rollout.servers_wait = urls, 60.0
        ranks(2).run(play, configs=[other])
    assert losses_of(tmp_path / "served") == losses_of(tmp_path / "own")
    assert not (tmp_path / "served" / "served_weights").exists()


def drawn(process: Process, *, config: Config) -> tuple[Step, bool, float, float]:
    """The first step of a run, whether the student drew it, its loss, and its loss by hand from all logits of full rows."""
    arranged = process.arrange(policies.topology(config))
    stream = open_stream(config, process=arranged)
    engine = build(config, process=arranged)
    taught = distill.open_teacher(config, process=arranged)
    steps = DistillStream(config, stream=stream, student=engine, teacher=taught)
    step, policy = steps.next_step(), DistillPolicy(beta=0.25, temperature=2.0)
    found = total = torch.zeros(())
    with engine.evaluating():
        for index, batch in enumerate(step.micro_batches):
            _, losses = distill.forward_of(engine, step, index, teacher=taught, policy=policy)
            found = found + losses(engine)[0]
            rows, mask = batch.sequences.rows(length=step.length, pad=0), step.mask(batch)
            own, theirs = engine(rows)[:, :-1], taught(rows)[:, :-1]
            every = distill_losses(own.flatten(0, 1), teacher=theirs.flatten(0, 1), policy=policy)
            total = total + every[mask[:, 1:].flatten()].sum()
    count = sum(int(batch.sequences.answer.sum()) for batch in step.micro_batches)
    assert count == step.num_answer_tokens
    return step, steps.is_own, float(found), float(total) / count


@pytest.mark.parametrize("engine", ["trainer", "generator"])
@pytest.mark.parametrize("who", ["student", "teacher", "data"])
def test_a_step_has_the_answers_of_who_draws_them(who, engine, ranks, teacher, tmp_path):
    words = {"student": ("distill.fraction=1",), "teacher": ("distill.fraction=0", "distill.seq_kd=true")}
    words = words.get(who, ("distill.fraction=0",))
    if who != "data":
        words += ("rollout.temperature=0.001", f"rollout.engine={engine}", "rollout.max_tokens=6")
    config = student(*words, teacher=teacher, folder=tmp_path, ranks=1)
    data, is_own, loss, by_hand = ranks(1).run(drawn, config=config)[0]
    assert loss == pytest.approx(by_hand, rel=1e-5) and is_own == (who == "student")
    texts = [bytes(tokens) for batch in data.micro_batches for tokens in split(batch.sequences)]
    prompts = [bytes(tokens) for batch in data.micro_batches for tokens in prompts_of(batch.sequences)]
    assert len(texts) == 8 and all(prompt.endswith(b">") for prompt in prompts)
    answers = [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]
    assert all(len(answer) <= 6 for answer in answers)
    right = [bytes(sorted(prompt[:-1])) + b"\n" for prompt in prompts]
    assert (answers == right) == (who == "data")
    if who == "teacher":  # it has learnt where an answer ends
        assert all(answer.endswith(b"\n") for answer in answers)


def split(sequences: Sequences) -> list[list[int]]:
    return [tokens.tolist() for tokens in sequences.tokens.split(sequences.lengths.tolist())]


def test_the_last_answer_of_a_conversation_is_drawn_again(tmp_path, teacher):
    turns = [("user", "a"), ("assistant", "bc"), ("user", "d"), ("assistant", "e"), ("user", "f")]
    record = {"messages": [{"role": role, "content": text} for role, text in turns]}
    path = written(tmp_path / "chats.jsonl", record, record)
    words = (f"data.path={path}", "data.validation_fraction=0", "train.eval_every=0", "rollout.max_tokens=32")
    config = compose(
        "task=distill", f"distill.teacher={teacher}", *SMALL, *words, output_dir=str(tmp_path), machine=CPU
    )
    process: Any = SimpleNamespace(
        rank=0, mesh=SimpleNamespace(replica=0, replicas=1), comm=SimpleNamespace(gather_objects=lambda value: [value])
    )
    config.train.micro_batch_size = 8
    stream = open_stream(config, process=process)
    assert stops_of(config, examples=stream.examples) == (ord("\n"),)
    prompt = bytes(prompts_of(stream.next_step().micro_batches[0].sequences)[0]).decode()
    assert prompt == "<|user|>\na\n<|assistant|>\nbc\n<|user|>\nd\n<|assistant|>\n"
    assert config.data.seq_len >= len(prompt) + 32, "room for the answer"


def test_rows_count_the_trained_tokens(ranks, teacher, tmp_path):
    config = student("distill.fraction=1", "rollout.max_tokens=5", teacher=teacher, folder=tmp_path, ranks=1)
    found = ranks(1).run(play, configs=[config])[0][0]
    assert {"validation_loss", "reward", "greedy_reward", "kl"} <= found.keys()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(row["own"] == 1 and 1 <= row["length"] <= 5 for row in rows)


# Configurations


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "distill.teacher=null: there is nobody to learn from"),
        (("distill.teacher=/nowhere",), "distill.teacher=/nowhere: no such folder"),
        (("distill.teacher={folder}",), "has neither the config.yaml of a run nor a config.json"),
        (
            ("distill.teacher={teacher}", "model.vocab_size=300"),
            "has a vocabulary of 256 tokens and the student has one of 300",
        ),
        (("distill.teacher={teacher}", "distill.beta=1.5"), "distill.beta=1.5: must be 0 or more and at most 1"),
        (
            ("distill.teacher={teacher}", "distill.fraction=0", "rollout.max_tokens=4"),
            "rollout.max_tokens=4 has no effect here",
        ),
        (
            ("distill.teacher={teacher}", "train.global_batch_size=6"),
            "use train.global_batch_size=8, or train.micro_batch_size=3, or distill.fraction=0",
        ),
        (("distill.teacher={teacher}", "rollout.max_tokens=20"), "use data.seq_len=26"),
        (("distill.teacher={teacher}", "topology=tp2"), "topology.tensor=2: task=distill reads the model's output"),
        (("distill.teacher={teacher}", "data=prompts"), "task=distill learns answers; use data=chat"),
    ],
)
def test_choices_that_do_not_fit_are_refused(words, said, teacher, tmp_path):
    given = [word.format(folder=tmp_path, teacher=teacher) for word in words]
    with pytest.raises(ConfigError) as error:
        compose("task=distill", *SMALL, *given, output_dir=str(tmp_path / "run"), machine=CPU)
    assert said in str(error.value)


def test_the_teacher_may_have_a_strategy_of_its_own(ranks, teacher, tmp_path):
    words = ("zero=stage1", "reference.zero=stage3", "reference.offload=cpu")
    same, other = (student(*given, teacher=teacher, folder=tmp_path / str(len(given))) for given in (words[:1], words))
    ranks(2).run(play, configs=[same, other])
    assert losses_of(tmp_path / "3") == losses_of(tmp_path / "1")
