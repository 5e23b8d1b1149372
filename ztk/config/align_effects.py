"""Which keys of rollouts, alignment and their records have an effect in which runs."""

from collections.abc import Callable, Iterator

from ztk.config.effect import Effect, keys_of
from ztk.config.machine import Machine
from ztk.config.rollout_schema import PolicyForm, ReferenceName, RolloutEngineName, RolloutIdentity
from ztk.config.schema import Config, DataName, ZeroEngine
from ztk.config.text import has_tokenizer


def _task(*names: str) -> Callable[[Config, Machine], bool]:
    return lambda config, machine: config.task.name in names


def reads_records(config: Config) -> bool:
    """Whether examples are chats or preferences."""
    return config.data.name in (DataName.chat, DataName.preferences)


def reads_lines(config: Config) -> bool:
    """Whether `data.path` may name lines of JSON with texts."""
    return reads_records(config) or config.data.name is DataName.prompts


def _draws(config: Config, machine: Machine) -> bool:
    """Whether the task draws answers from the policy."""
    return config.task.name in ("grpo", "ppo")


def _warms(config: Config, machine: Machine) -> bool:
    """Whether supervised steps may come first."""
    return config.task.name in ("grpo", "ppo", "dpo")


_STRATEGY = ("zero", "offload", "precision")  # of a model beside the policy


def _references(config: Config) -> tuple[str | None, ...]:
    if config.task.name == "dpo":
        return (config.dpo.reference,)
    return (config.kl.reference,) if config.task.name in ("grpo", "ppo") else ()


def _rollout_effects() -> Iterator[Effect]:
    only = "task=grpo or task=ppo"
    required = {
        "rollout": "prompts group_size max_tokens temperature engine identity drop_equal_groups mask_truncated show_every",
        "advantage": "baseline scale",
        "policy": "ratio form clip_low clip_high average",
        "kl": "reference coef",
        "reward": "timeout_seconds",
    }
    for section, names in required.items():
        yield Effect(keys=keys_of(section, *names.split()), when=_draws, only=only)
    yield Effect(keys=("warm_start.steps",), when=_warms, only="task=grpo, task=ppo or task=dpo")
    yield Effect(
        keys=("rollout.task",),
        when=lambda c, m: c.task.name in ("sft", "reward", "dpo", "grpo", "ppo") and c.data.path is None,
        only="task=sft, reward, dpo, grpo or ppo without data.path",
        required=False,
    )
    optional = ("rollout.stop_entropy_below", "kl.stop_above", "reward.function", "reward.path")
    yield Effect(keys=optional, when=_draws, only=only, required=False)
    yield Effect(
        keys=("rollout.weights",),
        when=lambda c, m: (
            _draws(c, m)
            and c.zero.engine is ZeroEngine.ztk
            and c.zero.stage == 3
            and c.rollout.engine is RolloutEngineName.trainer
        ),
        only=f"{only} and zero=stage3, and rollout.engine=trainer",
    )
    yield Effect(
        keys=("rollout.tensor",),
        when=lambda c, m: _draws(c, m) and c.rollout.engine is RolloutEngineName.generator,
        only=f"{only} and rollout.engine=generator",
    )
    yield Effect(
        keys=("policy.dual_clip",),
        when=lambda c, m: _draws(c, m) and c.policy.form is PolicyForm.clipped,
        only=f"{only} and policy.form=clipped",
        required=False,
    )
    yield Effect(
        keys=("kl.estimator", "kl.place"),
        when=lambda c, m: _draws(c, m) and bool(c.kl.coef),
        only=f"{only} and kl.coef above 0",
    )
    yield Effect(
        keys=keys_of("warm_start", "correct", "lr", "batch_size"),
        when=lambda c, m: _warms(c, m) and bool(c.warm_start.steps),
        only="task=grpo, task=ppo or task=dpo with warm_start.steps above 0",
    )
    yield Effect(
        keys=("advantage.gamma", "advantage.lam", "critic.lr", "critic.value_clip"),
        when=lambda c, m: c.task.name == "ppo",
        only="task=ppo",
    )
    yield Effect(
        keys=keys_of("critic", *_STRATEGY),
        when=lambda c, m: c.task.name == "ppo",
        only="task=ppo",
        required=False,
    )
    yield Effect(
        keys=keys_of("reference", *_STRATEGY),
        when=lambda c, m: ReferenceName.frozen in _references(c),
        only="kl.reference=frozen or dpo.reference=frozen",
        required=False,
    )
    yield Effect(
        keys=keys_of("reward", *_STRATEGY),
        when=lambda c, m: _draws(c, m) and c.reward.path is not None,
        only=f"{only} and reward.path",
        required=False,
    )
    yield Effect(
        keys=("rollout.correction_max",),
        when=lambda c, m: _draws(c, m) and c.rollout.identity is RolloutIdentity.corrected,
        only="rollout.identity=corrected",
    )


def _alignment_effects() -> Iterator[Effect]:
    yield Effect(keys=("sft.mask_prompts",), when=_task("sft"), only="task=sft")
    yield Effect(keys=keys_of("reward", "loss", "margin", "centring"), when=_task("reward"), only="task=reward")
    yield Effect(
        keys=keys_of("dpo", "loss", "beta", "label_smoothing", "length_normalised", "sft_weight", "reference"),
        when=_task("dpo"),
        only="task=dpo",
    )
    yield Effect(
        keys=("warm_start.path",),
        when=_task("sft", "reward", "dpo", "grpo", "ppo"),
        only="task=sft, task=reward, task=dpo, task=grpo or task=ppo",
        required=False,
    )
    yield Effect(
        keys=("data.stop",),
        when=lambda c, m: reads_records(c) and not (has_tokenizer(c) and c.data.path is not None),
        only="data=chat or data=preferences with data.tokenizer=bytes; a tokenizer's end token ends answers",
    )
    yield Effect(
        keys=("data.chat_template",),
        when=lambda c, m: reads_lines(c) and has_tokenizer(c) and c.data.path is not None,
        only="data=chat, data=preferences or data=prompts with data.path and data.tokenizer=FOLDER",
    )
    yield Effect(
        keys=("data.truncate_prompts",),
        when=lambda c, m: _draws(c, m) and c.data.name is DataName.prompts and c.data.path is not None,
        only="task=grpo or task=ppo with data=prompts and data.path",
        required=False,
    )


ALIGN_EFFECTS = (*_rollout_effects(), *_alignment_effects())
