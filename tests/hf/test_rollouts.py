"""task=reward, grpo and ppo with a model of transformers: losses of plain transformers and AdamW, the trainer's bits in every layout."""

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.experiments.test_alignment import laid_out, losses_of
from tests.experiments.test_alignment import play as play_pairs
from tests.hf import small
from tests.hf.policies import ADAPTERS, config_of, save_policy
from tests.hf.test_dpo import LEARNING, PAIRS, RELATIVE, config_seed, plain
from tests.hf.test_dpo import config_of as config_of_pairs
from tests.rl.rollout.runs import play, rows_of
from ztk.checkpoint.export import export_adapter, export_safetensors
from ztk.config import ConfigError
from ztk.core.policies.model import LoraPolicy
from ztk.experiments.prompts import PAD
from ztk.hf.scoring import open_scoring
from ztk.rl.rollout import Samples

CLIP = 0.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_policy(tmp_path_factory.mktemp("model"))


def optimizer_of(model: torch.nn.Module, **changes) -> torch.optim.Optimizer:
    named = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norms = {"params": [parameter for parameter in named if parameter.dim() == 1], "weight_decay": 0.0}  # as ztk does
    matrices = {"params": [parameter for parameter in named if parameter.dim() > 1]}
    return torch.optim.AdamW([matrices, norms], **LEARNING | changes)


def valued(folder: Path) -> torch.nn.Module:
    """transformers' own model with one label, and ztk's first values of its head."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    _, values = open_scoring(str(folder), init="pretrained", seed=config_seed(folder))
    with torch.no_grad():
        model.score.weight.copy_(values(name="score.weight", start=0, stop=small.WIDTH).view(1, -1))
    return model


def values_by(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model.score(model.model(input_ids=tokens)[0]).squeeze(-1)


def padded(found: torch.Tensor) -> torch.Tensor:
    """Of the token that follows: [S, T - 1] -> [S, T]."""
    return F.pad(found, (1, 0))


def logprobs_by(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    found = F.log_softmax(model(input_ids=tokens).logits[:, :-1].float(), dim=-1)
    return padded(found.gather(-1, tokens[:, 1:, None]).squeeze(-1))


def clipped_loss(logprobs, *, old, advantages, mask) -> torch.Tensor:
    ratio = (logprobs - old).exp()
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return (losses * mask).sum() / mask.sum()


# The same numbers


def test_grpo_has_the_losses_of_plain_transformers(ranks, folder, tmp_path):
    """Two rollouts of two steps each, replayed with the texts that were drawn. Texts are packed."""
    config = config_of("grpo", "rollout.identity=corrected", folder=folder, to=tmp_path, ranks=1)
    found = ranks(1).run(play, config=config)[0]
    rows, model = rows_of(tmp_path), plain(folder)
    optimizer, expected = optimizer_of(model), []
    for rollout in map(Samples.from_json, found["rollouts"]):
        rewards = rollout.rewards.view(-1, 4)[rollout.numbers // 4 - rollout.numbers.min() // 4]
        deviation = rewards.std(1) + 1e-4
        advantages = ((rollout.rewards - rewards.mean(1)) / deviation).float()[:, None]
        with torch.no_grad():
            old = logprobs_by(model, rollout.tokens)
        assert torch.allclose(old * rollout.answer_mask, rollout.logprobs, atol=1e-5)
        for part in (slice(0, 8), slice(8, 16)):
            mask = rollout.answer_mask[part]
            loss = clipped_loss(
                logprobs_by(model, rollout.tokens[part]), old=old[part], advantages=advantages[part], mask=mask
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            expected.append(float(loss.detach()))
    assert [row["loss"] for row in rows] == pytest.approx(expected, abs=1e-5)
    assert all(row["rollout_outside"] == 0 for row in rows) and rows[-1]["kl"] > 0
    assert len({len(row) for rollout in found["rollouts"] for row in Samples.from_json(rollout).tokens}) == 1


def test_ppo_has_the_losses_of_plain_transformers(ranks, folder, tmp_path):
    """The first rollout's two steps: critic and policy, without a divergence in the reward (it is 0 at first)."""
    config = config_of("ppo", "train.steps=2", "critic.lr=3e-3", folder=folder, to=tmp_path, ranks=1)
    found = ranks(1).run(play, config=config)[0]
    rows, model, critic = rows_of(tmp_path), plain(folder), valued(folder)
    optimizers, expected = (optimizer_of(model), optimizer_of(critic)), []
    samples = Samples.from_json(found["rollouts"][0])
    mask = samples.answer_mask
    with torch.no_grad():
        old, values = logprobs_by(model, samples.tokens), padded(values_by(critic, samples.tokens)[:, :-1]) * mask
    advantages = torch.zeros_like(values)
    for row in range(len(samples)):
        first, count = int(samples.prompt_lengths[row]), int(samples.answer_lengths[row])
        following = after = 0.0
        for place in reversed(range(first, first + count)):
            reward = float(samples.rewards[row]) if place == first + count - 1 else 0.0
            delta = reward + after - float(values[row, place])
            following = delta + 0.95 * following
            advantages[row, place], after = following, float(values[row, place])
    returns = advantages + values
    kept = advantages[mask]
    advantages = (advantages - kept.mean()) / (kept.std(unbiased=False) + 1e-8)
    for part in (slice(0, 8), slice(8, 16)):
        now = padded(values_by(critic, samples.tokens[part])[:, :-1])
        near = values[part] + (now - values[part]).clamp(-CLIP, CLIP)
        errors = torch.maximum((now - returns[part]).square(), (near - returns[part]).square()) / 2
        critic_loss = (errors * mask[part]).sum() / mask[part].sum()
        loss = clipped_loss(
            logprobs_by(model, samples.tokens[part]), old=old[part], advantages=advantages[part], mask=mask[part]
        )
        for one, optimizer in zip((loss, critic_loss), optimizers, strict=True):
            one.backward()
            optimizer.step()
            optimizer.zero_grad()
        expected.append((float(loss.detach()), float(critic_loss.detach())))
    assert [row["critic_loss"] for row in rows] == pytest.approx([pair[1] for pair in expected], abs=1e-5)
    assert [row["loss"] for row in rows] == pytest.approx([pair[0] for pair in expected], abs=1e-5)


@pytest.mark.parametrize("kind", ["full", "adapters"])
def test_reward_models_have_the_losses_of_plain_transformers(ranks, folder, tmp_path, kind):
    """Its first loss with adapters, too: they add nothing yet. The exported model is transformers' own."""
    options = ("train.steps=1", *ADAPTERS) if kind == "adapters" else ()
    config = config_of_pairs(
        *options,
        "checkpoint=periodic",
        "checkpoint.every=1",
        folder=folder,
        to=tmp_path / "run",
        ranks=1,
        task="reward",
    )
    ranks(1).run(play_pairs, configs=[config])
    model, encode = valued(folder), small.tokenizer().encode
    optimizer, expected = optimizer_of(model), []
    for _ in range(1 if options else 4):
        loss = torch.zeros(())
        for prompt, *answers in PAIRS:
            texts = [torch.tensor([[*encode(prompt), *encode(answer), small.EOS]]) for answer in answers]
            chosen, rejected = (values_by(model, text)[0, -1] for text in texts)
            loss = loss - F.logsigmoid(chosen - rejected) / len(PAIRS)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    assert losses_of(tmp_path / "run") == pytest.approx(expected, rel=RELATIVE)
    tokens = torch.arange(2, 10)[None]
    if options:
        export_adapter(tmp_path / "run", to=tmp_path / "out")
        from peft import PeftModel
        from transformers import AutoModelForSequenceClassification

        base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, pad_token_id=PAD)
        before = base(input_ids=tokens).logits
        trained = PeftModel.from_pretrained(base, tmp_path / "out")
        assert trained.base_model.model.score.modules_to_save["default"].weight.abs().sum() > 0
        assert not torch.equal(trained(input_ids=tokens).logits, before)
        return
    export_safetensors(tmp_path / "run", to=tmp_path / "out")
    from transformers import AutoModelForSequenceClassification

    exported, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and exported.config.num_labels == 1
    assert torch.allclose(values_by(exported, tokens), values_by(model, tokens), atol=1e-3)  # weights after four steps


# The trainer's bits


@pytest.mark.parametrize(
    ("task", "options"),
    [("grpo", ()), ("grpo", (*ADAPTERS, "kl.reference=lora_off")), ("ppo", ADAPTERS)],
    ids=["grpo", "grpo, adapters", "ppo, adapters"],
)
def test_rollouts_have_the_trainers_bits_at_every_stage(ranks, folder, tmp_path, task, options):
    """Texts, rewards and losses have the same bits; with adapters, so do all references."""
    first = config_of(task, *options, "rollout.identity=exact", folder=folder, to=tmp_path / "first")
    configs = [first]
    for stage, tier in ((0, "cpu"), (3, "cpu")):
        config = laid_out(copy.deepcopy(first), stage, tier)
        if "kl.reference=lora_off" in options and stage == 3:
            config.kl.reference = type(config.kl.reference)("frozen")
        config.output_dir = str(tmp_path / f"{stage}{tier}")
        Path(config.output_dir).mkdir()
        configs.append(config)
    for config in configs:
        ranks(2).run(play, config=config)
    expected = rows_of(Path(configs[0].output_dir))
    assert all(row["rollout_differing"] == 0 for row in expected) and expected[-1]["kl"] != 0
    for config in configs[1:]:
        assert rows_of(Path(config.output_dir)) == expected, config.output_dir


def test_a_resumed_run_with_adapters_equals_one_that_was_not_interrupted(ranks, folder, tmp_path):
    """In the middle of a rollout. The base is in no checkpoint."""
    options = (*ADAPTERS, "checkpoint=periodic", "checkpoint.every=1", "checkpoint.keep=9", "zero=stage3")
    full = config_of("grpo", *options, folder=folder, to=tmp_path / "full")
    ranks(2).run(play, config=full)
    resumed = copy.deepcopy(full)
    resumed.output_dir, resumed.checkpoint.resume = (
        str(tmp_path / "resumed"),
        str(tmp_path / "full" / "checkpoints" / "step-000003"),
    )
    Path(resumed.output_dir).mkdir()
    ranks(2).run(play, config=resumed)
    assert rows_of(tmp_path / "resumed") == rows_of(tmp_path / "full")[3:]
    assert not (tmp_path / "full" / "reference").exists()
    assert (tmp_path / "full" / "tokenizer" / "tokenizer.json").is_file()


def test_adapters_of_another_run_are_part_of_the_reference(ranks, folder, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    saves = ("checkpoint=periodic", "checkpoint.every=1")
    ranks(1).run(play, config=config_of("grpo", *ADAPTERS, *saves, folder=folder, to=first, ranks=1))
    start = (f"warm_start.path={first}", "train.steps=3", "rollout.identity=exact", *saves)
    config = config_of("grpo", *ADAPTERS, *start, folder=folder, to=second, ranks=1)
    ranks(1).run(play, config=config)
    assert rows_of(first)[-1]["kl"] != 0 == rows_of(second)[0]["kl"]
    assert (second / "reference").is_dir()  # a run that goes on needs those adapters


# Refusals


@pytest.mark.parametrize(
    ("task", "overrides", "says"),
    [
        ("grpo", ("data.tokenizer=bytes",), "not in bytes: leave data.tokenizer out"),
        ("grpo", ("kl.reference=lora_off",), "kl.reference=lora_off: .* use lora=adapter, or kl.reference=frozen"),
        (
            "ppo",
            (*ADAPTERS, "lora.dropout=0.1", "rollout.identity=exact"),
            "lora.dropout=0.1: .* use rollout.identity=corrected or off, or lora.dropout=0",
        ),
        ("grpo", ("topology=sp2",), "topology.sequence: task=grpo gives models of transformers full sequences"),
    ],
)
def test_what_does_not_run_is_refused(folder, tmp_path, task, overrides, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        config_of(task, *overrides, folder=folder, to=tmp_path)


def test_dropout_of_the_model_is_refused_where_bits_are_promised(folder, tmp_path):
    config = json.loads((folder / "config.json").read_text()) | {"attention_dropout": 0.1}
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError,
        match="attention_dropout=0.1 in its config.json.* use rollout.identity=corrected or off, or 0 there",
    ):
        config_of("grpo", "rollout.identity=exact", folder=tmp_path, to=tmp_path / "run")
    assert config_of("grpo", folder=tmp_path, to=tmp_path / "run").rollout.identity == "corrected"


def test_a_family_without_a_model_of_values_is_named(tmp_path):
    from transformers import BertConfig

    BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32).save_pretrained(
        tmp_path
    )
    with pytest.raises(ValueError, match="no linear layer 'score' over its tokens, so it is no decoder"):
        open_scoring(str(tmp_path), init="random", seed=1, lora=LoraPolicy(rank=2, alpha=2.0, targets=("all-linear",)))
