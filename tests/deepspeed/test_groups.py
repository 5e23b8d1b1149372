"""Parameter groups of torch's SGD, tags, gradients of a step that was begun; a pipeline's grid needs no process."""

import pytest
import torch
from torch import nn

import ztk.deepspeed as deepspeed
from ztk.deepspeed.pipe import PipeDataParallelTopology, PipelineParallelGrid

CONFIG = {"train_batch_size": 1}


def groups(*options: dict) -> tuple[nn.Module, torch.optim.SGD]:
    """Of a new layer's weight and bias."""
    layer = nn.Linear(4, 4)
    return layer, torch.optim.SGD(
        [{"params": [p], **o} for p, o in zip(layer.parameters(), options, strict=True)], lr=0.1
    )


def test_one_group_without_momentum_trains_as_in_torch():
    torch.manual_seed(0)
    model, optimizer = groups({"momentum": 0.9, "nesterov": True}, {"momentum": 0.0})
    torch.manual_seed(0)
    plain, reference = groups({"momentum": 0.9, "nesterov": True}, {"momentum": 0.0})
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config={**CONFIG, "gradient_clipping": 0.0})
    for _ in range(3):
        engine.backward(engine(torch.ones(1, 4)).square().sum())
        engine.step()
        reference.zero_grad()
        plain(torch.ones(1, 4)).square().sum().backward()
        reference.step()
    for (name, ours), theirs in zip(engine.engine.zero.full_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)
    engine.destroy()


def test_loading_drops_the_gradients_of_a_step_that_was_begun(tmp_path):
    """The step after it is that of the saved engine, not one with a micro-batch of before."""

    def begin():
        torch.manual_seed(0)
        model, config = nn.Linear(4, 4), {"train_batch_size": 2, "gradient_accumulation_steps": 2}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return deepspeed.initialize(model=model, optimizer=optimizer, config={**config, "gradient_clipping": 0.0})[0]

    def run(engine, *, value: float, times: int):
        for _ in range(times):
            engine.backward(engine(torch.full((1, 4), value)).sum())
            engine.step()

    engine = begin()
    engine.save_checkpoint(tmp_path)
    run(engine, value=1.0, times=2)
    expected = [value.clone() for _, value in engine.engine.zero.full_parameters()]
    engine.load_checkpoint(tmp_path)
    run(engine, value=100.0, times=1)
    engine.load_checkpoint(tmp_path)
    run(engine, value=1.0, times=2)
    found = [value.clone() for _, value in engine.engine.zero.full_parameters()]
    engine.destroy()
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("tag", ["..", ".", "a/b", "  x  ", ""])
def test_tags_that_are_no_folders_are_refused(tmp_path, tag):
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=CONFIG)
    with pytest.raises(ValueError, match="must be the name of a folder"):
        engine.save_checkpoint(tmp_path, tag=tag)
    engine.destroy()


def test_a_grid_of_a_topology_or_of_none():
    grid = PipelineParallelGrid(topology=PipeDataParallelTopology(num_pp=1, num_dp=1))
    assert (grid.get_stage_id(), grid.get_data_parallel_world_size(), grid.is_last_stage()) == (0, 1, True)
    assert PipelineParallelGrid().get_pipe_parallel_world_size() == 1
    with pytest.raises(ValueError, match="has 2 ranks, and 1 were started"):
        PipelineParallelGrid(topology=PipeDataParallelTopology(num_pp=2, num_dp=1))
