"""`deepspeed.runtime.pipe.schedule`: DeepSpeed's pipeline schedules as lists of instructions, for scripts that read or extend them.

ztk's engine runs the schedules of `ztk.parallel.pipeline.schedule`. Computations have the same order; transfers are placed according to
[Note: One order of all events]. Subclasses of the schedules here do not affect it. DualPipeVSchedule is not available.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from ztk.deepspeed.tools.helpers import call_to_str


class PipeInstruction:
    """An instruction for a stage. Keyword arguments become attributes."""

    def __init__(self, **kwargs: object) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class BufferOpInstruction(PipeInstruction):
    """An instruction about the stage's buffer `buffer_id`."""

    def __init__(self, buffer_id: int, **kwargs: object) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


def _kind(name: str, doc: str, *, base: type[PipeInstruction] = BufferOpInstruction) -> Any:
    return type(name, (base,), {"__doc__": doc, "__module__": __name__})


OptimizerStep = _kind(
    "OptimizerStep", "Runs the optimizer's step after all gradients are reduced.", base=PipeInstruction
)
ReduceGrads = _kind("ReduceGrads", "Reduces gradients over the data-parallel ranks of the stage.", base=PipeInstruction)
ReduceTiedGrads = _kind(
    "ReduceTiedGrads", "Reduces gradients of tied layers over the stages that hold them.", base=PipeInstruction
)
LoadMicroBatch = _kind(
    "LoadMicroBatch", "Loads the next micro-batch into a buffer: inputs on the first stage, labels on the last."
)
ForwardPass = _kind("ForwardPass", "Runs the stage's forward of a buffer.")
BackwardPass = _kind("BackwardPass", "Runs the stage's backward of a buffer.")
SendActivation = _kind("SendActivation", "Sends the output to the next stage.")
RecvActivation = _kind("RecvActivation", "Receives the input from the previous stage.")
SendGrad = _kind("SendGrad", "Sends the gradient of the input to the previous stage.")
RecvGrad = _kind("RecvGrad", "Receives the gradient of the output from the next stage.")


class PipeSchedule(ABC):
    """The instructions of stage `stage_id` of `stages` for `micro_batches`: iterates over steps, each a list of instructions.

    Stages may synchronize between steps. Raises ValueError for an invalid stage.
    """

    def __init__(self, micro_batches: int, stages: int, stage_id: int) -> None:
        if micro_batches < 1 or not 0 <= stage_id < stages:
            raise ValueError(
                f"micro_batches={micro_batches}, stages={stages}, stage_id={stage_id}: one micro-batch or more, and a "
                "stage_id from 0 to below stages"
            )
        self.micro_batches, self.stages, self.stage_id = micro_batches, stages, stage_id
        self.prev_stage, self.next_stage = stage_id - 1, stage_id + 1
        self.it: Iterator[list[PipeInstruction]] | None = None

    @abstractmethod
    def steps(self) -> Iterator[list[PipeInstruction]]:
        """Yields one list per step."""

    def num_pipe_buffers(self) -> int:
        """Returns the number of micro-batches that the stage holds at a time."""
        return self.micro_batches

    stage = property(attrgetter("stage_id"), doc="This stage, from 0.")
    num_stages = property(attrgetter("stages"), doc="How many stages there are.")
    num_micro_batches = property(attrgetter("micro_batches"), doc="Micro-batches of a step.")

    @property
    def is_first_stage(self) -> bool:
        return self.stage_id == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage_id == self.stages - 1

    def __iter__(self) -> Iterator[list[PipeInstruction]]:
        self.it = None
        return self

    def __next__(self) -> list[PipeInstruction]:
        if self.it is None:
            self.it = self.steps()
        return next(self.it)

    def _valid_micro_batch(self, micro_batch_id: int) -> bool:
        return 0 <= micro_batch_id < self.micro_batches

    def _buffer_idx(self, micro_batch_id: int) -> int:
        """Buffers are used in turn."""
        return micro_batch_id % self.num_pipe_buffers()


class InferenceSchedule(PipeSchedule):
    """Forwards only: micro-batch m is in stage s at step s + m, and its output is sent at the next step."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for step in range(self.micro_batches + self.stages - 1):
            micro_batch, buffer = step - self.stage_id, (step + self.stage_id) % 2
            computes = self._valid_micro_batch(micro_batch)
            instructions, send, receive = [], [], []
            if computes and (self.is_first_stage or self.is_last_stage):
                instructions.append(LoadMicroBatch(buffer))
            if self._valid_micro_batch(micro_batch - 1) and not self.is_last_stage:
                send.append(SendActivation(1 - buffer))
            if computes and not self.is_first_stage:
                receive.append(RecvActivation(buffer))
            # One of two neighbours sends first, because both would block otherwise.
            instructions += receive + send if self.stage_id % 2 else send + receive
            yield instructions + ([ForwardPass(buffer)] if computes else [])

    def num_pipe_buffers(self) -> int:
        return 2


class TrainSchedule(PipeSchedule):
    """1F1B: stage s runs the forward of micro-batch m at step s + 2m and its backward at step 2 * stages - 1 - s + 2m.

    Narayanan et al. 2019, https://arxiv.org/abs/1806.03377.
    """

    def steps(self) -> Iterator[list[PipeInstruction]]:
        num_steps = 2 * (self.micro_batches + self.stages - 1)
        for step in range(num_steps):
            micro_batch, is_forward = self._step_to_micro_batch(step)
            before, _ = self._step_to_micro_batch(step - 1)  # of the other kind; none before step 0
            sends = self._valid_micro_batch(before)
            computes = self._valid_micro_batch(micro_batch)
            instructions = []
            if is_forward and not self.is_first_stage:
                instructions += [SendGrad(self._buffer_idx(before))] if sends else []
                instructions += [RecvActivation(self._buffer_idx(micro_batch))] if computes else []
            if not is_forward and not self.is_last_stage:
                instructions += [RecvGrad(self._buffer_idx(micro_batch))] if computes else []
                instructions += [SendActivation(self._buffer_idx(before))] if sends else []
            if computes:
                buffer = self._buffer_idx(micro_batch)
                if is_forward and (self.is_first_stage or self.is_last_stage):
                    instructions.append(LoadMicroBatch(buffer))
                instructions.append(ForwardPass(buffer) if is_forward else BackwardPass(buffer))
            if step == num_steps - 1:
                instructions += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield instructions

    def num_pipe_buffers(self) -> int:
        """Returns the number of stages from this one on, at most the number of micro-batches and at least 2."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """Returns (micro-batch, whether its forward). The micro-batch may be out of range."""
        if (step_id - self.stage_id) % 2 == 0:
            return (step_id - self.stage_id) // 2, True
        return (step_id + self.stage_id + 1) // 2 - self.stages, False


class DataParallelSchedule(PipeSchedule):
    """One stage: accumulates the gradients of all micro-batches, then steps."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for micro_batch in range(self.micro_batches):
            last = [ReduceGrads(), OptimizerStep()] if micro_batch == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *last]

    def num_pipe_buffers(self) -> int:
        return 1
