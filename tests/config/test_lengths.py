"""`data.path` sets data.seq_len from the records, gives answers a useful length, and drops the examples of the built-in task."""

import json

import pytest

from tests.parallel.topology.families import make
from tests.rl.align.chats import train_tokenizer
from ztk.config import Config, ConfigError, Machine, compose

CPU = Machine(gpus=0, cores=2)


def composed(*overrides: str) -> Config:
    return compose(*overrides, output_dir="/tmp/run", machine=CPU)


@pytest.fixture
def lines(tmp_path):
    def write(*records: dict) -> str:
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return f"data.path={tmp_path / 'a.jsonl'}"

    return write


def chat(answer: int) -> dict:
    return {"prompt": "abcd", "answer": "x" * answer}


def pair(answer: int) -> dict:
    return {"prompt": "abcd", "chosen": "x" * answer, "rejected": "y"}


@pytest.mark.parametrize(("task", "record"), [("sft", chat), ("reward", pair), ("dpo", pair)])
def test_sequences_are_as_long_as_the_longest_record(lines, task, record):
    path = lines(record(3), record(40))
    config = composed(f"task={task}", path)
    assert config.data.seq_len == 48  # 4 + 40 + the end, in rows of 8
    assert config.reasons["data.seq_len"] == "the longest record of data.path has 45 tokens"
    assert composed(f"task={task}", path, "data.seq_len=45").data.seq_len == 45
    assert composed(f"task={task}", path, "model.max_seq_len=45").data.seq_len == 45


def test_sequences_fit_the_ranks_that_share_them(lines):
    assert composed("task=sft", lines(chat(3), chat(40)), "topology=sp4", "model.kv_heads=4").data.seq_len % 4 == 0


def test_short_records_keep_the_option_files_length(lines):
    assert composed("task=sft", lines(chat(1), chat(2))).data.seq_len == 16 == composed("task=sft").data.seq_len


def test_records_beyond_the_context_are_named_by_count(lines, tmp_path):
    with pytest.raises(ConfigError) as caught:
        composed("task=sft", lines(chat(3), chat(130), chat(500)))
    assert str(caught.value) == (
        "the configuration is refused: data.path: 2 of 3 records are longer than the 128 tokens of the model (model.max_seq_len); the longest "
        f"has 505, the first is {tmp_path / 'a.jsonl'}, line 2: shorten them, or leave them out"
    )


def test_the_files_are_read_again_when_they_change(lines):
    assert composed("task=sft", lines(chat(3), chat(40))).data.seq_len == 48
    assert composed("task=sft", lines(chat(3), chat(60))).data.seq_len == 72


def test_rollouts_have_room_for_prompts_and_answers(lines, tmp_path):
    (tmp_path / "f.py").write_text("def f(**given): return 0.0\n")
    words = ("task=grpo", "rollout.task=null", f"reward.function={tmp_path / 'f.py'}:f")
    path = lines({"prompt": "x" * 30})
    config = composed(*words, path)
    assert (config.data.seq_len, config.rollout.max_tokens, config.warm_start.steps) == (40, 8, 0)
    make("Llama", vocab_size=300, max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    train_tokenizer().save_pretrained(tmp_path / "model")
    config = composed(*words, path, "model=hf", f"model.path={tmp_path / 'model'}")
    assert config.rollout.max_tokens == 512 and config.data.seq_len > 512
    with pytest.raises(ConfigError, match="use warm_start.steps=0"):
        composed("task=dpo", lines(pair(3), pair(4)), "warm_start.steps=5")
