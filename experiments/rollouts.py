"""The parts of `task=grpo` and `task=ppo` that are the same: drawing, scoring, measuring, showing, saving."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.models import Values, build
from experiments.prompts import PAD, STOP, Prompts
from ztk import checkpoint
from ztk.config import Config
from ztk.data import ByteTokenizer
from ztk.engine import Engine
from ztk.report import Reporter, RunFolder
from ztk.rollout import (
    Buffer,
    GuardPolicy,
    Guards,
    Requests,
    RolloutMismatch,
    RolloutPolicy,
    RolloutStopped,
    RolloutWeights,
    Samples,
    compare,
    generate,
    share_of_rank,
    token_logprobs,
)
from ztk.rollout.objective import PolicyLoss, equal_groups, policy_loss, token_weights
from ztk.runtime import Process

NUM_SHOWN = 4  # texts of a step
EVALUATED = 4  # rollouts, before the first step and after the last
UNTRAINED = 2**40  # the number of the first prompt to evaluate with
# What the ranks tell each other of every sample, float64 each.
COLUMNS = ("number", "prompt", "reward", "included", "kl", "length", "finished")


@dataclass(kw_only=True)
class Run:
    """What a run goes on with. rollouts: those made. metrics: of the newest one."""

    config: Config
    process: Process
    actor: Engine
    reference: Engine | None
    critic: Engine | None
    prompts: Prompts
    buffer: Buffer
    guards: Guards
    rollouts: int = 0
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def samples_per_rollout(self) -> int:
        return self.config.rollout.prompts * self.config.rollout.group_size

    def close(self) -> None:
        """Ends all engines."""
        for engine in (self.actor, self.reference, self.critic):
            if engine is not None:
                engine.close()

    def state_dict(self) -> dict[str, Any]:
        """A JSON value, the same on all ranks. A collective call."""
        return {
            "rollouts": self.rollouts,
            "metrics": self.metrics,
            "guards": self.guards.state_dict(),
            "buffer": self.buffer.state_dict(gather=self.process.comm.gather_objects),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where `state_dict` was taken. Raises ValueError if these ranks cannot divide the rollout."""
        self.rollouts, self.metrics = state["rollouts"], dict(state["metrics"])
        self.guards.load_state_dict(state["guards"])
        self.buffer.load_state_dict(state["buffer"], rank=self.process.rank, world_size=self.process.world_size)


def open_run(config: Config, *, process: Process, first_values: Values | None, lr_table: Tensor) -> Run:
    """The models, with the same first weights, and an empty buffer."""
    common = {"process": process, "values": first_values}
    has_reference, has_critic = config.kl.reference == "frozen", config.advantage.baseline == "critic"
    samples = config.rollout.prompts * config.rollout.group_size
    return Run(
        config=config,
        process=process,
        actor=build(config, lr_table=lr_table, **common),
        reference=build(config, is_trained=False, **common) if has_reference else None,
        critic=build(config, lr=config.critic.lr, lr_table=lr_table, is_critic=True, **common) if has_critic else None,
        prompts=Prompts(config),
        buffer=Buffer(updates=samples // config.train.global_batch_size),
        guards=Guards(GuardPolicy(kl_above=config.kl.stop_above, entropy_below=config.rollout.stop_entropy_below)),
    )


# A rollout


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
        stop=STOP,
        pad=PAD,
        temperature=rollout.temperature,
        seed=config.train.seed,
        weights=RolloutWeights(rollout.weights.value),
    )
    samples = generate(run.actor, policy=policy, requests=requests, step=run.rollouts)
    for row, prompt in enumerate(prompts):
        reward = run.prompts.score(prompt, answer=answer_of(samples, row=row))
        samples.rewards[row], samples.included[row] = reward or 0.0, reward is not None
    return samples


def evaluate(run: Run) -> float:
    """The mean reward of sampled answers to `EVALUATED` rollouts with draws of their own, over all ranks."""
    rewards = []
    for number in range(EVALUATED):
        samples = draw(run, first_prompt=UNTRAINED + number * run.config.rollout.prompts)
        table = table_of(run, samples=samples, kl=None)
        rewards.append(table["reward"][table["included"].bool()])
    return torch.cat(rewards).mean().item()


def answer_of(samples: Samples, *, row: int) -> str:
    """The text of an answer, without its end."""
    first = int(samples.prompt_lengths[row])
    last = first + int(samples.answer_lengths[row]) - int(samples.finished[row])
    return ByteTokenizer().decode(samples.tokens[row, first:last])


def logprobs_of(engine: Engine | None, *, run: Run, samples: Samples) -> Tensor | None:
    """What `engine` gives the tokens of `samples`, float32 [S, T], without gradients; None without an engine."""
    if engine is None:
        return None
    parts, device = [], run.process.device
    with engine.evaluating():
        for rows in micro_batches(run, samples=samples):
            tokens = samples.tokens[rows].to(device)
            logprobs = token_logprobs(engine(tokens), tokens=tokens, temperature=run.config.rollout.temperature)
            parts.append(logprobs.cpu())
    return torch.cat(parts)


def micro_batches(run: Run, *, samples: Samples) -> Iterator[slice]:
    """The rows of each forward: the same for rollout, scoring and training."""
    size = run.config.train.micro_batch_size
    yield from (slice(first, first + size) for first in range(0, len(samples), size))


def table_of(run: Run, *, samples: Samples, kl: Tensor | None) -> dict[str, Tensor]:
    """The `COLUMNS` of all ranks' samples in the order of their numbers, float64 [samples of the rollout]. kl: nats per answer, [S]."""
    own = torch.stack(
        [
            samples.numbers.double(),
            samples.prompts.double(),
            samples.rewards,
            samples.included.double(),
            torch.zeros(len(samples), dtype=torch.float64) if kl is None else kl.double(),
            samples.answer_lengths.double(),
            samples.finished.double(),
        ],
        dim=1,
    )
    gathered = run.process.comm.gather_scalars(own.flatten().to(run.process.device), label="samples")
    rows = gathered.cpu().view(-1, len(COLUMNS))
    rows = rows[rows[:, 0].argsort()]
    return dict(zip(COLUMNS, rows.unbind(1), strict=True))


def measure(run: Run, *, table: Mapping[str, Tensor]) -> dict[str, float]:
    """The metrics of a rollout over all ranks."""
    included = table["included"].bool()
    lengths = table["length"] - table["finished"]  # the end is no text
    equal = equal_groups(table["reward"], groups=table["prompt"].long(), included=included)
    kl = {} if run.reference is None else {"kl": table["kl"].mean().item()}
    return {
        "reward": table["reward"][included].mean().item() if included.any() else 0.0,
        **kl,
        "length": lengths.mean().item(),
        "truncated": 1 - table["finished"].mean().item(),
        "empty": (lengths == 0).sum().item(),
        "excluded": (~included).sum().item(),
        "equal_groups": equal.double().mean().item(),
    }


def counted(run: Run, *, samples: Samples, equal: Tensor) -> Tensor:
    """Which of this rank's samples count in the loss, bool [S]. equal: whether their groups have equal rewards."""
    counts = samples.included.clone()
    if run.config.rollout.drop_equal_groups:
        counts &= ~equal
    if run.config.rollout.mask_truncated:
        counts &= samples.finished
    return counts


def correction_of(run: Run, *, samples: Samples, trainer: Tensor | None) -> Tensor | None:
    """The weights of truncated importance sampling, [S, T], from the trainer's log-probabilities; None where there are none."""
    if trainer is None:
        return None
    return (trainer - samples.logprobs).exp().clamp(max=run.config.rollout.correction_max)


def check_guards(run: Run, *, step: int, savers: "Savers", reporter: Reporter) -> None:
    """Raises RolloutStopped, after a checkpoint, if the newest rollout's metrics say that the run must not go on."""
    fault = run.guards.fault(run.metrics, step=step, max_tokens=run.config.rollout.max_tokens)
    if fault is not None:
        savers.save(extra=reporter.past())
        raise RolloutStopped(fault)


# An update


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """loss: this rank's mean over its micro-batches, of which the mean over ranks is the step's loss. entropy: nats per token, over all ranks.

    clipped: the fraction of tokens outside of the clipping range. differing: tokens whose log-probabilities are not the stored ones.
    critic_loss: as `loss`.
    """

    loss: Tensor
    entropy: float
    clipped: float
    differing: int
    critic_loss: float | None = None


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
    losses, sums = [], torch.zeros(4, dtype=torch.float64)
    checks = config.rollout.identity == "exact" and run.buffer.position == 0
    for part in micro_batches(run, samples=samples):
        batch, own = samples[part], {name: value[part].to(device) for name, value in extra.items()}
        tokens = batch.tokens.to(device)
        logits = engine(tokens)
        logprobs = token_logprobs(logits, tokens=tokens, temperature=config.rollout.temperature)
        if checks and (difference := compare(batch, logprobs=logprobs)).count:
            raise RolloutMismatch(
                f"step {engine.global_steps + 1}: {difference.count} log-probabilities of a micro-batch are not those of its rollout; the "
                f"first: {difference.first}. Use rollout.identity=corrected, and report this"
            )
        found = policy_loss(
            logprobs,
            policy=policy,
            old=own["old"],
            advantages=own["advantages"],
            weights=own["weights"],
            correction=own.get("correction"),
            reference=own.get("reference"),
        )
        loss = found.loss * scale
        engine.backward(loss)
        sums += measured(logits, batch=batch, clipped=found.clipped)
        engine.step()
        losses.append(loss.detach())
    entropy, tokens, clipped, used = run.process.comm.gather_scalars(sums.to(device), label="update").sum(0).tolist()
    return Update(
        loss=torch.stack(losses).mean(),
        entropy=entropy / max(1.0, tokens),
        clipped=clipped / max(1.0, used),
        differing=0,
    )


@torch.no_grad()
def measured(logits: Tensor, *, batch: Samples, clipped: Tensor) -> Tensor:
    """Sum of entropies over the tokens of answers, their number, clipped tokens, and tokens again: float64 [4]."""
    mask = batch.answer_mask.to(logits.device)[:, 1:]
    logprobs = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    count = mask.sum()
    return torch.stack([(entropies * mask).sum().double(), count.double(), clipped.double(), count.double()]).cpu()


def loss_of(config: Config) -> PolicyLoss:
    """The loss that `policy` and `kl` describe."""
    policy, kl = config.policy, config.kl
    return PolicyLoss(
        ratio=policy.ratio.value,
        form=policy.form.value,
        clip_low=policy.clip_low,
        clip_high=policy.clip_high,
        dual_clip=policy.dual_clip,
        average=policy.average.value,
        kl_coef=kl.coef if kl.place == "loss" else 0.0,
        kl_estimator=kl.estimator.value,
    )


def weights_of(run: Run, *, samples: Samples, counts: Tensor) -> Tensor:
    """The weight of each token in the loss of its update, float32 [S, T]. counts: whether the sample counts, bool [S]."""
    mask = samples.answer_mask & counts.unsqueeze(1)
    share = run.config.train.global_batch_size // run.process.world_size
    own = torch.stack([counts.view(-1, share).sum(1), mask.view(-1, share, mask.shape[1]).sum((1, 2))]).double()
    totals = run.process.comm.gather_scalars(own.to(run.process.device), label="tokens").sum(0).cpu()
    parts = [
        token_weights(
            mask[update * share : (update + 1) * share],
            average=run.config.policy.average.value,
            samples=int(totals[0, update]),
            tokens=int(totals[1, update]),
            max_tokens=run.config.rollout.max_tokens,
        )
        for update in range(run.buffer.updates)
    ]
    return torch.cat(parts)


# Shown and saved


class Texts:
    """`samples.jsonl` of the run folder: texts with reward, length and KL. Rank 0 writes."""

    def __init__(self, run: Run, *, first_step: int) -> None:
        """Drops the rows that a run resumed at `first_step` writes again."""
        self._path = Path(run.config.output_dir) / "samples.jsonl"
        self._writes = run.process.rank == 0
        if self._writes and self._path.exists():
            kept = [line for line in self._path.read_text().splitlines() if json.loads(line)["step"] <= first_step]
            self._path.write_text("".join(f"{line}\n" for line in kept))

    def show(self, run: Run, *, step: int, samples: Samples, kl: Tensor | None) -> str:
        """Writes one text of each of the rollout's first prompts; returns them for the screen."""
        lines = []
        for row in range(0, len(samples), run.config.rollout.group_size)[:NUM_SHOWN]:
            record = {
                "step": step,
                "prompt": run.prompts[int(samples.prompts[row])].text,
                "answer": answer_of(samples, row=row),
                "reward": float(samples.rewards[row]) if samples.included[row] else None,
                "length": int(samples.answer_lengths[row]),
                "kl": None if kl is None else float(kl[row]),
                "finished": bool(samples.finished[row]),
            }
            lines.append(
                f"  reward {record['reward']}  length {record['length']}  {record['prompt']!r} -> {record['answer']!r}"
            )
            if self._writes:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(record) + "\n")
        return f"step {step}: texts\n" + "\n".join(lines)


class Savers:
    """Checkpoints of all models that a run needs to continue: the policy's last, so that it exists only beside the others."""

    def __init__(self, run: Run) -> None:
        self._run, self._stack = run, ExitStack()
        self._policy: checkpoint.Saver | None = None
        self._others: list[checkpoint.Saver] = []

    def __enter__(self) -> "Savers":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _open(self) -> checkpoint.Saver:
        if self._policy is None:
            run, config = self._run, self._run.config
            retention = checkpoint.Retention(
                keep=config.checkpoint.keep or 1, keep_every=config.checkpoint.keep_every or 0
            )
            folder = RunFolder(config.output_dir)
            others = {"critic": run.critic, "reference": run.reference}
            self._others = [
                self._stack.enter_context(checkpoint.Saver(engine, folder=folder.path / name, retention=retention))
                for name, engine in others.items()
                if engine is not None
            ]
            self._policy = self._stack.enter_context(
                checkpoint.Saver(run.actor, folder=folder.checkpoints, retention=retention)
            )
        return self._policy

    def save(self, *, extra: dict[str, Any]) -> None:
        """Saves all models after the same optimizer step. A collective call."""
        policy = self._open()
        if self._run.reference is not None:
            self._run.reference.global_steps = (
                self._run.actor.global_steps
            )  # it makes none: its checkpoints are named alike
        for saver in self._others:
            saver.save()
        policy.save(data_state=self._run.state_dict(), extra=extra)


def resume(run: Run) -> dict[str, Any]:
    """Restores all models and the run from `checkpoint.resume`; returns what the reporter needs to continue its record."""
    config = run.config
    given = config.checkpoint.resume
    if given is None:
        return {}
    if given == "auto":
        loaded = checkpoint.load_newest(run.actor, folder=RunFolder(config.output_dir).checkpoints)
        if loaded is None:
            return {}
    else:
        loaded = checkpoint.load(run.actor, path=given)
    for name, engine in (("critic", run.critic), ("reference", run.reference)):
        if engine is not None:
            checkpoint.load(engine, path=loaded.path.parent.parent / name / loaded.path.name)
    run.load_state_dict(loaded.data_state)
    if run.process.rank == 0:
        print(f"continues after step {loaded.step} from {loaded.path}, saved by {loaded.saved_world_size} ranks")
    return (loaded.extra or {}) | {"first_step": run.actor.global_steps}
