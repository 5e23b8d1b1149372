"""Guards that stop a run that no longer learns, or learns the wrong thing, with an explanation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class RolloutStopped(RuntimeError):
    """A guard ended the run. The message names the guard, the cause and the fix, so that the run shows no trace."""

    shows_trace = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardPolicy:
    """kl_above: stops above this KL divergence to the reference, in nats per answer. entropy_below: stops below this mean entropy of the
    policy, in nats per token. truncated_above: stops above this fraction of truncated answers. equal_steps: stops after this many
    consecutive rollouts in which all answers to each prompt had equal rewards. None disables a guard.
    """

    kl_above: float | None = None
    entropy_below: float | None = None
    truncated_above: float | None = 0.9
    equal_steps: int | None = 5


class Guards:
    """Checks the metrics of every rollout, with the same result on all ranks."""

    def __init__(self, policy: GuardPolicy) -> None:
        self._policy = policy
        self._equal_steps = 0  # consecutive rollouts in which every group's rewards were equal

    def fault(self, metrics: Mapping[str, Any], *, step: int, max_tokens: int) -> str | None:
        """Returns the reason to stop the run, or None.

        metrics: the fractions `truncated`, `excluded` and `equal_groups`; `kl` with a reference; `entropy` if known.
        """
        policy, kl, entropy = self._policy, metrics.get("kl"), metrics.get("entropy")
        self._equal_steps = self._equal_steps + 1 if metrics["equal_groups"] == 1 else 0
        if policy.kl_above is not None and kl is not None and kl > policy.kl_above:
            return f"step {step}: the KL divergence to the reference is {kl:.3f} nats per answer, above kl.stop_above={policy.kl_above:g}"
        if policy.truncated_above is not None and metrics["truncated"] > policy.truncated_above:
            return (
                f"step {step}: {metrics['truncated']:.0%} of the answers were cut at rollout.max_tokens={max_tokens}: raise it, start from a "
                "model that ends its answers, or use rollout.stop_truncated_above=null"
            )
        if metrics["excluded"] == 1:
            return f"step {step}: the reward function returned None for every answer, so nothing can be learnt: look at its conditions"
        if policy.equal_steps is not None and self._equal_steps >= policy.equal_steps:
            return (
                f"step {step}: for {policy.equal_steps} steps all answers to each prompt had equal rewards, so nothing can be learnt: look at "
                "samples.jsonl and at the reward function, raise rollout.group_size or rollout.temperature, or use "
                "rollout.stop_equal_steps=null"
            )
        if policy.entropy_below is not None and entropy is not None and entropy < policy.entropy_below:
            return (
                f"step {step}: the policy's entropy is {entropy:.4f} nats per token, below "
                f"rollout.stop_entropy_below={policy.entropy_below:g}: lower optimizer.lr, or raise kl.coef"
            )
        return None

    def state_dict(self) -> dict[str, int]:
        """Returns the state for a checkpoint."""
        return {"equal_steps": self._equal_steps}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Restores the result of `state_dict`."""
        self._equal_steps = state["equal_steps"]
