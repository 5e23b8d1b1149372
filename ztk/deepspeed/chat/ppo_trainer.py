"""`deepspeed_chat.ppo_trainer`: proximal policy optimisation over four engines, with the interface of DeepSpeed-Chat's step 3."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ztk.deepspeed.generation.loop import evaluating, generate
from ztk.rl.align import Packing, PolicyLoss, divergence, generalised_advantages, policy_loss, value_loss
from ztk.rl.rollout.equality import token_logprobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Answers:
    """Sampled answers. tokens: prompts and answers, int64 [B, T]. attention, answer: bool [B, T]. last: index per row, int64 [B]."""

    tokens: Tensor
    attention: Tensor
    answer: Tensor
    last: Tensor


class DeepSpeedPPOTrainer:
    """`generate_experience(prompts)` samples and scores answers; `train_rlhf(experience)` updates actor and critic once with them.

    rlhf_engine: has `actor` and `ref`, engines over a causal transformers model, `critic` and `reward`, engines over a `RewardModel`, and
    `tokenizer`. Actor and critic have optimizers; each engine has its own configuration.
    args: `max_answer_seq_len`, the most tokens of an answer; optionally `compute_fp32_loss` (always on here) and `align_overflow`.

    These attributes may be changed; the defaults are DeepSpeed-Chat's: kl_ctl (factor of the divergence from `ref` in the reward),
    clip_reward_value, cliprange, cliprange_value, gamma, lam. `generation`: further options of transformers' generate. By default, tokens
    are sampled from the unmodified policy (temperature 1), as a policy gradient requires.

    Raises:
        ValueError: args without max_answer_seq_len, a missing model, or a tokenizer without a padding token.
    """

    def __init__(self, rlhf_engine: Any, args: Any) -> None:
        missing = [name for name in ("actor", "ref", "critic", "reward", "tokenizer") if not hasattr(rlhf_engine, name)]
        if missing:
            raise ValueError(
                f"rlhf_engine lacks {', '.join(missing)}: it must hold actor, ref, critic, reward and tokenizer"
            )
        if getattr(args, "max_answer_seq_len", 0) < 1:
            raise ValueError("args.max_answer_seq_len: must be 1 or more, the most tokens of an answer")
        self.rlhf_engine, self.args = rlhf_engine, args
        self.actor_model, self.critic_model = rlhf_engine.actor, rlhf_engine.critic
        self.ref_model, self.reward_model = rlhf_engine.ref, rlhf_engine.reward
        self.tokenizer, self.max_answer_seq_len = rlhf_engine.tokenizer, args.max_answer_seq_len
        if self.tokenizer.pad_token_id is None:
            raise ValueError("tokenizer.pad_token_id is None: set tokenizer.pad_token = tokenizer.eos_token")
        self.kl_ctl, self.clip_reward_value = 0.1, 5.0
        self.cliprange, self.cliprange_value = 0.2, 0.2
        self.gamma, self.lam = 1.0, 0.95
        self.generation: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}

    # Experience

    def generate_experience(
        self, prompts: Tensor, mask: Tensor | None = None, step: int | None = None
    ) -> dict[str, Tensor]:
        """Samples answers to prompts [B, P], padded on the left, and computes the inputs of the update. A collective call.

        mask: the prompts' tokens that count, [B, P]. Defaults to all except the padding in front. step: accepted and ignored.

        Returns prompts, input_ids, attention_mask, answer_mask [B, T], rewards [B], and logprobs, ref_logprobs, value [B, T - 1]; their
        column t belongs to token t + 1. Everything is computed in eval mode, after which the models return to their modes.
        """
        del step
        answers = self._draw(prompts, mask=mask)
        tokens, attention = answers.tokens, answers.attention.long()
        found = {}
        for name, model in (("logprobs", self.actor_model), ("ref_logprobs", self.ref_model)):
            with evaluating(model):
                found[name] = _logprobs(model, tokens=tokens, attention=attention)
        for name, model in (("value", self.critic_model), ("scores", self.reward_model)):
            with evaluating(model):
                found[name] = model(tokens, attention_mask=attention, return_value_only=True).float()
        return {
            "prompts": prompts,
            "input_ids": tokens,
            "attention_mask": attention,
            "answer_mask": answers.answer,
            "logprobs": found["logprobs"],
            "ref_logprobs": found["ref_logprobs"],
            "value": found["value"][:, :-1],
            "rewards": found["scores"].gather(1, answers.last.unsqueeze(1)).squeeze(1),
        }

    def _draw(self, prompts: Tensor, *, mask: Tensor | None) -> Answers:
        pad = self.tokenizer.pad_token_id
        given = (prompts != pad).cumsum(1) > 0 if mask is None else mask.bool()
        tokens = generate(
            self.actor_model,
            prompts,
            attention_mask=given.long(),
            max_new_tokens=self.max_answer_seq_len,
            pad_token_id=pad,
            **self.generation,
        )
        drawn = tokens[:, prompts.shape[1] :]
        stop = torch.isin(drawn, torch.tensor(self._stops(), dtype=drawn.dtype, device=drawn.device))
        answer = stop.cumsum(1) - stop.long() == 0  # up to and including the first end token
        attention = torch.cat([given, answer], dim=1)
        return Answers(
            tokens=tokens,
            attention=attention,
            answer=torch.cat([torch.zeros_like(given), answer], dim=1),
            last=prompts.shape[1] + answer.sum(1) - 1,
        )

    def _stops(self) -> list[int]:
        """Returns the tokens that end an answer: from the generation options, else the model, else the tokenizer."""
        config = getattr(self.actor_model.module, "generation_config", None)
        stops = self.generation.get("eos_token_id", getattr(config, "eos_token_id", None))
        stops = self.tokenizer.eos_token_id if stops is None else stops
        return [] if stops is None else [stops] if isinstance(stops, int) else list(stops)

    # Update

    def train_rlhf(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Updates actor and critic once with the result of `generate_experience`.

        Returns (actor loss, critic loss), scalars without a graph.

        The actor's loss is the clipped one (Schulman et al. 2017, arXiv 1707.06347), averaged over this rank's answer tokens. The
        critic's loss is half the squared error to the returns, also clipped. With `args.align_overflow`, a step that the loss scale of
        one model skips is skipped for the other one too.
        """
        self.train()
        packing = Packing.of(inputs["answer_mask"][:, 1:])
        weights = torch.full((len(packing.places),), 1 / max(1, len(packing.places)), device=packing.places.device)
        advantages, returns = self.advantages_and_returns(inputs)
        tokens, attention = inputs["input_ids"], inputs["attention_mask"]
        actor_loss = policy_loss(
            packing.pack(_logprobs(self.actor_model, tokens=tokens, attention=attention)),
            policy=PolicyLoss(clip_low=self.cliprange, clip_high=self.cliprange),
            old=packing.pack(inputs["logprobs"]),
            advantages=packing.pack(advantages),
            weights=weights,
        ).loss
        self.actor_model.backward(actor_loss)
        aligned = getattr(self.args, "align_overflow", False)
        if not aligned:
            self.actor_model.step()
        values = self.critic_model(tokens, attention_mask=attention, return_value_only=True)[:, :-1].float()
        critic_loss = value_loss(
            packing.pack(values),
            old=packing.pack(inputs["value"]),
            returns=packing.pack(returns),
            clip=self.cliprange_value,
            weights=weights,
        )
        self.critic_model.backward(critic_loss)
        if aligned:
            _skip_together(self.actor_model, self.critic_model)
            self.actor_model.step()
        self.critic_model.step()
        return actor_loss.detach(), critic_loss.detach()

    def advantages_and_returns(self, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns generalised advantages (Schulman et al. 2016, arXiv 1506.02438) and returns of an experience: float32 [B, T - 1] each,
        0 outside the answers.

        The reward of a token is -kl_ctl times the log-ratio to the reference. The last token also gets the clipped reward.
        """
        mask, values = inputs["answer_mask"][:, 1:], inputs["value"]
        kl = divergence(inputs["logprobs"], reference=inputs["ref_logprobs"], old=inputs["logprobs"], estimator="k1")
        rewards = torch.where(mask, -self.kl_ctl * kl, 0.0)
        is_last = mask & (mask.long().flip(1).cumsum(1).flip(1) == 1)
        score = inputs["rewards"].float().clamp(-self.clip_reward_value, self.clip_reward_value)
        rewards = rewards + torch.where(is_last, score.unsqueeze(1), 0.0)
        packing = Packing.of(mask)
        options = {"lengths": packing.lengths, "gamma": self.gamma, "lam": self.lam}
        packed = generalised_advantages(packing.pack(rewards), values=packing.pack(values), **options)
        advantages = packing.unpack(packed, length=mask.shape[1])
        return advantages, torch.where(mask, advantages + values, 0.0)

    # Modes

    def train(self) -> None:
        """Sets actor and critic to train mode."""
        self.actor_model.train()
        self.critic_model.train()

    def eval(self) -> None:
        """Sets all four models to eval mode."""
        for model in (self.actor_model, self.critic_model, self.reward_model, self.ref_model):
            model.eval()


def _logprobs(model: nn.Module, *, tokens: Tensor, attention: Tensor) -> Tensor:
    """Returns float32 [B, T - 1]."""
    logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits
    return token_logprobs(logits, tokens=tokens, temperature=1.0)[:, 1:]


def _skip_together(*models: Any) -> None:
    """Makes every model skip its next step if a gradient of any of them overflowed."""
    overflows = [model.optimizer.check_overflow(external=True) for model in models]
    for model, overflow in zip(models, overflows, strict=True):
        model.optimizer.skip_step = any(overflows) and not overflow
