"""DeepSpeed's pipeline schedules as instructions: as recorded from it, and as its engine and ztk's would have to agree."""

from itertools import product

import pytest

from ztk.deepspeed.names.tree import module_of
from ztk.parallel.pipeline import make_schedule

schedule = module_of("deepspeed.runtime.pipe.schedule")

# Recorded from DeepSpeed 0.19.8: (schedule, micro-batches, stages, stage) -> instructions of each step.
RECORDED = [
    (
        ("TrainSchedule", 3, 2, 0),
        [
            "LoadMicroBatch0 ForwardPass0",
            "SendActivation0",
            "LoadMicroBatch1 ForwardPass1",
            "RecvGrad0 SendActivation1 BackwardPass0",
            "LoadMicroBatch0 ForwardPass0",
            "RecvGrad1 SendActivation0 BackwardPass1",
            "",
            "RecvGrad0 BackwardPass0 ReduceTiedGrads ReduceGrads OptimizerStep",
        ],
    ),
    (
        ("InferenceSchedule", 2, 3, 1),
        ["", "RecvActivation0 ForwardPass0", "RecvActivation1 SendActivation0 ForwardPass1", "SendActivation1"],
    ),
    (
        ("DataParallelSchedule", 2, 1, 0),
        [
            "LoadMicroBatch0 ForwardPass0 BackwardPass0",
            "LoadMicroBatch0 ForwardPass0 BackwardPass0 ReduceGrads OptimizerStep",
        ],
    ),
]
SIZES = [(micro_batches, stages) for micro_batches, stages in product((1, 2, 3, 8), (1, 2, 3, 4))]


@pytest.mark.parametrize(("arguments", "expected"), RECORDED)
def test_steps_are_deepspeeds(arguments, expected):
    name, *sizes = arguments
    found = getattr(schedule, name)(*sizes)
    for _ in range(2):  # it can be iterated again
        assert [" ".join(f"{i.name}{i.kwargs.get('buffer_id', '')}" for i in step) for step in found] == expected


@pytest.mark.parametrize("name", ["TrainSchedule", "InferenceSchedule"])
@pytest.mark.parametrize(("micro_batches", "stages"), SIZES)
def test_every_send_has_its_receive(name, micro_batches, stages):
    """In the same step of the neighbour, as often as there are micro-batches, between buffers that exist."""
    made = [getattr(schedule, name)(micro_batches, stages, stage) for stage in range(stages)]
    ranks = [list(each) for each in made]

    def steps(stage, kind):
        return [step for step, found in enumerate(ranks[stage]) for i in found if type(i) is getattr(schedule, kind)]

    for stage in range(stages - 1):
        sent = steps(stage, "SendActivation")
        assert sent == steps(stage + 1, "RecvActivation") and len(sent) == micro_batches
        back = steps(stage + 1, "SendGrad")
        assert back == steps(stage, "RecvGrad") and len(back) == (micro_batches if name == "TrainSchedule" else 0)
    for stage in range(stages):
        assert len(steps(stage, "ForwardPass")) == micro_batches
        for found in ranks[stage]:
            buffers = [i.buffer_id for i in found if isinstance(i, schedule.BufferOpInstruction)]
            assert all(0 <= buffer < made[stage].num_pipe_buffers() for buffer in buffers)
        assert (made[stage].is_first_stage, made[stage].is_last_stage) == (stage == 0, stage == stages - 1)


@pytest.mark.parametrize(("micro_batches", "stages"), SIZES)
def test_the_order_of_computing_is_the_engines(micro_batches, stages):
    engine = make_schedule("1f1b", num_ranks=stages, num_micro_batches=micro_batches)
    kinds = {schedule.ForwardPass: "F", schedule.BackwardPass: "B"}
    for stage in range(stages):
        found = [
            kinds[type(i)]
            for step in schedule.TrainSchedule(micro_batches, stages, stage)
            for i in step
            if type(i) in kinds
        ]
        assert found == [action.kind.value for action in engine.computes(stage)]


def test_a_script_extends_them():
    class Twice(schedule.PipeSchedule):
        def steps(self):
            yield [schedule.ForwardPass(self._buffer_idx(3), chunk=1)]

    found = Twice(micro_batches=4, stages=2, stage_id=1)
    ((instruction,),) = found
    assert repr(instruction) == "ForwardPass(buffer_id=3, chunk=1)"
    assert (instruction.buffer_id, instruction.chunk) == (3, 1) and (found.prev_stage, found.num_stages) == (0, 2)
    with pytest.raises(ValueError, match="stage_id=2"):
        Twice(4, 2, 2)
