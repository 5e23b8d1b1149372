"""Seconds of a rollout: servers draw, the trainer scores and updates, and weights go from one to the others.

They are lower bounds from rates: a token of a decoding step reads all weights once for all sequences, and the keys and values of each one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ztk.core.policies.hardware import Hardware
from ztk.planner.result import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutWork:
    """The work of a rollout.

    answers: number of them. prompt_tokens, answer_tokens: mean lengths. scoring_models: models that read every answer once, of the policy's
    size, such as policy, reference and reward model. cache_bytes: bytes of the keys and values of a token in all layers. sequences: answers
    that a server draws at a time.
    """

    answers: int
    prompt_tokens: float
    answer_tokens: float
    scoring_models: float
    cache_bytes: int
    sequences: int

    @property
    def tokens(self) -> float:
        """Number in all prompts and answers."""
        return self.answers * (self.prompt_tokens + self.answer_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutPlan:
    """Seconds of a rollout with `servers` servers.

    draws: until all answers are drawn. draws_alone: with one server. scores, updates: on the trainer. sends: until every server has the
    weights, one after the other.
    """

    servers: int
    draws: float
    draws_alone: float
    scores: float
    updates: float
    sends: float

    @property
    def needed(self) -> int:
        """Servers that draw a rollout while the trainer scores and updates on the one before."""
        return math.ceil(self.draws_alone / (self.scores + self.updates))

    @property
    def in_turns(self) -> float:
        """Seconds of a rollout if nothing overlaps, as with rollout.staleness=0."""
        return self.draws + self.scores + self.updates + self.sends

    @property
    def overlapped(self) -> float:
        """Seconds of a rollout if servers draw while the trainer works, and take weights meanwhile, as with rollout.staleness=1."""
        return max(self.draws, self.scores + self.updates, self.sends)

    @property
    def in_time(self) -> float:
        """Share of a rollout's draws that end while the trainer scores and updates. rollout.late=cut cuts the answers of the others."""
        return min(1.0, (self.scores + self.updates) / self.draws)

    def row(self) -> dict[str, Any]:
        """Flat keys and plain numbers."""
        return {
            "rollout.servers": self.servers,
            "rollout.draw_seconds": self.draws,
            "rollout.score_seconds": self.scores,
            "rollout.update_seconds": self.updates,
            "rollout.transfer_seconds": self.sends,
            "rollout.seconds": self.in_turns,
            "rollout.overlapped_seconds": self.overlapped,
            "rollout.servers_needed": self.needed,
            "rollout.in_time": self.in_time,
        }

    def lines(self) -> Iterator[str]:
        """The plan as lines of text."""
        busy = (self.scores + self.updates) / self.overlapped
        yield (
            f"  a rollout with {self.servers} servers: {self.draws:.3g} s drawing, {self.scores:.3g} s scoring, {self.updates:.3g} s updates, "
            f"{self.sends:.3g} s transfer of weights"
        )
        yield f"  rollout.staleness=0 takes {self.in_turns:.3g} s, 1 takes {self.overlapped:.3g} s; the trainer computes for {busy:.0%} of them"
        yield f"  {self.needed} servers keep the trainer busy"
        if self.in_time < 1:
            yield f"  rollout.late=cut: {self.in_time:.0%} of the drawing ends in time, and answers that are under way then are cut"


def plan_rollout(
    made: Plan, *, work: RolloutWork, servers: int, devices: int, hardware: Hardware, weight_bytes: int
) -> RolloutPlan:
    """Plans a rollout of the run that `made` is the plan of, with its hardware for the trainer.

    servers: their number. devices: the devices of one server, which divide its model. hardware: their kind. weight_bytes: bytes of a parameter.

    Raises ValueError for hardware without the bandwidth of a network.
    """
    trainer = made.hardware
    assert trainer is not None and made.time is not None and made.tokens, "a plan with hardware has seconds"
    bandwidths = (trainer.network_bandwidth, hardware.network_bandwidth)
    if None in bandwidths:
        raise ValueError(
            "hardware.network_bandwidth=null: weights go to servers over the network; give bytes per second"
        )
    weights, dtype = made.parameters * weight_bytes, "bfloat16" if weight_bytes == 2 else "float32"
    rate, memory = hardware.reached(dtype) * devices, hardware.memory_bandwidth * hardware.memory_share * devices
    at_once = min(work.sequences, work.answers)
    held = at_once * work.cache_bytes * (work.prompt_tokens + work.answer_tokens / 2)
    step = max((weights + held) / memory, 2 * made.parameters * at_once / rate)
    prefill = 2 * made.parameters * work.answers * work.prompt_tokens / rate
    steps = work.answers / at_once * work.answer_tokens
    alone = prefill + steps * step
    forwards = made.model_flops / 3 * work.tokens / made.tokens  # a step is a forward and a backward of twice its work
    return RolloutPlan(
        servers=servers,
        draws=alone / servers,
        draws_alone=alone,
        scores=work.scoring_models * forwards / (trainer.reached(dtype) * made.world_size),
        updates=made.time.seconds * work.tokens / made.tokens,
        sends=servers * weights / min(bandwidth for bandwidth in bandwidths if bandwidth is not None),
    )
