"""Where rollouts begin: the weights of another run, the rewards of a trained model, prompts of files as texts and as messages."""

import json

import pytest
import torch

from tests.experiments.test_alignment import config_of as config_of_pairs
from tests.experiments.test_alignment import play as play_pairs
from tests.parallel.topology.families import make
from tests.rl.align.chats import PLAIN, save_tokenizer, train_tokenizer
from tests.rl.rollout.runs import config_of, digest_of, play, rows_of
from ztk import checkpoint
from ztk.config import ConfigError, Machine, compose
from ztk.core.policies.rollout import StageName
from ztk.core.runtime import Process
from ztk.data import SubwordTokenizer
from ztk.experiments.models import build, full_values
from ztk.experiments.prompts import Prompts
from ztk.rl.align import ChatTemplate, Encoding, Truncation, fitted, read_prompts
from ztk.rl.rollout import Requests, RolloutPolicy, Samples

SHAPE = (
    "model.layers=2",
    "model.dim=32",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden_dim=64",
    "data.seq_len=16",
)
SAVES = ("checkpoint=periodic", "checkpoint.every=1")
CHAT = [{"role": "system", "content": "be short"}, {"role": "user", "content": "2 + 2 ?"}]


def digest_saved(process: Process, *, config, path: str) -> str:
    """Of all parameters of a checkpoint of a policy."""
    engine = build(config, process=process, is_trained=False)
    checkpoint.load(engine, path=path, weights_only=True)
    found = digest_of(full_values(engine))
    engine.close()
    return found


@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_policy_and_reference_start_from_another_run(ranks, tmp_path, task):
    first, second = tmp_path / "sft", tmp_path / "second"
    learns = (
        "optimizer.lr=0.01",
        "train.steps=30",
        "train.eval_every=0",
        "train.global_batch_size=16",
        "checkpoint.every=30",
    )
    ranks(2).run(play_pairs, configs=[config_of_pairs("sft", *SHAPE, SAVES[0], *learns, folder=first)])
    options = {
        "folder": second,
        "ranks": 2,
        "train__steps": 3,
        "zero__stage": 3,
        "checkpoint__every": 2,
        "warm_start__steps": 0,
    }
    config = config_of(task, "data.seq_len=16", warm_start__path=str(first), **options)
    results = ranks(2).run(play, config=config)
    saved = ranks(2).run(digest_saved, config=config, path=str(first))[0]
    fresh = ranks(2).run(digest_of_seed, config=config)[0]
    assert results[0]["references"][0] == saved != fresh
    rows = rows_of(second)
    assert rows[0]["kl"] == 0 and rows[-1]["kl"] != 0 and all(row["rollout_differing"] == 0 for row in rows)
    third = config_of(task, "data.seq_len=16", **options | {"folder": tmp_path / "third"})
    third.warm_start.path, third.checkpoint.resume = str(first), str(second / "checkpoints" / "step-000002")
    ranks(2).run(play, config=third)
    assert rows_of(tmp_path / "third") == rows[2:]


def digest_of_seed(process: Process, *, config) -> str:
    engine = build(config, process=process, is_trained=False)
    found = digest_of(full_values(engine))
    engine.close()
    return found


def values_by_row(process: Process, *, config, samples: dict) -> list[float]:
    """The model of reward.path at the last token of every answer, each alone, without padding."""
    engine = build(config, process=process, is_trained=False, is_critic=True)
    checkpoint.load(engine, path=config.reward.path, weights_only=True)
    found, drawn = [], Samples.from_json(samples)
    with engine.evaluating():
        for row, length in zip(drawn.tokens, drawn.prompt_lengths + drawn.answer_lengths, strict=True):
            found.append(engine(row[: int(length)].unsqueeze(0))[0, -1, 0].item())
    engine.close()
    return found


def test_a_reward_model_gives_the_rewards_and_the_true_ones_are_shown(ranks, tmp_path):
    first, second = tmp_path / "reward", tmp_path / "second"
    ranks(2).run(play_pairs, configs=[config_of_pairs("reward", *SHAPE, *SAVES, "optimizer.lr=0.01", folder=first)])
    options = {"folder": second, "ranks": 2, "reward__zero": StageName.stage3, "reward__path": str(first)}
    config = config_of("grpo", "data.seq_len=16", **options)
    results = ranks(2).run(play, config=config)
    samples = results[0]["rollouts"][0]
    expected = ranks(1).run(values_by_row, config=config_of("grpo", "data.seq_len=16", **options), samples=samples)[0]
    assert torch.allclose(Samples.from_json(samples).rewards, torch.tensor(expected).double(), atol=1e-5)
    rows = rows_of(second)
    assert all(0 <= row["true_reward"] < 1 for row in rows) and rows[0]["true_reward"] != rows[0]["reward"]
    assert rows[0]["excluded"] == 0 and rows[0]["grad_norm"] > 0


def test_messages_are_written_as_sft_learns_them(tmp_path):
    """By the chat template, whose end ends answers; or, as bytes, in lines of roles."""
    path = save_tokenizer(train_tokenizer(), path=tmp_path / "tokenizer", template=PLAIN)
    file = tmp_path / "chats.jsonl"
    file.write_text(json.dumps({"messages": CHAT, "answer": "4"}) + "\n" + json.dumps({"prompt": CHAT}) + "\n")
    reward = tmp_path / "mine.py"
    reward.write_text("def score(prompt, answer, record):\n    return float(answer == record['answer'])\n")
    given = (
        "task=grpo",
        "rollout.task=null",
        "warm_start.steps=0",
        f"data.path={file}",
        f"reward.function={reward}:score",
    )

    def prompts(*overrides: str) -> Prompts:
        return Prompts(compose(*given, *overrides, output_dir="/run", machine=Machine(gpus=0, cores=2)))

    by_template = prompts(f"data.tokenizer={path}", "data.seq_len=64")
    template = ChatTemplate.open(path)
    tokenizer, asked = SubwordTokenizer.open(path), template.prompt(CHAT)
    assert by_template[0].tokens == by_template[1].tokens == tokenizer.read(asked).tokens
    assert by_template.stops == (tokenizer.token_of("<|im_end|>"),) and by_template[0].text == asked
    drawn = torch.tensor([[5, *tokenizer.read("four").tokens, by_template.stops[0]]])
    policy = RolloutPolicy(length=drawn.shape[1], micro_batch=1, max_tokens=1, stops=by_template.stops, pad=0)
    zero = torch.zeros(1, dtype=torch.int64)
    samples = Requests(prompts=[[5]], numbers=zero, prompt_numbers=zero, copies=zero).begin(policy)
    samples.tokens, samples.answer_lengths, samples.finished = drawn, zero + drawn.shape[1] - 1, zero == 0
    assert by_template.answer_of(samples, row=0) == "four" and by_template.drawn(samples, row=0) == "four<|im_end|>"
    roles = prompts("data.seq_len=64")
    assert bytes(roles[0].tokens).decode() == "<|system|>\nbe short\n<|user|>\n2 + 2 ?\n<|assistant|>\n"
    with pytest.raises(ValueError, match="use data.seq_len=59, shorter prompts, or data.truncate_prompts=left"):
        prompts("data.seq_len=40")
    cut = prompts("data.seq_len=40", "data.truncate_prompts=left")
    assert cut[0].tokens == roles[0].tokens[-32:] and "2 cut to 32" in cut.describe()
    for text, said in (
        (json.dumps({"messages": [*CHAT, {"role": "assistant", "content": "4"}]}), "the last message is an assistant's"),
        (json.dumps({"messages": CHAT}) + "\n" + json.dumps({"prompt": "a"}), "some prompts are texts and some are messages"),
        (json.dumps({"messages": ["a"]}), "message 1: 'a' must be"),
    ):  # fmt: skip
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            prompts(f"data.tokenizer={path}", "data.seq_len=64")


def test_prompts_are_cut_at_either_end(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "abcdef"}\n\n{"prompt": "gh"}\n')
    records = read_prompts([str(tmp_path)], encoding=Encoding())
    for cut, kept in ((Truncation.left, b"def"), (Truncation.right, b"abc")):
        assert [bytes(record.tokens) for record in fitted(records, most=3, seq_len=5, cut=cut)] == [kept, b"gh"]
    with pytest.raises(ValueError, match="rollout.max_tokens=5 leaves no token for a prompt in data.seq_len=5"):
        fitted(records, most=0, seq_len=5, cut=Truncation.left)


def test_lines_are_shuffled_once_per_pass(tmp_path, monkeypatch):
    """Not once per prompt, although an evaluation reads another pass."""
    (tmp_path / "prompts.jsonl").write_text("".join(f'{{"prompt": "{letter}"}}\n' for letter in "abcde"))
    config = config_of("grpo", folder=tmp_path)
    config.rollout.task, config.data.path = None, [str(tmp_path / "prompts.jsonl")]
    prompts = Prompts(config)
    counts, shuffle = [], torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda *given, **options: counts.append(1) or shuffle(*given, **options))
    for _ in range(3):
        seen = [prompts[number].text for number in range(5)]
        held = [prompts[5000 + number].text for number in range(5)]
    assert sorted(seen) == sorted(held) == list("abcde") and len(counts) == 2


def test_first_weights_that_contradict_each_other_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("ztk.checkpoint.adapter_scale", lambda path: 2.0)  # of lora=adapter

    def faults(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            compose("task=grpo", *overrides, output_dir="/run", machine=Machine(gpus=0, cores=2))
        return "\n".join(caught.value.faults)

    assert "use warm_start.steps=0, or leave out warm_start.path" in faults(f"warm_start.path={tmp_path}")
    told = faults(
        "lora=adapter", "kl.reference=lora_off", f"warm_start.path={tmp_path}", "warm_start.steps=0", "reward.path=/no"
    )
    assert "its base is another model; use kl.reference=frozen" in told and "reward.path=/no: no such folder" in told
    assert "data.truncate_prompts=left has no effect here" in faults("data.truncate_prompts=left")


def test_answers_end_by_the_tokens_of_the_models_folder(tmp_path):
    """A model may end an answer by more tokens than its chat template writes."""
    make("Llama", vocab_size=300, max_position_embeddings=128).save_pretrained(tmp_path / "model")
    save_tokenizer(train_tokenizer(), path=tmp_path / "model", template=PLAIN)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 7], "temperature": 0.2}))
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": CHAT}) + "\n")
    (tmp_path / "mine.py").write_text("def score(prompt, answer, record):\n    return 0.0\n")
    config = compose(
        *("task=grpo", "model=hf", f"model.path={tmp_path / 'model'}", "warm_start.steps=0", "rollout.task=null"),
        *(
            f"data.path={tmp_path / 'chats.jsonl'}",
            f"reward.function={tmp_path / 'mine.py'}:score",
            "data.seq_len=64",
            "rollout.max_tokens=16",
        ),
        output_dir="/run",
        machine=Machine(gpus=0, cores=2),
    )
    tokenizer = SubwordTokenizer.open(tmp_path / "model")
    assert Prompts(config).stops == (tokenizer.token_of("<|im_end|>"), 5, 7)
    assert config.rollout.temperature == 1.0  # the trainer's distribution
