"""The parts of `task=grpo` and `task=ppo` that are the same: drawing, scoring, measuring, the policy's update."""

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from experiments.alignment import start_from
from experiments.answer_losses import losses_of
from experiments.learned_reward import learned_rewards, open_reward_model
from experiments.models import Values, build
from experiments.prompts import PAD, Prompt, Prompts
from experiments.reference import BaseModel
from ztk.align import Packing, PolicyLoss, divergence, equal_groups, importance_weights, token_weights
from ztk.config import Config
from ztk.engine import Engine
from ztk.inference.sample import fp32_logprobs
from ztk.rollout import (
    Buffer,
    CachedRollouts,
    GuardPolicy,
    Guards,
    Layout,
    Requests,
    RolloutMismatch,
    RolloutPolicy,
    RolloutWeights,
    Samples,
    SettledWeights,
    can_pack,
    compare,
    first_layer,
    generate,
    large_answers,
    lay_out,
    pack_exactly,
    settle_weights,
    share_of_rank,
    states_away,
    use_cached_attention,
)
from ztk.runtime import Process
from ztk.runtime.comm import connect_groups

EVALUATED = 4  # rollouts, before the first step and after the last
UNTRAINED = 2**40  # the number of the first prompt to evaluate with
# What the ranks tell each other of every sample, float64 each.
COLUMNS = ("number", "prompt", "reward", "included", "kl", "penalty", "length", "finished")


@dataclass(kw_only=True)
class Run:
    """What a run goes on with.

    weights: how a rollout sees parameters. packs: policy and reference take texts without padding. reward_model: of reward.path. cached: draws
    for rollout.engine=generator. rollouts: those made. metrics: of the newest one. reward_before: the mean reward before the first step.
    function_rewards: what the function gives this rank's newest samples beside a reward model, float64 [S], NaN for None.
    """

    config: Config
    process: Process
    actor: Engine
    reference: Engine | BaseModel | None
    critic: Engine | None
    prompts: Prompts
    buffer: Buffer
    guards: Guards
    weights: SettledWeights
    packs: bool
    reward_model: Engine | None = None
    cached: CachedRollouts | None = None
    function_rewards: Tensor | None = None
    rollouts: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    reward_before: float | None = None

    def close(self) -> None:
        """Ends all engines."""
        for engine in (self.actor, self.reference, self.critic, self.reward_model):
            if isinstance(engine, Engine):
                engine.close()

    def state_dict(self) -> dict[str, Any]:
        """A JSON value, the same on all ranks. A collective call."""
        return {
            "rollouts": self.rollouts,
            "metrics": self.metrics,
            "reward_before": self.reward_before,
            "guards": self.guards.state_dict(),
            "buffer": self.buffer.state_dict(gather=self.process.comm.gather_objects),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken. Raises ValueError if these ranks cannot divide the rollout."""
        self.rollouts, self.metrics = state["rollouts"], dict(state["metrics"])
        self.reward_before = state["reward_before"]
        self.guards.load_state_dict(state["guards"])
        self.buffer.load_state_dict(state["buffer"], rank=self.process.rank, world_size=self.process.world_size)


def open_run(
    config: Config, *, process: Process, prompts: Prompts, first_values: Values | None, lr_table: Tensor
) -> Run:
    """The models, with the same first weights, and an empty buffer. Raises CheckpointError for warm_start.path and reward.path."""
    common = {"process": process, "values": first_values}
    has_critic = config.advantage.baseline == "critic"
    samples = config.rollout.prompts * config.rollout.group_size
    actor = build(config, lr_table=lr_table, **common)
    start_from(config, engine=actor)
    critic = (
        build(config, lr=config.critic.lr, lr_table=lr_table, is_critic=True, strategy=config.critic, **common)
        if has_critic
        else None
    )
    if critic is not None:
        start_from(config, engine=critic, body_only=True)
    reference = open_reference(config, actor=actor, first_values=first_values)
    return Run(
        config=config,
        process=process,
        actor=actor,
        reference=reference,
        critic=critic,
        reward_model=open_reward_model(config, process=process),
        prompts=prompts,
        buffer=Buffer(updates=samples // config.train.global_batch_size),
        cached=open_cached(config, actor=actor),
        weights=open_weights(config, actor=actor),
        packs=open_packs(config, actor=actor, reference=reference),
        guards=Guards(GuardPolicy(kl_above=config.kl.stop_above, entropy_below=config.rollout.stop_entropy_below)),
    )


def open_packs(config: Config, *, actor: Engine, reference: Engine | BaseModel | None) -> bool:
    """Whether texts are packed: where that changes no bit on any rank, and without rollout.identity=exact of all models that take it. A
    collective call."""
    modules = [engine.module for engine in (actor, reference) if isinstance(engine, Engine)]
    process, is_exact = actor.process, config.rollout.identity == "exact"
    own = torch.tensor([float(pack_exactly(*modules, device=process.device))], device=process.device)
    packs = bool(process.comm.gather_scalars(own, label="packs").all())  # processors may differ
    if config.rollout.engine == "generator" and is_exact and not packs:
        for module in modules:
            use_cached_attention(module)
    return packs or (not is_exact and all(map(can_pack, modules)))


def open_cached(config: Config, *, actor: Engine) -> CachedRollouts | None:
    """What draws for rollout.engine=generator: a copy of the weights per `rollout.tensor` neighbours. A collective call."""
    if config.rollout.engine != "generator":
        return None
    size, process = config.rollout.tensor or 1, actor.process
    if size == 1:
        return CachedRollouts(actor)
    groups = [tuple(range(first, first + size)) for first in range(0, process.world_size, size)]
    options = {"local_world_size": process.local_world_size, "timeout_seconds": process.timeout_seconds}
    return CachedRollouts(actor, comm=connect_groups(groups, device=process.device, **options))


def open_weights(config: Config, *, actor: Engine) -> SettledWeights:
    """What `rollout.weights` asks for, `auto` decided. A collective call."""
    name = config.rollout.weights
    if name is not None and name.value == "auto":
        return settle_weights(actor)
    if name is None:
        return SettledWeights(
            weights=RolloutWeights.whole, reason="parameters are not sharded, or not read by forwards"
        )
    return SettledWeights(weights=RolloutWeights(name.value), reason="it was given")


def open_reference(config: Config, *, actor: Engine, first_values: Values | None) -> Engine | BaseModel | None:
    """What `kl.reference` names. New adapters add nothing, so the reference is the base alone; those of `warm_start.path` are part of it."""
    if config.kl.reference == "frozen":
        options = {
            "is_trained": False,
            "has_adapters": config.warm_start.path is not None,
            "strategy": config.reference,
        }
        reference = build(config, process=actor.process, values=first_values, **options)
        start_from(config, engine=reference)
        return reference
    return BaseModel(actor) if config.kl.reference == "lora_off" else None


# A rollout


def drawing(run: Run) -> AbstractContextManager[None]:
    """Inside, what only updates read is off the device. The inference engine's copy of the weights may be made from master weights."""
    return nullcontext() if run.cached is not None else states_away(run.actor, *([run.critic] if run.critic else []))


def draw(run: Run, *, first_prompt: int | None = None) -> Samples:
    """This rank's samples of a rollout, with rewards. first_prompt: the number of its first prompt; None: the next one of the run.

    Raises RewardError.
    """
    config, rollout = run.config, run.config.rollout
    numbers = share_of_rank(
        updates=run.buffer.updates,
        per_update=config.train.global_batch_size,
        rank=run.process.rank,
        world_size=run.process.world_size,
    )
    first = run.rollouts * rollout.prompts if first_prompt is None else first_prompt
    prompt_numbers = first + numbers // rollout.group_size
    prompts = [run.prompts[int(number)] for number in prompt_numbers]
    requests = Requests(
        prompts=[prompt.tokens for prompt in prompts],
        numbers=numbers,
        prompt_numbers=prompt_numbers,
        copies=numbers % rollout.group_size,
    )
    policy = RolloutPolicy(
        length=config.data.seq_len,
        micro_batch=config.train.micro_batch_size,
        max_tokens=rollout.max_tokens,
        stop=run.prompts.stop,
        pad=PAD,
        temperature=rollout.temperature,
        seed=config.train.seed,
        weights=run.weights.weights,
        packs=run.packs,
    )
    options = {"policy": policy, "requests": requests, "step": run.rollouts}
    samples = generate(run.actor, **options) if run.cached is None else run.cached.generate(**options)
    reward(run, samples=samples, prompts=prompts)
    return samples


def reward(run: Run, *, samples: Samples, prompts: list[Prompt]) -> None:
    """Writes the rewards of the function, or of the reward model, beside which the function's are shown. Raises RewardError."""
    found = [None] * len(samples)
    if run.prompts.has_function:
        found = [
            run.prompts.score(prompt, answer=run.prompts.answer_of(samples, row=row))
            for row, prompt in enumerate(prompts)
        ]
    rewards = torch.tensor([math.nan if value is None else value for value in found], dtype=torch.float64)
    if run.reward_model is None:
        samples.rewards, samples.included = rewards.nan_to_num(), ~rewards.isnan()
        return
    size = run.config.train.micro_batch_size
    samples.rewards = learned_rewards(run.reward_model, samples=samples, micro_batch=size)
    run.function_rewards = rewards if run.prompts.has_function else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The mean reward of sampled answers, and their mean divergence from the reference in nats; None without a reference."""

    reward: float
    kl: float | None


def evaluate(run: Run) -> Evaluated:
    """Of `EVALUATED` rollouts with draws of their own, over all ranks."""
    rewards, kl = [], []
    with drawing(run):
        for number in range(EVALUATED):
            samples = draw(run, first_prompt=UNTRAINED + number * run.config.rollout.prompts)
            scored = score_samples(run, samples=samples)
            rewards.append(scored.table["reward"][scored.included])
            kl.append(scored.table["kl"])
    found = torch.cat(rewards)
    return Evaluated(
        reward=found.mean().item() if len(found) else 0.0,
        kl=None if run.reference is None else torch.cat(kl).mean().item(),
    )


def logprobs_of(engine: Engine | BaseModel | None, *, run: Run, samples: Samples) -> Tensor | None:
    """What `engine` gives the tokens of `samples`, float32 [S, T], without gradients; None without an engine."""
    if engine is None:
        return None
    parts, length, temperature = [], samples.tokens.shape[1], run.config.rollout.temperature
    with engine.evaluating():
        for rows in micro_batches(run, samples=samples):
            batch = samples[rows]
            layout = layout_of(run, samples=batch)
            places = layout.places(batch.answer_mask)
            if (large := large_answers(engine, rows=len(batch), length=length)) is not None:
                found = large.logprobs(layout, places=places, temperature=temperature)
            else:
                logits = layout.forward(engine).flatten(0, 1).index_select(0, places - 1)
                chosen = layout.tokens.flatten().index_select(0, places).unsqueeze(1)
                found = fp32_logprobs(logits, temperature=temperature).gather(1, chosen).squeeze(1)
            parts.append(found.cpu())
    return Packing.of(samples.answer_mask).unpack(torch.cat(parts), length=length)


def layout_of(run: Run, *, samples: Samples) -> Layout:
    """A micro-batch for a forward of policy or reference."""
    module = run.actor.module if run.packs else None
    return lay_out(samples.tokens, lengths=samples.lengths, packs=run.packs, device=run.process.device, module=module)


def micro_batches(run: Run, *, samples: Samples) -> Iterator[slice]:
    """The rows of each forward: the same for rollout, scoring and training."""
    size = run.config.train.micro_batch_size
    yield from (slice(first, first + size) for first in range(0, len(samples), size))


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """This rank's samples of a rollout, and what is known of those of all ranks.

    reference: log-probabilities of the reference, float32 [S, T]. kl: nats per answer, [S]. penalty: what kl.place=reward takes from the reward
    of every token, [S, T]. None without a reference, the last one also for kl.place=loss. table: `COLUMNS` of all ranks' samples in the order
    of their numbers, float64 [samples of the rollout].
    """

    samples: Samples
    reference: Tensor | None
    kl: Tensor | None
    penalty: Tensor | None
    table: Mapping[str, Tensor]

    @property
    def groups(self) -> Tensor:
        """The prompt's number of every sample of all ranks, int64."""
        return self.table["prompt"].long()

    @property
    def included(self) -> Tensor:
        """Whether a sample of all ranks has a reward, bool."""
        return self.table["included"].bool()

    @property
    def equal_groups(self) -> Tensor:
        """Whether all samples of the same prompt have the same reward, bool, over all ranks."""
        return equal_groups(self.table["reward"], groups=self.groups, included=self.included)


def score_samples(run: Run, *, samples: Samples) -> Scored:
    """Compares the policy with the reference, and gathers what the ranks tell each other. A collective call."""
    kl, reference = run.config.kl, logprobs_of(run.reference, run=run, samples=samples)
    nats = penalty = None
    if reference is not None:
        mask = samples.answer_mask
        nats = ((samples.logprobs - reference) * mask).sum(1)
        if kl.coef and kl.place == "reward":
            estimator = kl.estimator.value
            penalty = divergence(samples.logprobs, reference=reference, old=samples.logprobs, estimator=estimator)
            penalty = kl.coef * penalty * mask
    table = table_of(run, samples=samples, kl=nats, penalty=None if penalty is None else penalty.sum(1))
    return Scored(samples=samples, reference=reference, kl=nats, penalty=penalty, table=table)


def table_of(
    run: Run, *, samples: Samples, kl: Tensor | None = None, penalty: Tensor | None = None
) -> dict[str, Tensor]:
    """See `Scored`. kl, penalty: per answer, [S]; None: zeros."""
    nothing = torch.zeros(len(samples), dtype=torch.float64)
    own = torch.stack(
        [
            samples.numbers.double(),
            samples.prompts.double(),
            samples.rewards,
            samples.included.double(),
            nothing if kl is None else kl.double(),
            nothing if penalty is None else penalty.double(),
            samples.answer_lengths.double(),
            samples.finished.double(),
        ],
        dim=1,
    )
    gathered = run.process.comm.gather_scalars(own.flatten().to(run.process.device), label="samples")
    rows = gathered.cpu().view(-1, len(COLUMNS))
    rows = rows[rows[:, 0].argsort()]
    return dict(zip(COLUMNS, rows.unbind(1), strict=True))


def measure(run: Run, *, scored: Scored) -> dict[str, float]:
    """The metrics of a rollout over all ranks. truncated, empty, excluded, equal_groups: fractions of the samples."""
    table, included = scored.table, scored.included
    lengths = table["length"] - table["finished"]  # the end is no text
    kl = {} if scored.kl is None else {"kl": table["kl"].mean().item()}
    return {
        "reward": table["reward"][included].mean().item() if included.any() else 0.0,
        **true_reward(run),
        **kl,
        "length": lengths.mean().item(),
        "truncated": 1 - table["finished"].mean().item(),
        "empty": (lengths == 0).double().mean().item(),
        "excluded": 1 - included.double().mean().item(),
        "equal_groups": scored.equal_groups.double().mean().item(),
    }


def true_reward(run: Run) -> dict[str, float]:
    """Beside a reward model: the mean of the function's rewards of the newest samples, over all ranks. A collective call."""
    if run.function_rewards is None:
        return {}
    known = run.function_rewards[~run.function_rewards.isnan()]
    own = torch.tensor([known.sum().item(), float(len(known))], dtype=torch.float64, device=run.process.device)
    total, count = run.process.comm.gather_scalars(own, label="true rewards").sum(0).tolist()
    return {"true_reward": total / count} if count else {}


def counted(run: Run, *, scored: Scored) -> Tensor:
    """Which of this rank's samples count in the loss, bool [S]."""
    samples = scored.samples
    counts = samples.included.clone()
    if run.config.rollout.drop_equal_groups:
        counts &= ~scored.equal_groups[samples.numbers]
    if run.config.rollout.mask_truncated:
        counts &= samples.finished
    return counts


def fill_buffer(run: Run, *, scored: Scored, counts: Tensor, advantages: Tensor, **extra: Tensor) -> None:
    """Starts the updates with a rollout. counts: whether a sample does, bool [S]. advantages: per token, float32 [S, T]. extra: [S, T] each."""
    config, samples = run.config, scored.samples
    values = {
        "old": samples.logprobs,
        "advantages": advantages,
        "weights": weights_of(run, samples=samples, counts=counts),
    }
    if config.rollout.identity == "corrected":
        trainer = logprobs_of(run.actor, run=run, samples=samples)
        assert trainer is not None
        values["old"] = trainer
        values["correction"] = importance_weights(trainer, drawn=samples.logprobs, most=config.rollout.correction_max)
    if config.kl.coef and config.kl.place == "loss" and scored.reference is not None:
        values["reference"] = scored.reference
    run.buffer.fill(samples, **values, **extra)


# An update


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """loss: this rank's mean over its micro-batches, of which the mean over ranks is the step's loss. entropy: nats per token, over all ranks.

    tokens: of prompts and answers, over all ranks. metrics: further values of the step's row, such as `clipped`, the fraction of tokens outside
    of the clipping range.
    """

    loss: Tensor
    entropy: float
    tokens: int
    metrics: Mapping[str, float]


def update_rows(run: Run) -> slice:
    """The rows of this rank's samples that the next optimizer step uses."""
    share = run.config.train.global_batch_size // run.process.world_size
    return slice(run.buffer.position * share, (run.buffer.position + 1) * share)


def update_policy(run: Run) -> Update:
    """One optimizer step of the policy. Raises RolloutMismatch where rollout.identity=exact does not hold."""
    config, engine, device = run.config, run.actor, run.process.device
    assert run.buffer.samples is not None
    rows = update_rows(run)
    samples, extra = run.buffer.samples[rows], {name: value[rows] for name, value in run.buffer.extra.items()}
    policy = loss_of(config)
    scale = run.process.world_size * config.train.accumulation_steps  # the engine divides by as much
    losses, sums = [], torch.zeros(5, dtype=torch.float64)
    compares = run.buffer.position == 0  # on policy: the weights are those that drew
    for part in micro_batches(run, samples=samples):
        batch, own = samples[part], {name: value[part].to(device) for name, value in extra.items()}
        given = {name: own.get(name) for name in ("old", "advantages", "weights", "correction", "reference")}
        options = {"layout": layout_of(run, samples=batch), "temperature": config.rollout.temperature}
        found = losses_of(engine, batch=batch, policy=policy, **options, **given)
        differing = compared(run, samples=batch, logprobs=found.logprobs) if compares else 0
        loss = found.loss * scale
        engine.backward(loss)
        counts = torch.stack([found.entropy, found.clipped.double()]).cpu()
        answered, computed = int(batch.answer_lengths.sum()), int(batch.lengths.sum())
        sums += torch.tensor([counts[0], answered, counts[1], differing, computed], dtype=torch.float64)
        engine.step()
        losses.append(loss.detach())
    totals = run.process.comm.gather_scalars(sums.to(device), label="update").sum(0).tolist()
    entropy, tokens, clipped, differing, computed = totals
    if compares:
        run.metrics["rollout_differing"] = int(differing)
    return Update(
        loss=torch.stack(losses).mean(),
        entropy=entropy / max(1.0, tokens),
        tokens=int(computed),
        metrics={"clipped": clipped / max(1.0, tokens)},
    )


def compared(run: Run, *, samples: Samples, logprobs: Tensor) -> int:
    """How many log-probabilities of a micro-batch are not those that were stored. A collective call with rollout.identity=exact, where it
    raises RolloutMismatch on the ranks that have one."""
    difference = compare(samples, logprobs=logprobs)
    if run.config.rollout.identity != "exact":
        return difference.count
    own = torch.tensor([float(difference.count)], device=run.process.device)
    if run.process.comm.gather_scalars(own, label="differing").any():
        where = {"row": difference.row, "position": difference.position}
        layer = first_layer(run.actor, samples=samples, packs=run.packs, **where)
        if difference.count:
            raise RolloutMismatch(
                f"step {run.actor.global_steps + 1}: {difference.count} log-probabilities of a micro-batch are not those of its rollout; the "
                f"first: {difference.first}; {layer}. Use rollout.identity=corrected, and report this"
            )
    return difference.count


def loss_of(config: Config) -> PolicyLoss:
    """The loss that `policy` and `kl` describe."""
    policy, kl = config.policy, config.kl
    return PolicyLoss(
        ratio=policy.ratio,
        form=policy.form,
        clip_low=policy.clip_low,
        clip_high=policy.clip_high,
        dual_clip=policy.dual_clip,
        average=policy.average,
        kl_coef=kl.coef if kl.place == "loss" else 0.0,
        kl_estimator=kl.estimator.value if kl.estimator else "k3_weighted",
    )


def weights_of(run: Run, *, samples: Samples, counts: Tensor) -> Tensor:
    """The weight of each token in the loss of its update, float32 [S, T]. counts: whether the sample counts, bool [S]."""
    packing, length = Packing.of(samples.answer_mask), samples.tokens.shape[1]
    share = run.config.train.global_batch_size // run.process.world_size
    tokens = (packing.lengths * counts).view(-1, share).sum(1)
    own = torch.stack([counts.view(-1, share).sum(1), tokens]).double()
    totals = run.process.comm.gather_scalars(own.to(run.process.device), label="tokens").sum(0).cpu()
    parts = [
        token_weights(
            packing.lengths[update * share : (update + 1) * share],
            counts=counts[update * share : (update + 1) * share],
            average=run.config.policy.average,
            samples=int(totals[0, update]),
            tokens=int(totals[1, update]),
            max_tokens=run.config.rollout.max_tokens,
        )
        for update in range(run.buffer.updates)
    ]
    return packing.unpack(torch.cat(parts), length=length)
