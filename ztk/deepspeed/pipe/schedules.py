"""`deepspeed.runtime.pipe.schedule`: DeepSpeed's pipeline schedules as lists of instructions, for scripts that read or extend them.

An engine here runs `ztk.parallel.pipeline.schedule`'s, in the same order of computing but with transfers placed as [Note: One order of all
events] says: a subclass of these changes nothing in it. DualPipeVSchedule is not offered.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from ztk.deepspeed.tools.helpers import call_to_str


class PipeInstruction:
    """One thing for a stage to do. Keyword arguments become attributes."""

    def __init__(self, **kwargs: object) -> None:
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self) -> str:
        return call_to_str(self.name, **self.kwargs)


class BufferOpInstruction(PipeInstruction):
    """Something with the stage's buffer `buffer_id`."""

    def __init__(self, buffer_id: int, **kwargs: object) -> None:
        super().__init__(buffer_id=buffer_id, **kwargs)


def _kind(name: str, doc: str, *, base: type[PipeInstruction] = BufferOpInstruction) -> Any:
    return type(name, (base,), {"__doc__": doc, "__module__": __name__})


OptimizerStep = _kind("OptimizerStep", "The optimizer's step, after all gradients are reduced.", base=PipeInstruction)
ReduceGrads = _kind("ReduceGrads", "Gradients, over the data-parallel ranks of the stage.", base=PipeInstruction)
ReduceTiedGrads = _kind(
    "ReduceTiedGrads", "Those of tied layers, over the stages that hold them.", base=PipeInstruction
)
LoadMicroBatch = _kind("LoadMicroBatch", "The next one into a buffer: inputs on the first stage, labels on the last.")
ForwardPass = _kind("ForwardPass", "The stage's forward of a buffer.")
BackwardPass = _kind("BackwardPass", "The stage's backward of a buffer.")
SendActivation = _kind("SendActivation", "The output, to the next stage.")
RecvActivation = _kind("RecvActivation", "The input, from the stage before.")
SendGrad = _kind("SendGrad", "The gradient of the input, to the stage before.")
RecvGrad = _kind("RecvGrad", "The gradient of the output, from the next stage.")


class PipeSchedule(ABC):
    """What stage `stage_id` of `stages` does with `micro_batches`: an iterator over steps, each a list of instructions.

    Between steps all stages may wait for each other. Raises ValueError for a stage that there is not.
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
        """One list per step."""

    def num_pipe_buffers(self) -> int:
        """Micro-batches that the stage holds at once."""
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
    """Forwards only: micro-batch m is in stage s at step s + m, and its output is sent at the step after."""

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
            # Of two neighbours one sends first: blocking transfers cannot wait for each other.
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
        """At least 2; as many micro-batches as there are stages from this one on, if there are as many."""
        return max(2, min(self.stages - self.stage_id, self.micro_batches))

    def _step_to_micro_batch(self, step_id: int) -> tuple[int, bool]:
        """(micro-batch, whether its forward); the micro-batch may be one that there is not."""
        if (step_id - self.stage_id) % 2 == 0:
            return (step_id - self.stage_id) // 2, True
        return (step_id + self.stage_id + 1) // 2 - self.stages, False


class DataParallelSchedule(PipeSchedule):
    """One stage: gradients of all micro-batches add up, then the optimizer steps."""

    def steps(self) -> Iterator[list[PipeInstruction]]:
        for micro_batch in range(self.micro_batches):
            last = [ReduceGrads(), OptimizerStep()] if micro_batch == self.micro_batches - 1 else []
            yield [LoadMicroBatch(0), ForwardPass(0), BackwardPass(0), *last]

    def num_pipe_buffers(self) -> int:
        return 1
