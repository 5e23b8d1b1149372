"""Answers of a policy: drawn, rewarded, compared with the reference and measured.

The functions draw the rollouts of `task=grpo` and `task=ppo`, to train and to evaluate. `HeldOutAnswers` evaluates the policies of
`task=dpo` and `task=distill` on held-out prompts.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ztk.config import Config
from ztk.core.policies.rollout import LateName
from ztk.data import ByteTokenizer
from ztk.experiments.episodes import episode_metrics, played
from ztk.experiments.examples import HELD_OUT
from ztk.experiments.least_divergence import frontier_of
from ztk.experiments.policy_run import Run, rollout_policy
from ztk.experiments.prompts import PAD, STOP, Prompts
from ztk.experiments.reference import BaseModel, row_logprobs
from ztk.experiments.rewards import begin, overlaps, reward, reward_metrics
from ztk.experiments.tasks import TASKS, name_of
from ztk.parallel.pipeline import MicroBatch
from ztk.rl.align import Packing, divergence, equal_groups
from ztk.rl.rollout import (
    CachedRollouts,
    Drawn,
    Layout,
    Requests,
    RolloutPolicy,
    Routers,
    Samples,
    TrainerRollouts,
    answer_logprobs,
    any_rank,
    compare,
    draw_once,
    generate,
    has_engine_attention,
    hide_of,
    lay_out,
    share_of_rank,
    states_away,
)
from ztk.train.engine import Engine

EVALUATED = 4  # rollouts, before the first step and after the last
PROBED = 4  # tokens of the answers that `settle_drawer` compares
UNTRAINED = 2**40  # number of the first prompt for evaluations
HELD_OUT_PROMPTS = 256  # of `HeldOutAnswers`, over all ranks
GREEDY = 1e-6  # a temperature at which the largest logit has all probability
LONGEST = 8  # tokens of an answer of `HeldOutAnswers`
# Values of every sample that the ranks exchange, float64 each.
COLUMNS = ("number", "prompt", "reward", "included", "kl", "penalty", "length", "finished", "late")


def drawing(run: Run) -> AbstractContextManager[None]:
    """Moves tensors that only updates read off the device inside the context.

    They stay if the inference engine copies the weights to main memory, because it may copy them from master weights.
    """
    copies = run.drawer.copies_weights
    return nullcontext() if copies else states_away(run.actor, *([run.critic] if run.critic else []))


def draw(run: Run, *, first_prompt: int | None = None) -> Samples:
    """Samples this rank's part of a rollout, with rewards. first_prompt: number of its first prompt, by default the run's next one.

    Raises RewardError, also for an environment that fails.
    """
    return accepted(run, drawn=drawing_of(run, first_prompt=first_prompt)())


def drawing_of(
    run: Run,
    *,
    first_prompt: int | None = None,
    number: int | None = None,
    begins: bool = False,
    late: threading.Event | None = None,
) -> Callable[[], Drawn]:
    """Draws a rollout when it is called, once. Weights that `run.drawer` copies are copied before this returns. A collective call.

    number: number of the rollout in the run, by default of the next one. first_prompt: number of its first prompt, by default the run's next.
    begins: begins the rewards, too. late: event of `Requests`.
    """
    number = run.rollouts if number is None else number
    policy, first = policy_of(run, is_trained=first_prompt is None), number * run.config.rollout.prompts
    requests = requests_of(run, first_prompt=first if first_prompt is None else first_prompt, late=late)
    turns, drawn_at = ExitStack(), run.actor.global_steps
    given = {"policy": policy, "requests": requests}
    draws = turns.enter_context(run.drawer.turns(**given, step=number))
    prompts = [run.prompts[int(number)] for number in requests.prompt_numbers]

    def draw_all() -> Drawn:
        with turns:
            if run.environments is None:
                drawn = Drawn(samples=draw_once(draws, **given))
            else:
                drawn = played(run, draws=draws, prompts=prompts, **given)
        if drawn.samples.steps is None:  # else a server has told them
            drawn.samples.steps = drawn.samples.answer_mask * drawn_at
        return replace(drawn, begun=begin(run, drawn=drawn, prompts=prompts)) if begins else drawn

    return draw_all


def requests_of(run: Run, *, first_prompt: int, late: threading.Event | None = None) -> Requests:
    """Returns this rank's part of a rollout. first_prompt: number of its first prompt. late: event of `Requests`."""
    config, rollout, mesh = run.config, run.config.rollout, run.process.mesh
    layout = {"rank": mesh.replica, "world_size": mesh.replicas}
    numbers = share_of_rank(updates=run.buffer.updates, per_update=config.train.global_batch_size, **layout)
    prompt_numbers = first_prompt + numbers // rollout.group_size
    return Requests(
        prompts=[run.prompts[int(number)].tokens for number in prompt_numbers],
        numbers=numbers,
        prompt_numbers=prompt_numbers,
        copies=numbers % rollout.group_size,
        late=late,
    )


def policy_of(run: Run, *, is_trained: bool) -> RolloutPolicy:
    """Returns how answers are drawn. is_trained: the policy learns from them."""
    given = {"stops": run.prompts.stops, "weights": run.weights.weights, "packs": run.packs}
    return rollout_policy(run.config, keeps_experts=is_trained and run.routers is not None, **given)


def settle_drawer(run: Run) -> str | None:
    """Takes the training forward in place of an inference engine whose bits are others on this processor, although
    `rollout.identity=exact`. A collective call.

    The first tokens of a rollout are compared. Returns a sentence for the output, or None if nothing changes.
    """
    if run.config.rollout.identity != "exact" or not isinstance(run.drawer, CachedRollouts):
        return None
    policy = policy_of(run, is_trained=False)
    policy = replace(policy, max_tokens=min(policy.max_tokens, PROBED))
    samples = generate(run.drawer, policy=policy, requests=requests_of(run, first_prompt=UNTRAINED), step=0)
    logprobs = logprobs_of(run.actor, run=run, samples=samples)
    assert logprobs is not None, "of an engine"
    if not any_rank(run.actor, flag=compare(samples, logprobs=logprobs).count > 0):
        return None
    run.drawer = TrainerRollouts(run.actor)
    return "rollout.engine=trainer: on this processor the inference engine has other bits, and rollout.identity=exact"


def next_samples(run: Run) -> Samples:
    """This rank's samples of the next rollout, with rewards: those drawn ahead, or new ones. Raises as `draw`."""
    began = time.perf_counter()
    drawn = (None if run.ahead is None else run.ahead.first()) or drawing_of(run)()
    run.waited += time.perf_counter() - began
    return accepted(run, drawn=drawn)


def draw_ahead(run: Run) -> None:
    """Begins rollouts up to `rollout.staleness` after the one that fills the buffer, with the weights of now, unless the run ends before
    them. A collective call.
    """
    if run.ahead is None:
        return
    run.ahead.drop()
    for number in range(len(run.ahead), run.config.rollout.staleness or 0):
        if run.actor.global_steps + (number + 1) * run.buffer.updates < run.config.train.steps:
            late = threading.Event() if run.config.rollout.late is LateName.cut else None
            draw = drawing_of(run, number=run.rollouts + number, begins=overlaps(run), late=late)
            run.ahead.start(draw, late=late)


def accepted(run: Run, *, drawn: Drawn) -> Samples:
    """The samples, with rewards; `run.episodes` become theirs. Raises RewardError."""
    run.episodes = drawn.episodes
    prompts, begun = [run.prompts[int(number)] for number in drawn.samples.prompts], drawn.begun
    if (
        begun is None and run.ahead is not None and overlaps(run)
    ):  # a rollout of a checkpoint, or one that was not drawn ahead
        begun = begin(run, drawn=drawn, prompts=prompts)
    reward(run, samples=drawn.samples, prompts=prompts, begun=begun)
    return drawn.samples


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """This rank's samples of a rollout, and values of all ranks' samples.

    reference: log-probabilities of the reference, float32 [S, T]. kl: nats per answer, [S]. penalty: the amount that kl.place=reward
    subtracts from the reward of every token, [S, T]. They are None without a reference; penalty also with kl.place=loss. table: `COLUMNS`
    of all ranks' samples in the order of their numbers, float64 [samples of the rollout].
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """The mean reward of sampled answers, and their mean divergence from the reference in nats; None without a reference."""

    reward: float
    kl: float | None


def scored_rollouts(run: Run, *, first_prompt: int, count: int) -> Iterator[Scored]:
    """Yields rollouts for an evaluation, over all ranks. first_prompt: number of the first prompt of the first one.

    Waits for those that are drawn ahead, whose weights must not depend on the evaluation.
    """
    if run.ahead is not None:
        run.ahead.wait()
    with drawing(run):
        for number in range(count):
            samples = draw(run, first_prompt=first_prompt + number * run.config.rollout.prompts)
            yield score_samples(run, samples=samples)


def evaluate(run: Run) -> Evaluated:
    """Evaluates `EVALUATED` rollouts with separate samples, over all ranks."""
    rewards, kl = [], []
    for scored in scored_rollouts(run, first_prompt=UNTRAINED, count=EVALUATED):
        rewards.append(scored.table["reward"][scored.included])
        kl.append(scored.table["kl"])
    found = torch.cat(rewards)
    return Evaluated(
        reward=found.mean().item() if len(found) else 0.0,
        kl=None if run.reference is None else torch.cat(kl).mean().item(),
    )


def evaluate_prompts(run: Run, *, prompts: Prompts) -> dict[str, float]:
    """Returns the metrics of `rollout.eval_rollouts` rollouts as `eval_NAME`, over all ranks, on separate prompts with separate rewards.

    Raises RewardError.
    """
    config = run.config
    own = replace(
        run,
        prompts=prompts,
        reward_model=None if config.reward.eval_functions else run.reward_model,
        metrics={},
    )
    first = UNTRAINED if prompts.count is None else -(-UNTRAINED // prompts.count) * prompts.count
    rollouts = scored_rollouts(own, first_prompt=first, count=config.rollout.eval_rollouts or 1)
    found = [measure(own, scored=scored) for scored in rollouts]
    names = dict.fromkeys(name for metrics in found for name in metrics)
    values = {name: [metrics[name] for metrics in found if name in metrics] for name in names}
    return {f"eval_{name}": sum(own) / len(own) for name, own in values.items()}


def logprobs_of(
    engine: Engine | BaseModel | None, *, run: Run, samples: Samples, routers: Routers | None = None
) -> Tensor | None:
    """Returns log-probabilities of the tokens of `samples` by `engine`, over the kept tokens, float32 [S, T], without gradients.

    None without an engine. routers: the engine's module's, if they choose the experts that drew the samples.
    """
    if engine is None:
        return None
    length, temperature = samples.tokens.shape[1], run.config.rollout.temperature

    def forward_of(batch: Samples) -> MicroBatch:
        layout, mask = layout_of(run, samples=batch), batch.answer_mask
        hide = hide_of(batch.kept, mask=mask, device=layout.tokens.device)

        def logprobs_of(model: Any) -> Tensor:
            if routers is not None:
                routers.begin(batch, layout=layout)
            return answer_logprobs(model, layout=layout, mask=mask, temperature=temperature, hide=hide)

        return layout.micro_batch(logprobs_of)

    with engine.evaluating():
        parts = engine.compute(forward_of(samples[rows]) for rows in micro_batches(run, samples=samples))
    if routers is not None:
        routers.begin(None)
    return Packing.of(samples.answer_mask).unpack(torch.cat([part.cpu() for part in parts]), length=length)


def layout_of(run: Run, *, samples: Samples) -> Layout:
    """Returns a micro-batch's layout for a forward of policy or reference."""
    module = run.actor.module if run.packs else None
    lengths = {"lengths": samples.lengths, "prompt_lengths": samples.prompt_lengths}
    return lay_out(samples.tokens, packs=run.packs, device=run.process.device, module=module, **lengths)


def micro_batches(run: Run, *, samples: Samples) -> Iterator[slice]:
    """Yields the rows of each forward, the same for rollout, scoring and training."""
    size = run.config.train.micro_batch_size
    yield from (slice(first, first + size) for first in range(0, len(samples), size))


def score_samples(run: Run, *, samples: Samples) -> Scored:
    """Compares the policy with the reference, and gathers the values of all ranks. A collective call."""
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
    """Returns the table; see `Scored`. kl, penalty: per answer, [S]; zeros by default."""
    nothing = torch.zeros(len(samples), dtype=torch.float64)
    own = torch.stack(
        [
            samples.numbers.double(),
            samples.prompts.double(),
            samples.rewards,
            samples.included.double(),
            nothing if kl is None else kl.double(),
            nothing if penalty is None else penalty.double(),
            samples.answer_mask.sum(1).double(),
            samples.finished.double(),
            nothing if samples.late is None else samples.late.double(),
        ],
        dim=1,
    )
    gathered = run.process.mesh.gather_scalars(own.flatten().to(run.process.device), label="samples")
    rows = gathered.cpu().view(-1, len(COLUMNS))
    rows = rows[rows[:, 0].argsort()]
    return dict(zip(COLUMNS, rows.unbind(1), strict=True))


def measure(run: Run, *, scored: Scored) -> dict[str, float]:
    """Returns the metrics of a rollout over all ranks. truncated, empty, excluded, equal_groups, rollout_late: fractions of the samples.

    truncated: at `rollout.max_tokens`. rollout_late: by `rollout.late=cut`.
    """
    table, included = scored.table, scored.included
    lengths = table["length"] - table["finished"]  # the end token is not text
    kl = {} if scored.kl is None else {"kl": table["kl"].mean().item()}
    # A critic compares answers to all prompts, each of which may have a single answer. Its group is the whole rollout.
    has_critic = run.config.advantage.baseline == "critic"
    groups = torch.zeros_like(scored.groups) if has_critic else scored.groups
    equal = equal_groups(table["reward"], groups=groups, included=included)
    cut = run.config.rollout.late is LateName.cut
    return {
        "reward": table["reward"][included].mean().item() if included.any() else 0.0,
        **reward_metrics(run),
        **episode_metrics(run),
        **kl,
        "length": lengths.mean().item(),
        "truncated": 1 - (table["finished"] + table["late"]).mean().item(),
        **({"rollout_late": table["late"].mean().item()} if cut else {}),
        "empty": (lengths == 0).double().mean().item(),
        "excluded": 1 - included.double().mean().item(),
        "equal_groups": equal.double().mean().item(),
    }


def staleness_of(run: Run, *, samples: Samples) -> dict[str, float]:
    """Returns the age of the weights that drew the tokens, in rollouts: the mean and the largest over all ranks. A collective call.

    No metrics where nothing is drawn ahead or by servers.
    """
    if samples.steps is None or (run.ahead is None and not run.config.rollout.servers):
        return {}
    mask = samples.answer_mask
    ages = (run.actor.global_steps - samples.steps)[mask].double() / run.buffer.updates
    own = torch.stack([ages.sum(), mask.sum().double(), ages.max() if len(ages) else ages.new_zeros(())])
    ranks = run.process.mesh.gather_scalars(own.to(run.process.device), label="staleness").cpu()
    mean = ranks[:, 0].sum() / ranks[:, 1].sum().clamp(min=1)
    return {"rollout_staleness": mean.item(), "rollout_staleness_max": ranks[:, 2].max().item()}


def divergence_of(run: Run, *, reached: Evaluated) -> dict[str, float]:
    """Returns `kl_after`, in nats per answer, and `kl_least`, the minimum for this reward, if right answers are known. A collective
    call.
    """
    if reached.kl is None or run.reference is None:
        return {}
    found, config = {"kl_after": reached.kl}, run.config
    is_cut = (
        config.rollout.top_k or config.rollout.top_p != 1 or config.rollout.min_p
    )  # the closed form needs full distributions
    if not is_cut and config.rollout.task is not None and not run.prompts.is_own_reward and run.reward_model is None:
        found["kl_least"] = frontier_of(run.reference, config=config).least(reached.reward)
    return found


def described(ends: dict[str, float], *, divergence: dict[str, float]) -> str:
    """Describes the final reward and its divergence, for the screen."""
    text = f"mean reward of sampled answers: {ends['reward_before']:.3f} before, {ends['reward_after']:.3f} after"
    if "kl_after" not in divergence:
        return text
    text += f"; divergence from the reference {divergence['kl_after']:.2f} nats per answer"
    least = divergence.get("kl_least", 0.0)
    return (
        f"{text}, {divergence['kl_after'] / least:.2f} times the least for this reward ({least:.2f})" if least else text
    )


class HeldOutAnswers:
    """Answers to the built-in task, whose rewards are exact. There are no measurements for records of a file."""

    def __init__(
        self, config: Config, *, engine: Engine, reference: Engine | BaseModel | None, packs: bool = False
    ) -> None:
        """reference: the engine for the divergence, which is not measured without one. packs: see `ztk.experiments.packing`."""
        self._config, self._engine, self._reference, self._packs = config, engine, reference, packs
        is_exact = packs and has_engine_attention(engine.module)
        self._drawer = CachedRollouts(engine) if is_exact else TrainerRollouts(engine)
        process, size = engine.process, config.train.micro_batch_size
        # In full micro-batches; a remainder is ignored.
        replica, replicas = process.mesh.replica, process.mesh.replicas
        per_rank = -(-HELD_OUT_PROMPTS // (replicas * size)) * size
        self._numbers = torch.arange(per_rank) * replicas + replica

    def measure(self) -> dict[str, float]:
        """Returns `reward` of sampled and `greedy_reward` of greedy answers, and `kl` in nats per sampled answer. A collective call."""
        if self._config.data.path is not None:
            return {}
        sampled, greedy = self._drawn(temperature=1.0), self._drawn(temperature=GREEDY)
        found = {"reward": sampled.rewards, "greedy_reward": greedy.rewards}
        if self._reference is not None:
            found["kl"] = self._divergence(sampled)
        counted = self._numbers < HELD_OUT_PROMPTS
        own = torch.stack([values[counted].double().sum() for values in found.values()])
        totals = self._engine.process.mesh.gather_scalars(own.to(self._engine.process.device), label="answers").sum(0)
        totals /= HELD_OUT_PROMPTS
        return dict(zip(found, totals.tolist(), strict=True))

    def _drawn(self, *, temperature: float) -> Samples:
        config = self._config
        task = TASKS[name_of(config)]
        prompts = [task.prompt(seed=config.train.seed, number=HELD_OUT + int(number)) for number in self._numbers]
        longest = max(len(prompt.tokens) for prompt in prompts)
        policy = RolloutPolicy(
            length=config.data.seq_len,
            micro_batch=config.train.micro_batch_size,
            max_tokens=min(LONGEST, config.data.seq_len - longest),
            stops=(STOP,),
            pad=PAD,
            temperature=temperature,
            seed=config.train.seed,
            packs=self._packs,
        )
        requests = Requests(
            prompts=[prompt.tokens for prompt in prompts],
            numbers=self._numbers,
            prompt_numbers=self._numbers,
            copies=torch.zeros_like(self._numbers),
        )
        samples = generate(self._drawer, policy=policy, requests=requests, step=0)
        for row, prompt in enumerate(prompts):
            answer = ByteTokenizer().decode(samples.answer(row, with_end=False))
            samples.rewards[row] = task.score(prompt=prompt.text, answer=answer, record={})
        return samples

    def _divergence(self, samples: Samples) -> Tensor:
        """Returns log policy - log reference of every answer, float64 [S]. Its mean estimates the KL divergence."""
        assert self._reference is not None
        size = self._config.train.micro_batch_size
        reference = row_logprobs(self._reference, tokens=samples.tokens, temperature=1.0, size=size)
        return ((samples.logprobs - reference) * samples.answer_mask).double().sum(1)
