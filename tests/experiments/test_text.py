"""Runs on documents and a tokenizer, from the command line to answers; bad input before ranks start."""

import json
import os

import pytest
import torch
from transformers import AutoTokenizer

from tests.commands import run_command
from tests.experiments.test_faults import folder_of, run, summary_of
from ztk.checkpoint.export import export_safetensors
from ztk.experiments.pretrain import SAMPLE_TEMPERATURE, continued
from ztk.serve.models import open_model

LINES = [f"def function_{number}(x):\n    return x + {number}\n" * (1 + number % 3) for number in range(400)]
TRAINED = ("data.tokenizer=train", "data.vocab_size=400", "data.seq_len=16", "train.steps=4", "precision=fp32")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of 4 steps on 2 ranks, with a checkpoint after the second."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "a.jsonl").write_text("".join(json.dumps({"body": line}) + "\n" for line in LINES))
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    try:
        words = (*TRAINED, "data.path=a.jsonl", "data.field=body", "checkpoint.every=2", "zero=stage3")
        done = run(*words, "launch.ranks=2", cwd=folder)
        assert done.returncode == 0, done.stderr
        yield folder
    finally:
        del os.environ["XDG_CACHE_HOME"]


def test_a_run_reports_bits_per_byte_and_keeps_its_tokenizer(trained):
    summary = summary_of(trained)
    assert 0 < summary["validation_bits_per_byte"] < summary["validation_loss"] / 0.6931  # tokens are longer than bytes
    assert summary["skipped_records"] == 0 and summary["sample"]
    assert (folder_of(trained) / "tokenizer" / "tokenizer.json").is_file()
    assert "vocab_size: 400" in (folder_of(trained) / "config.yaml").read_text()


def test_it_resumes_on_other_ranks_with_the_same_losses(trained, tmp_path):
    step = sorted((folder_of(trained) / "checkpoints").glob("step*"))[0]
    tokenizer = f"data.tokenizer={folder_of(trained) / 'tokenizer'}"
    data = (f"data.path={trained}/a.jsonl", "data.field=body", "data.seq_len=16", tokenizer)
    words = (*data, "train.steps=4", "precision=fp32", "train.global_batch_size=4", "zero=stage3", "launch.ranks=1")
    done = run(*words, f"checkpoint.resume={step}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr

    def losses(folder) -> list[float]:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        return [row["loss"] for row in rows if row["step"] > 2]

    assert losses(folder_of(tmp_path)) == pytest.approx(losses(folder_of(trained)), rel=1e-5)  # other sums


def test_it_answers_prompts_in_its_tokens(trained, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "def function_7"}\n')
    out = tmp_path / "out"
    words = ("task=generate", f"inference.model={folder_of(trained)}", "inference.prompts=p.jsonl")
    done = run_command(*words, "sampling.max_tokens=6", f"hydra.run.dir={out}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    opened = open_model(str(folder_of(trained) / "checkpoints"))
    assert opened.vocabulary == 400 and opened.ends == (0,)
    tokens = opened.tokenizer.encode("def function_7")
    assert len(tokens) < 9 and opened.tokenizer.decode(tokens) == "def function_7"
    [line] = (out / "completions.jsonl").read_text().splitlines()
    [answer] = json.loads(line)["answers"]
    kept = answer["tokens"][:-1] if answer["finish_reason"] == "stop" else answer["tokens"]
    assert answer["text"] == opened.tokenizer.decode(kept)
    with pytest.raises(ValueError, match="/v1/completions"):
        opened.tokenizer.chat([{"role": "user", "content": "x"}])


def test_an_exported_model_has_its_tokenizer(trained, tmp_path):
    export_safetensors(folder_of(trained), to=tmp_path / "exported")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "exported", local_files_only=True)
    own = open_model(str(folder_of(trained))).tokenizer
    assert tokenizer.encode(LINES[3]) == own.encode(LINES[3])
    config = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert config["vocab_size"] == len(tokenizer) == 400
    assert config["eos_token_id"] == tokenizer.eos_token_id is not None


def test_its_answers_are_fine_tuned_in_its_tokens(trained, tmp_path):
    records = [{"prompt": line, "answer": f"# {number}\n"} for number, line in enumerate(LINES[:24])]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    past = folder_of(trained)
    words = ("task=sft", "data=chat", "data.path=a.jsonl", "data.seq_len=96", f"data.tokenizer={past / 'tokenizer'}")
    done = run(*words, f"warm_start.path={past}", "train.steps=2", "launch.ranks=1", "checkpoint.every=2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    opened = open_model(str(folder_of(tmp_path)))
    assert opened.ends == (0,) and opened.vocabulary == 400
    assert opened.tokenizer.decode(opened.tokenizer.encode(LINES[7])) == LINES[7]


def test_a_run_without_its_tokenizer_is_refused(trained, tmp_path):
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("config.yaml", "checkpoints"):
        (moved / name).symlink_to(folder_of(trained) / name)
    with pytest.raises(ValueError, match="copy the tokenizer there"):
        open_model(str(moved))


def test_bad_input_is_refused_before_ranks_start(trained, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{broken\n{"text": "b"}\n')
    done = run(*TRAINED, "data.path=bad.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert "bad.jsonl, line 2: not JSON" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.rglob("overrides.json")) and not list(tmp_path.rglob("ranks"))


def test_a_sample_has_the_models_probabilities_and_a_bounded_context():
    lengths = []

    def three_to_one(tokens: torch.Tensor) -> torch.Tensor:
        lengths.append(tokens.shape[1])
        logits = torch.full((*tokens.shape, 256), -1e9)
        logits[..., ord("a")], logits[..., ord("b")] = torch.log(torch.tensor(3.0)), 0.0
        return logits.requires_grad_()

    draws = torch.linspace(0, 1, 401, dtype=torch.float64)[:-1]
    tokens = continued(three_to_one, prompt=torch.tensor([45]), draws=draws.tolist(), max_seq_len=16)
    odds = 3 ** (1 / SAMPLE_TEMPERATURE)
    assert set(tokens[1:].tolist()) == {ord("a"), ord("b")} and max(lengths) == 16 and not tokens.requires_grad
    assert abs((tokens == ord("a")).sum() - 400 * odds / (1 + odds)) <= 1
