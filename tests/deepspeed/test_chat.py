"""`deepspeed_chat`: rewards at the right tokens, and the update against sums written out. tests/documents/test_002_chat.py trains by it."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ztk.deepspeed.chat import DeepSpeedPPOTrainer, RewardModel, compute_reward_loss
from ztk.deepspeed.chat.ppo_trainer import _logprobs
from ztk.deepspeed.names.finder import Finder

PAD, END = 0, 1
TOKENIZER = SimpleNamespace(pad_token_id=PAD, eos_token_id=END)


class Body(nn.Module):
    """Hidden states from a table, and logits where it stands for a language model."""

    def __init__(self, *, has_logits: bool = False) -> None:
        super().__init__()
        self.config, self.has_logits = SimpleNamespace(hidden_size=8), has_logits
        self.table = nn.Embedding(16, 8 if not has_logits else 16)

    def forward(self, input_ids, attention_mask=None, use_cache=None):
        found = self.table(input_ids)
        return SimpleNamespace(logits=found) if self.has_logits else (found,)


class Plain(nn.Module):
    """An engine that only counts."""

    def __init__(self, module: nn.Module, *, overflow: bool = False) -> None:
        super().__init__()
        self.module, self.steps, self.losses = module, [], []
        self.optimizer = SimpleNamespace(check_overflow=lambda external: overflow, skip_step=False)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def backward(self, loss):
        self.losses.append(loss.detach())

    def step(self):
        self.steps.append(self.optimizer.skip_step)


def four(**args) -> DeepSpeedPPOTrainer:
    torch.manual_seed(0)
    actor, ref = Body(has_logits=True), Body(has_logits=True)
    overflow = args.pop("actor_overflow", False)
    engines = {
        "actor": Plain(actor, overflow=overflow),
        "ref": Plain(ref),
        "critic": Plain(RewardModel(Body(), TOKENIZER)),
        "reward": Plain(RewardModel(Body(), TOKENIZER)),
    }
    holder = SimpleNamespace(**engines, tokenizer=TOKENIZER)
    return DeepSpeedPPOTrainer(rlhf_engine=holder, args=SimpleNamespace(max_answer_seq_len=4, **args))


def experience(trainer: DeepSpeedPPOTrainer) -> dict[str, torch.Tensor]:
    """Prompts of three tokens, the second padded in front; answers of four tokens, and of two that end early."""
    tokens = torch.tensor([[3, 4, 5, 6, 7, 8, 9], [PAD, 4, 5, 6, END, PAD, PAD]])
    answer = torch.zeros_like(tokens, dtype=torch.bool)
    answer[0, 3:], answer[1, 3:5] = True, True
    with torch.no_grad():
        logprobs = _logprobs(trainer.actor_model, tokens=tokens, attention=tokens)
        ref = _logprobs(trainer.ref_model, tokens=tokens, attention=tokens)
        value = trainer.critic_model(tokens, return_value_only=True)[:, :-1]
    return {
        "input_ids": tokens,
        "attention_mask": (tokens != PAD).long(),
        "answer_mask": answer,
        "logprobs": logprobs,
        "ref_logprobs": ref,
        "value": value,
        "rewards": torch.tensor([2.0, -9.0]),
    }


def test_the_reward_is_that_of_the_last_token():
    model = RewardModel(Body(), TOKENIZER)
    texts = torch.tensor([[5, 6, 7, PAD, PAD], [5, 6, 7, 8, 9], [5, PAD, PAD, PAD, PAD]])
    values = model(texts, return_value_only=True)
    assert model(texts).equal(values[torch.arange(3), torch.tensor([2, 4, 0])])
    assert model.forward_value(texts)["chosen_end_scores"].equal(model(texts))
    prompts = torch.tensor([[PAD, PAD, 5, 6, PAD], [PAD, 4, 5, 6, 7]])
    values = model(prompts, return_value_only=True)
    assert model(prompts, prompt_length=3).equal(values[torch.arange(2), torch.tensor([3, 4])])


def test_padding_at_the_beginning_does_not_end_a_row():
    model = RewardModel(Body(), TOKENIZER, num_padding_at_beginning=1)
    texts = torch.tensor([[PAD, 6, 7, PAD, PAD], [PAD, 6, 7, 8, 9]])
    assert model(texts).equal(model(texts, return_value_only=True)[torch.arange(2), torch.tensor([2, 4])])
    with pytest.raises(ValueError, match="nothing but padding"):
        RewardModel(Body(), TOKENIZER)(texts)


def test_what_a_reward_model_cannot_take():
    with pytest.raises(ValueError, match="set tokenizer.pad_token = tokenizer.eos_token"):
        RewardModel(Body(), SimpleNamespace(pad_token_id=None))
    with pytest.raises(ValueError, match=r"pass the language model itself.*get_base_model"):
        wide = Body()
        wide.table = nn.Embedding(16, 9)
        RewardModel(wide, TOKENIZER)(torch.tensor([[3, 4]]))


def test_the_pairs_loss_stays_finite():
    far = nn.Module()
    far.forward = lambda ids: ids.double().sum(1) * 250  # differences of -500
    loss = compute_reward_loss(far, torch.tensor([[1], [3]]), torch.tensor([[3], [3]]))
    assert float(loss) == pytest.approx((500 + 0.6931471805599453) / 2)


def test_advantages_are_the_sums_written_out():
    """Rewards -0.1 times the log-ratio and the clipped score at the end; discounted sums of the errors, token by token."""
    trainer = four()
    given = experience(trainer)
    advantages, returns = trainer.advantages_and_returns(given)
    for row, (length, score) in enumerate(((4, 2.0), (2, -5.0))):
        columns = range(2, 2 + length)  # the answer begins at token 3, whose column is 2
        reward = {t: -0.1 * float(given["logprobs"][row, t] - given["ref_logprobs"][row, t]) for t in columns}
        reward[columns[-1]] += score
        value = {t: float(given["value"][row, t]) for t in columns} | {columns[-1] + 1: 0.0}
        error = {t: reward[t] + value[t + 1] - value[t] for t in columns}
        for t in columns:
            expected = sum(0.95 ** (later - t) * error[later] for later in columns if later >= t)
            assert float(advantages[row, t]) == pytest.approx(
                expected, abs=1e-5
            )  # sums of four float32 numbers below 10
            assert float(returns[row, t]) == pytest.approx(expected + value[t], abs=1e-5)
    assert not advantages[~given["answer_mask"][:, 1:]].any()


def test_the_first_update_has_the_ratio_one():
    trainer = four()
    given = experience(trainer)
    advantages, returns = trainer.advantages_and_returns(given)
    mask = given["answer_mask"][:, 1:]
    actor_loss, critic_loss = trainer.train_rlhf(given)
    assert float(actor_loss) == pytest.approx(-float(advantages[mask].mean()), abs=1e-5)
    assert float(critic_loss) == pytest.approx(float((given["value"] - returns)[mask].square().mean()) / 2, rel=1e-5)
    assert trainer.actor_model.losses == [actor_loss] and trainer.critic_model.losses == [critic_loss]


@pytest.mark.parametrize("overflow", [False, True])
def test_with_align_overflow_both_skip(overflow):
    trainer = four(align_overflow=True, actor_overflow=overflow)
    trainer.train_rlhf(experience(trainer))
    assert trainer.actor_model.steps == [False] and trainer.critic_model.steps == [overflow]


def test_what_a_trainer_needs():
    with pytest.raises(ValueError, match="rlhf_engine lacks reward, tokenizer"):
        DeepSpeedPPOTrainer(SimpleNamespace(actor=1, ref=1, critic=1), SimpleNamespace(max_answer_seq_len=4))
    with pytest.raises(ValueError, match=r"args.max_answer_seq_len: must be 1 or more"):
        holder = SimpleNamespace(**dict.fromkeys(("actor", "ref", "critic", "reward")), tokenizer=TOKENIZER)
        DeepSpeedPPOTrainer(holder, SimpleNamespace())


def test_a_package_of_the_scripts_own_is_not_replaced(tmp_path, monkeypatch):
    assert Finder().find_spec("deepspeed_chat.reward_model") is not None
    (tmp_path / "deepspeed_chat").mkdir()
    (tmp_path / "deepspeed_chat" / "__init__.py").write_text("")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert Finder().find_spec("deepspeed_chat") is None and Finder().find_spec("deepspeed_chat.reward_model") is None
    assert Finder().find_spec("deepspeed.utils") is not None
