"""Parameter groups of SGD, tags that two engines would share, gradients of a begun step; a grid of a pipeline needs no process."""

import collections

import pytest
import torch
from torch import nn

import ztk.deepspeed as deepspeed
from ztk.checkpoint.errors import SaveFailed
from ztk.deepspeed.pipe import PipeDataParallelTopology, PipelineParallelGrid
from ztk.deepspeed.tools.log import logger

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
    """The step after the load equals the saved engine's. It does not contain a micro-batch from before."""

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


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(words)).square().mean()


def test_sparse_gradients_train_as_in_torch():
    words, plain = torch.tensor([1, 2, 2, 5]), Words()
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    model = Words()
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=CONFIG | {"gradient_clipping": 0.0}
    )
    for _ in range(2):
        sgd.zero_grad()
        plain(words).backward()
        sgd.step()
        engine.backward(engine(words))
        engine.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    engine.destroy()


@pytest.mark.parametrize("of_client", [True, False])
def test_a_parameter_group_that_comes_later_is_refused(of_client):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    client = torch.optim.SGD(model[0].parameters(), lr=0.1)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=client, config=CONFIG)
    with pytest.raises(ValueError, match="Give all groups to initialize"):
        (client if of_client else optimizer).add_param_group({"params": list(model[1].parameters())})
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
    engine.destroy()


def test_states_are_asked_of_the_optimizer_that_initialize_returned():
    """The client's optimizer has no states while the engine exists, and a load into it would be lost."""
    model = nn.Linear(2, 2)
    client = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=client, config=CONFIG)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    with pytest.raises(RuntimeError, match="the optimizer that initialize returned"):
        client.state_dict()
    with pytest.raises(RuntimeError, match="the optimizer that initialize returned"):
        client.load_state_dict(optimizer.state_dict())
    assert "momentum_buffer" in optimizer.state_dict()["state"][0]
    engine.destroy()
    assert client.state_dict()["state"] == {}


@pytest.mark.parametrize("stage", [0, 2])
def test_what_comes_into_the_model_later_is_refused_unless_it_is_frozen(stage):
    """Refused: a new head, a wrapped layer, a further parameter. Removing or moving modules is allowed."""

    def new_head(model):
        model[1] = nn.Linear(4, 2)

    def wrapped(model):
        model[0] = nn.Sequential(model[0], nn.Linear(4, 4))

    def further(model):
        model[1].scale = nn.Parameter(torch.ones(4))

    def frozen(model):
        model[1] = nn.Sequential(model[1], nn.Linear(4, 4).requires_grad_(False), nn.Identity())

    for change in (new_head, wrapped, further, frozen):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        engine, *_ = deepspeed.initialize(model=model, config={**CONFIG, "zero_optimization": {"stage": stage}})
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
        change(model)
        engine.backward(engine(torch.ones(1, 4)).sum())
        if change is frozen:
            engine.step()
        else:
            with pytest.raises(RuntimeError, match="came into the model after the engine was built"):
                engine.step()
        engine.destroy()


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_step_hooks_of_the_optimizers_are_called(is_pipeline):
    layer, called = nn.Linear(2, 2), []
    model = (
        deepspeed.PipelineModule(layers=[layer], num_stages=1, loss_fn=lambda x, y: (x - y).square().mean())
        if is_pipeline
        else layer
    )
    client = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=client, config=CONFIG)
    for name, of in (("client", client), ("engine", optimizer)):
        of.register_step_pre_hook(lambda *_, name=name: called.append(f"{name}, before"))
        of.register_step_post_hook(lambda *_, name=name: called.append(f"{name}, after"))
    for _ in range(2):
        if is_pipeline:
            engine.train_batch(iter([(torch.ones(1, 2), torch.ones(1, 2))]))
        else:
            engine.backward(engine(torch.ones(1, 2)).sum())
            engine.step()
    assert called == ["engine, before", "client, before", "client, after", "engine, after"] * 2
    engine.destroy()


def test_two_engines_do_not_replace_each_others_checkpoints(tmp_path, caplog):
    actor, critic = (deepspeed.initialize(model=nn.Linear(2, 2), config=CONFIG)[0] for _ in range(2))
    actor.save_checkpoint(tmp_path)
    for tag in (None, "global_step0"):
        with pytest.raises(SaveFailed, match="another engine .* save_dir of its own"):
            critic.save_checkpoint(tmp_path, tag=tag)
    with caplog.at_level("WARNING", logger=logger.name):
        critic.save_checkpoint(tmp_path, tag="critic")
    assert "latest names the checkpoint of the engine that saved last" in caplog.text
    critic.save_checkpoint(tmp_path / "critic")
    actor.save_checkpoint(tmp_path)
    actor.destroy()
    critic.save_checkpoint(tmp_path)  # no other engine saves there any more
    critic.destroy()


def test_a_save_between_micro_batches_warns_of_missing_gradients(tmp_path, caplog):
    config = {
        "train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    }
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=config)
    engine.backward(engine(torch.ones(1, 2)).sum())
    engine.step()
    with caplog.at_level("WARNING", logger=logger.name):
        engine.save_checkpoint(tmp_path)
    assert "after 1 of 2 micro-batches" in caplog.text
    engine.destroy()


@pytest.mark.parametrize("tag", ["..", ".", "a/b", "  x  ", ""])
def test_tags_and_places_that_are_no_folders_are_refused(tmp_path, tag):
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config=CONFIG)
    with pytest.raises(ValueError, match="must be the name of a folder"):
        engine.save_checkpoint(tmp_path, tag=tag)
    for save in (engine.save_checkpoint, engine.save_16bit_model):
        for nowhere in ("", None):
            with pytest.raises(ValueError, match="save_dir=.*must name a folder"):
                save(nowhere)
    engine.destroy()


def test_a_grid_of_a_topology_or_of_none():
    grid = PipelineParallelGrid(topology=PipeDataParallelTopology(num_pp=1, num_dp=1))
    assert (grid.get_stage_id(), grid.get_data_parallel_world_size(), grid.is_last_stage()) == (0, 1, True)
    assert PipelineParallelGrid().get_pipe_parallel_world_size() == 1
    with pytest.raises(ValueError, match="has 2 ranks, and 1 were started"):
        PipelineParallelGrid(topology=PipeDataParallelTopology(num_pp=2, num_dp=1))


def test_states_are_not_changed_through_optimizer_state():
    """Scripts reset an optimizer so (`optimizer.state.clear()`), and nothing would happen."""
    model, sgd = groups({"momentum": 0.9}, {"momentum": 0.9})
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=sgd, config=CONFIG)
    parameter = next(model.parameters())
    for owner in (optimizer, sgd):
        assert len(owner.state) == 0 and not list(owner.state.items())
        state = owner.state
        for change in (
            lambda state: state[parameter]["momentum_buffer"].zero_(),
            lambda state: state.clear(),
            lambda state: state.pop(parameter, None),
            lambda state: state.update({parameter: {}}),
            lambda state: state.__setitem__(parameter, {}),
        ):
            with pytest.raises(RuntimeError, match="safe_set_full_optimizer_state"):
                change(state)
    for owner in (optimizer, sgd):
        state, owner.state = owner.state, collections.defaultdict(dict)
        engine.backward(engine(torch.ones(1, 4)).sum())
        with pytest.raises(RuntimeError, match="load_state_dict"):
            engine.step()
        engine.zero_grad()
        owner.state = state
    engine.destroy()
    sgd.state.clear()
    sgd.state[parameter]["momentum_buffer"] = None
