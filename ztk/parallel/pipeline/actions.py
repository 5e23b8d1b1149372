"""The actions that a pipeline rank runs: computations and transfers of one stage and micro-batch."""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """The kinds of actions. Comments refer to the stage of the action."""

    forward = "F"
    backward = "B"  # gradients of input and weights
    backward_input = "I"  # the gradient of the input, for which the previous stage waits
    backward_weight = "W"  # the gradients of the weights, deferred by `backward_input`
    send_activation = "SA"  # the stage's output, to the next stage
    receive_activation = "RA"  # the stage's input, from the previous stage
    send_gradient = "SG"  # the gradient of the stage's input, to the previous stage
    receive_gradient = "RG"  # the gradient of the stage's output, from the next stage

    @property
    def computes(self) -> bool:
        """Whether it is a computation."""
        return self in _COMPUTES

    @property
    def sends(self) -> bool:
        """Whether it sends to another rank."""
        return self in (Kind.send_activation, Kind.send_gradient)

    @property
    def receives(self) -> bool:
        """Whether it receives from another rank."""
        return self in (Kind.receive_activation, Kind.receive_gradient)


_COMPUTES = frozenset({Kind.forward, Kind.backward, Kind.backward_input, Kind.backward_weight})


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Action:
    """One step: `kind` for one stage and one micro-batch. Stages are numbered over the full model, from 0."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro_batch}"

    @property
    def other_end(self) -> "Action":
        """The receive of a send and the send of a receive.

        Raises:
            ValueError: for a computation.
        """
        match self.kind:
            case Kind.send_activation:
                kind, stage = Kind.receive_activation, self.stage + 1
            case Kind.receive_activation:
                kind, stage = Kind.send_activation, self.stage - 1
            case Kind.send_gradient:
                kind, stage = Kind.receive_gradient, self.stage - 1
            case Kind.receive_gradient:
                kind, stage = Kind.send_gradient, self.stage + 1
            case _:
                raise ValueError(f"{self} is no transfer")
        return Action(kind=kind, stage=stage, micro_batch=self.micro_batch)


def needs(action: Action, *, num_stages: int, is_split: bool) -> list[Action]:
    """The computations, on any rank, that must end before the computation `action` may begin.

    Raises:
        ValueError: for a transfer.
    """
    stage, micro_batch = action.stage, action.micro_batch
    backward = Kind.backward_input if is_split else Kind.backward
    match action.kind:
        case Kind.forward:
            return [Action(kind=Kind.forward, stage=stage - 1, micro_batch=micro_batch)] if stage else []
        case Kind.backward | Kind.backward_input:
            needed = [Action(kind=Kind.forward, stage=stage, micro_batch=micro_batch)]
            if stage + 1 < num_stages:
                needed.append(Action(kind=backward, stage=stage + 1, micro_batch=micro_batch))
            return needed
        case Kind.backward_weight:
            return [Action(kind=Kind.backward_input, stage=stage, micro_batch=micro_batch)]
        case _:
            raise ValueError(f"{action} is no computation")
