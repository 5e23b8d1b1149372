"""The state of a run of `task=grpo` and `task=ppo`: models, buffer and guards; how they are opened, saved and restored."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from ztk import checkpoint
from ztk.config import Config, open_environments, to_yaml
from ztk.core.policies.routing import replays_experts
from ztk.core.runtime import Process
from ztk.experiments import policies
from ztk.experiments.alignment import start_from
from ztk.experiments.best import Best
from ztk.experiments.models import Values, build
from ztk.experiments.packing import packs_rollouts
from ztk.experiments.pretrain import load_past
from ztk.experiments.prompts import PAD, Prompts
from ztk.experiments.reference import BaseModel, build_frozen
from ztk.experiments.reward_models import RewardModel, open_reward_model
from ztk.experiments.served_rewards import ServedReward
from ztk.experiments.servers import open_served
from ztk.inference.sample import Cut
from ztk.report import RunFolder
from ztk.rl.rollout import (
    Ahead,
    Buffer,
    CachedRollouts,
    Environments,
    Episode,
    GuardPolicy,
    Guards,
    RolloutPolicy,
    Rollouts,
    RolloutWeights,
    Routers,
    ServedRollouts,
    SettledWeights,
    TrainerRollouts,
    settle_weights,
)
from ztk.rl.rollout.rewards import Rewarded
from ztk.train.engine import Engine


@dataclass(kw_only=True)
class Run:
    """The state of a run.

    best: the best of the evaluations so far. weights: how a rollout reads parameters. packs: whether policy and reference take texts without
    padding. reward_model: given by reward.path or reward.servers. drawer: given by rollout.engine. rollouts: number so far. metrics: the
    latest one's. reward_before: mean reward before the first step. rewarded: the functions' rewards of this rank's latest samples.
    environments: given by rollout.environment. episodes: episodes of this rank's latest samples. ahead: samples the next rollouts, for
    rollout.staleness. routers: routers of a policy with experts that the inference engine draws with. waited: seconds without an update, until
    answers were drawn.
    """

    config: Config
    process: Process
    actor: Engine
    reference: Engine | BaseModel | None
    critic: Engine | None
    prompts: Prompts
    buffer: Buffer
    guards: Guards
    best: Best
    weights: SettledWeights
    packs: bool
    drawer: Rollouts
    reward_model: RewardModel | ServedReward | None = None
    rewarded: Rewarded | None = None
    environments: Environments | None = None
    episodes: Sequence[Episode] = ()
    ahead: Ahead | None = None
    routers: Routers | None = None
    rollouts: int = 0
    waited: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)
    reward_before: float | None = None

    def close(self) -> None:
        """Closes all engines."""
        if isinstance(self.drawer, ServedRollouts):
            self.drawer.close()
        if isinstance(self.reward_model, ServedReward):
            self.reward_model.close()
        reward_model = self.reward_model.engine if isinstance(self.reward_model, RewardModel) else None
        for engine in (self.actor, self.reference, self.critic, reward_model):
            if isinstance(engine, Engine):
                engine.close()

    def described(self) -> Iterator[str]:
        """Yields the lines about prompts and settings of rollouts with which the output begins."""
        rollout = self.config.rollout
        yield self.prompts.describe()
        if rollout.weights is not None:
            yield f"rollout.weights={self.weights.weights}: {self.weights.reason}"
        if self.ahead is not None:
            corrected = (
                "" if rollout.correction is None else f", corrected by rollout.correction={rollout.correction.value}"
            )
            yield f"rollout.staleness={rollout.staleness}: answers are drawn up to as many rollouts ahead{corrected}"

    def state_dict(self) -> dict[str, Any]:
        """Returns a JSON value, the same on all ranks. A collective call."""
        return {
            "rollouts": self.rollouts,
            "metrics": self.metrics,
            "reward_before": self.reward_before,
            "guards": self.guards.state_dict(),
            "best": self.best.state_dict(),
            "buffer": self.buffer.state_dict(gather=self.process.mesh.gather_objects),
            "ahead": None
            if self.ahead is None
            else self.ahead.state_dict(gather=self.process.mesh.gather_objects, updates=self.buffer.updates),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the result of `state_dict`. Raises ValueError if it is from the middle of a different rollout."""
        self.rollouts, self.metrics = state["rollouts"], dict(state["metrics"])
        self.reward_before = state["reward_before"]
        self.guards.load_state_dict(state["guards"])
        if "best" in state:  # older checkpoints have none
            self.best.load_state_dict(state["best"])
        layout = {
            "per_update": self.config.train.global_batch_size,
            "rank": self.process.mesh.replica,
            "world_size": self.process.mesh.replicas,
        }
        self.buffer.load_state_dict(state["buffer"], **layout)
        if self.ahead is not None:
            self.ahead.load_state_dict(state.get("ahead") or [], updates=self.buffer.updates, **layout)


def open_run(
    config: Config, *, process: Process, prompts: Prompts, first_values: Values | None, lr_table: Tensor | None
) -> Run:
    """Opens the models, with the same initial weights, and an empty buffer. Raises CheckpointError for warm_start.path and
    reward.path.
    """
    common = {"process": process, "values": first_values}
    has_critic = config.advantage.baseline == "critic"
    samples = config.rollout.prompts * config.rollout.group_size
    actor = build(config, lr_table=lr_table, **common)
    start_from(config, engine=actor)
    critic = (
        build(
            config,
            lr=config.critic.lr,
            lr_table=policies.learning_rates(config, lr=config.critic.lr),
            is_critic=True,
            strategy=config.critic,
            **common,
        )
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
        best=Best(config),
        environments=open_environments(config),
        ahead=Ahead() if config.rollout.staleness else None,
        drawer=open_drawer(config, actor=actor),
        routers=Routers(actor.module, replays=config.rollout.experts == "replay") if replays_experts(config) else None,
        weights=open_weights(config, actor=actor),
        packs=packs_rollouts(config, policy=actor, reference=reference),
        guards=Guards(
            GuardPolicy(
                kl_above=config.kl.stop_above,
                entropy_below=config.rollout.stop_entropy_below,
                truncated_above=config.rollout.stop_truncated_above,
                equal_steps=config.rollout.stop_equal_steps,
            )
        ),
    )


def open_drawer(config: Config, *, actor: Engine) -> Rollouts:
    """Opens `rollout.engine`; with generator, one copy of the weights per `rollout.tensor` neighbours. A collective call."""
    if config.rollout.servers:
        return open_served(config, actor=actor)
    if config.rollout.engine == "trainer":
        return TrainerRollouts(actor)
    size, process = config.rollout.tensor or 1, actor.process
    if size == 1:
        return CachedRollouts(actor)
    groups = [tuple(range(first, first + size)) for first in range(0, process.world_size, size)]
    return CachedRollouts(actor, comm=process.connect(groups))


def with_own_processes(config: Config) -> Config:
    """Returns the configuration of a second model that draws: servers have the weights of the trained one."""
    return replace(config, rollout=replace(config.rollout, servers=None))


def rollout_policy(
    config: Config, *, stops: tuple[int, ...], weights: RolloutWeights, packs: bool, keeps_experts: bool = False
) -> RolloutPolicy:
    """Returns how answers are drawn by the keys of `rollout`. stops: tokens that end an answer."""
    rollout = config.rollout
    top_p = 1.0 if rollout.top_p is None else rollout.top_p
    return RolloutPolicy(
        length=config.data.seq_len,
        micro_batch=config.train.micro_batch_size,
        max_tokens=rollout.max_tokens,
        stops=stops,
        pad=PAD,
        temperature=rollout.temperature,
        seed=config.train.seed,
        weights=weights,
        packs=packs,
        cut=Cut(top_k=rollout.top_k or 0, top_p=top_p, min_p=rollout.min_p or 0.0),
        keeps_experts=keeps_experts,
    )


def open_weights(config: Config, *, actor: Engine) -> SettledWeights:
    """Returns the setting of `rollout.weights`, with `auto` decided. A collective call."""
    name = config.rollout.weights
    if name is None:
        return SettledWeights(
            weights=RolloutWeights.whole, reason="parameters are not sharded, or not read by forwards"
        )
    is_auto = name is RolloutWeights.auto
    return settle_weights(actor) if is_auto else SettledWeights(weights=name, reason="set by the user")


def open_reference(config: Config, *, actor: Engine, first_values: Values | None) -> Engine | BaseModel | None:
    """Opens the reference of `kl.reference`."""
    if config.kl.reference == "frozen":
        return build_frozen(config, process=actor.process, first_values=first_values)
    return BaseModel(actor) if config.kl.reference == "lora_off" else None


class Savers:
    """Checkpoints of all models that a run needs to continue.

    The policy's is saved last, so that it exists only together with the others.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._stack = run, ExitStack()
        self._policy: checkpoint.Saver | None = None
        self._others: list[checkpoint.Saver] = []
        self.folder = RunFolder(run.config.output_dir).checkpoints

    def __enter__(self) -> "Savers":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _open(self) -> checkpoint.Saver:
        if self._policy is None:
            run, config = self._run, self._run.config
            trained_only = policies.trained_only(config)
            keep, keep_every = config.checkpoint.keep or 2, config.checkpoint.keep_every or 0
            best = bool(config.checkpoint.keep_best)
            # The others keep one more: if a save stops before the policy's part, the policy's previous checkpoint stays complete.
            spare = checkpoint.Retention(keep=keep + 1, keep_every=keep_every, keep_best=best)
            self._others = [
                self._stack.enter_context(
                    checkpoint.Saver(
                        engine,
                        folder=self.folder.parent / name,
                        retention=spare,
                        trained_only=trained_only,
                        local=bool(config.checkpoint.local),
                    )
                )
                for name, engine in others_of(run).items()
            ]
            retention = checkpoint.Retention(keep=keep, keep_every=keep_every, keep_best=best)
            self._policy = self._stack.enter_context(
                checkpoint.Saver(
                    run.actor,
                    folder=self.folder,
                    retention=retention,
                    trained_only=trained_only,
                    local=bool(config.checkpoint.local),
                    record=to_yaml(config),
                )
            )
        return self._policy

    def save(self, *, data_state: Mapping[str, Any], extra: dict[str, Any], metric: float | None = None) -> None:
        """Saves all models after the same optimizer step. A collective call.

        data_state: the run's. metric: for `checkpoint.keep_best`; smaller is better.
        """
        policy = self._open()
        for engine in others_of(self._run).values():
            # A reference makes no steps, so all its checkpoints would have the same name.
            engine.global_steps = self._run.actor.global_steps
        for saver in self._others:
            saver.save(metric=metric)
        policy.save(data_state=data_state, extra=extra, metric=metric)


def others_of(run: Run) -> dict[str, Engine]:
    """Returns the models other than the policy that a checkpoint needs. With new adapters, the reference is `model.path`."""
    is_base = policies.trained_only(run.config) and run.config.warm_start.path is None
    others = {"critic": run.critic, "reference": None if is_base else run.reference}
    return {name: engine for name, engine in others.items() if isinstance(engine, Engine)}


def resume(run: Run) -> dict[str, Any]:
    """Restores all models and the run from `checkpoint.resume`. Returns the reporter's state."""
    loaded = load_past(run.config, engine=run.actor)
    if loaded is None:
        return {}
    for name, engine in others_of(run).items():
        path = loaded.path.parent.parent / name / loaded.path.name
        checkpoint.load(engine, path=path, local=bool(run.config.checkpoint.local))
    run.load_state_dict(loaded.data_state)
    if run.process.rank == 0:
        print(f"continues after step {loaded.step} from {loaded.path}, saved by {loaded.saved_world_size} ranks")
    return (loaded.extra or {}) | {"first_step": run.actor.global_steps}
