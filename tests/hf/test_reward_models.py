"""reward.path with a transformers model for sequence classification: its values equal transformers' on the same texts."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hf import small
from tests.rl.rollout.runs import config_of, play
from ztk.config import Config, ConfigError, Machine, compose
from ztk.core.runtime import Process
from ztk.experiments import policies
from ztk.experiments.reward_models import open_reward_model
from ztk.rl.rollout.rewards import Answered, TrainingState

CPU = Machine(gpus=0, cores=2)
TEMPLATE = "{% for message in messages %}<bos>{{ message['role'][0] }}{{ message['content'] }}<eos>{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama with a score, its tokenizer of letters, and a chat template."""
    from transformers import LlamaForSequenceClassification

    path = tmp_path_factory.mktemp("reward")
    torch.manual_seed(2)
    LlamaForSequenceClassification(small.llama_config(num_labels=1)).save_pretrained(path)
    tokenizer = small.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


def by_transformers(folder: Path, *, texts: list[str], adds: bool = True) -> list[float]:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return [
            model(**tokenizer(text, return_tensors="pt", add_special_tokens=adds)).logits[0, 0].item() for text in texts
        ]


def scored(process: Process, *, config: Config, given: Answered) -> list[float]:
    model: Any = open_reward_model(config, process=process.arrange(policies.topology(config)))
    try:
        return model.score(None, answered=given, micro_batch=2).tolist()
    finally:
        model.engine.close()


@pytest.mark.parametrize("stage", [0, 3])
def test_values_equal_transformers(stage, ranks, folder, tmp_path):
    """Of texts and of conversations, in micro-batches with padding."""
    config = config_of("grpo", folder=tmp_path, ranks=2, zero__stage=stage)
    config.reward.path, config.reward.precision = str(folder), None
    answers, prompts = ["c", "defgh", "", "x"], ["ab", "ab", "q", "abcdefghijklm"]
    state = TrainingState(global_step=0, max_steps=1)
    common = {"answers": answers, "token_ids": [[]] * 4, "state": state}
    given = Answered(texts=prompts, records=[{"prompt": text} for text in prompts], is_chat=[False] * 4, **common)
    texts = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    expected = by_transformers(folder, texts=texts)
    for found in ranks(2).run(scored, config=config, given=given):
        assert found == pytest.approx(expected, abs=1e-5) and len(set(expected)) == 4
    records = [{"prompt": [{"role": "user", "content": text}]} for text in prompts]
    given = Answered(texts=prompts, records=records, is_chat=[True] * 4, **common)
    texts = [f"<bos>u{prompt}<eos><bos>a{answer}<eos>" for prompt, answer in zip(prompts, answers, strict=True)]
    expected = by_transformers(folder, texts=texts, adds=False)
    assert ranks(2).run(scored, config=config, given=given)[1] == pytest.approx(expected, abs=1e-5)
    turns = [
        {"role": "assistant", "content": "f"},
        {"role": "tool", "content": "7"},
        {"role": "assistant", "content": "g"},
    ]
    given = replace(given, conversations=[turns] * 4)  # of an environment
    texts = [f"<bos>u{prompt}<eos><bos>af<eos><bos>t7<eos><bos>ag<eos>" for prompt in prompts]
    expected = by_transformers(folder, texts=texts, adds=False)
    assert ranks(2).run(scored, config=config, given=given)[1] == pytest.approx(expected, abs=1e-5)


def test_a_policy_of_bytes_is_rewarded_next_to_a_function(ranks, folder, tmp_path):
    """0.5 times the model's value and once the function's."""
    words = ("rollout.save_completions=true", f"reward.path={folder}", "reward.path_weight=0.5", "train.steps=2")
    run = tmp_path / "run"
    config = config_of("grpo", *words, "rollout.show_every=0", folder=run, ranks=1)
    ranks(1).run(play, config=config)
    records = [json.loads(line) for line in (run / "completions.jsonl").read_text().splitlines()]
    texts = [record["prompt"] + record["answer"] for record in records]
    learned = by_transformers(folder, texts=texts)
    functions = [(sum(record["answer"].encode()) % 7) / 7 for record in records]
    expected = [0.5 * value + own for value, own in zip(learned, functions, strict=True)]
    assert [record["reward"] for record in records] == pytest.approx(expected, abs=1e-5)


def test_a_folder_without_a_score_is_refused(folder, tmp_path):
    small.save_model(tmp_path / "causal")
    with pytest.raises(ConfigError, match="has no tokenizer|no score.weight, so it is no reward model"):
        compose("task=grpo", f"reward.path={tmp_path}/causal", output_dir=str(tmp_path / "run"), machine=CPU)
    config = compose("task=grpo", f"reward.path={folder}", output_dir=str(tmp_path / "run"), machine=CPU)
    assert config.reward.path == str(folder)


def test_texts_and_messages_that_cannot_be_read_are_named(ranks, folder, tmp_path):
    config = config_of("grpo", folder=tmp_path, ranks=1)
    config.reward.path = str(folder)
    common = {"token_ids": [[]], "state": TrainingState(global_step=0, max_steps=1), "answers": ["a" * 70]}
    given = Answered(texts=["p"], records=[{"prompt": "p"}], is_chat=[False], **common)
    with pytest.raises(Exception, match="reads 64 tokens at most, and a text has 71"):
        ranks(1).run(scored, config=config, given=given)
