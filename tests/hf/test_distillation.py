"""task=distill with transformers' models: every stage has plain transformers' loss, from records written by a tokenizer."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from tests.experiments.test_alignment import laid_out, losses_of, play, record_of, written
from tests.hf import small
from ztk.config import Config, ConfigError, Machine, compose, save
from ztk.rl.align import DistillPolicy, distill_losses

RECORDS = [
    {"prompt": f"ab{letter}", "answer": f"{letter}{'xy'[: number % 3]}"} for number, letter in enumerate("cdefghij")
]
COMMON = (
    *(
        "train.steps=3",
        "train.global_batch_size=8",
        "train.micro_batch_size=4",
        "train.eval_every=0",
        "optimizer.lr=3e-3",
    ),
    *("scheduler=constant", "scheduler.warmup_steps=0", "data.validation_fraction=0", "logger=disabled"),
    *("launch.device=cpu", "zero.bucket_size=5000", "distill.beta=0.5"),
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A student with records, and a wider teacher."""
    student = small.save_model(tmp_path_factory.mktemp("student"))
    written(student / "records.jsonl", *RECORDS)
    from transformers import LlamaForCausalLM

    teacher = tmp_path_factory.mktemp("teacher")
    torch.manual_seed(3)
    config = small.llama_config(initializer_range=0.3)
    config.hidden_size, config.num_hidden_layers, config.head_dim = 96, 1, 24
    LlamaForCausalLM(config).save_pretrained(teacher)
    return student, teacher


def config_of(*overrides: str, folders: tuple[Path, Path], to: Path) -> Config:
    student, teacher = folders
    to.mkdir(parents=True, exist_ok=True)
    model = ("task=distill", "model=hf", f"model.path={student}", f"distill.teacher={teacher}", "launch.ranks=2")
    data = (f"data.path={student}/records.jsonl", f"data.tokenizer={student}")
    return compose(*model, *data, *COMMON, *overrides, output_dir=str(to), machine=Machine(gpus=0, cores=2))


def by_hand(folders: tuple[Path, Path]) -> float:
    """The loss of the first step, text by text and without padding."""
    from transformers import AutoModelForCausalLM

    student, teacher = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in folders)
    encode, total, count = small.tokenizer().encode, 0.0, 0
    for record in RECORDS:
        prompt, answer = encode(record["prompt"]), [*encode(record["answer"]), small.EOS]
        tokens = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            own, theirs = (model(input_ids=tokens).logits[0, len(prompt) - 1 : -1] for model in (student, teacher))
        total += distill_losses(own, teacher=theirs, policy=DistillPolicy(beta=0.5)).sum().item()
        count += len(answer)
    return total / count


def test_losses_equal_plain_transformers_at_every_stage(ranks, folders, tmp_path):
    found = {}
    for stage, tier in ((0, "none"), (3, "cpu")):
        to = tmp_path / str(stage)
        config = laid_out(config_of("distill.fraction=0", folders=folders, to=to), stage, tier)
        ranks(2).run(play, configs=[config])
        found[stage] = record_of(to)
    assert found[0] == found[3]
    assert losses_of(tmp_path / "0")[0] == pytest.approx(by_hand(folders), rel=1e-5)


@pytest.mark.parametrize("engine", ["trainer", "generator"])
def test_the_student_draws_with_its_tokenizer_and_ends_there(engine, ranks, folders, tmp_path):
    words = ("distill.fraction=1", "rollout.max_tokens=5", f"rollout.engine={engine}")
    config = config_of(*words, folders=folders, to=tmp_path)
    assert config.data.seq_len >= 3 + 5
    ranks(2).run(play, configs=[config])
    assert all(row["own"] == 1 and 1 <= row["length"] <= 5 for row in record_of(tmp_path))


def test_a_student_that_starts_as_its_teacher_has_nothing_to_learn(ranks, folders, tmp_path):
    """The teacher is a run with adapters, whose checkpoint leaves out the model below them."""
    words = ("task=sft", *(word for word in COMMON if not word.startswith("distill.")), "lora=adapter", "lora.rank=2")
    data = (
        f"data.path={folders[0]}/records.jsonl",
        f"data.tokenizer={folders[0]}",
        "model=hf",
        f"model.path={folders[0]}",
    )
    run = tmp_path / "run"
    config = compose(
        *words, *data, "checkpoint=last", "launch.ranks=2", output_dir=str(run), machine=Machine(gpus=0, cores=2)
    )
    run.mkdir(exist_ok=True)
    ranks(2).run(play, configs=[config])
    save(config, path=run / "config.yaml")
    found = []
    for name, teacher in (("same", run), ("base", folders[0])):
        same = ("lora=adapter", "lora.rank=2", f"warm_start.path={run}", "distill.fraction=0", "train.steps=1")
        learns = config_of(*same, folders=(folders[0], teacher), to=tmp_path / name)
        ranks(2).run(play, configs=[learns])
        found += losses_of(tmp_path / name)
    assert found[0] == pytest.approx(0, abs=1e-6) and found[1] > 1e-5


def test_another_vocabulary_is_refused(folders, tmp_path):
    from transformers import LlamaForCausalLM

    shape = small.llama_config()
    shape.vocab_size = 48
    LlamaForCausalLM(shape).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match="has a vocabulary of 48 tokens and the student has one of 40"):
        config_of(folders=(folders[0], tmp_path / "other"), to=tmp_path / "run")


def test_a_teacher_whose_tokens_are_other_texts_is_refused(folders, tmp_path):
    """Though both vocabularies have one size."""
    student, teacher = folders
    shutil.copytree(teacher, tmp_path / "teacher")
    small.tokenizer().save_pretrained(tmp_path / "teacher")
    given = {"folders": (student, tmp_path / "teacher"), "to": tmp_path / "run"}
    config_of(**given)  # the same tokenizer
    file = tmp_path / "teacher" / "tokenizer.json"
    changed = json.loads(file.read_text())
    words = changed["model"]["vocab"]
    words["a"], words["b"] = words["b"], words["a"]
    file.write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match="token 3 is 'b' in its tokenizer.json and 'a' in data.tokenizer="):
        config_of(**given)
    words = ("task=distill", f"distill.teacher={tmp_path}/teacher", "launch.device=cpu")
    with pytest.raises(ConfigError, match="has the tokens of its tokenizer.json, and the student reads bytes; use"):
        compose(*words, output_dir=str(tmp_path / "run"), machine=Machine(gpus=0, cores=2))
