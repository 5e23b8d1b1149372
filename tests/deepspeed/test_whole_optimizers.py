"""Own optimizers that step full parameters, through `deepspeed.initialize`: torch's bits, over checkpoints and state dicts."""

import pytest
import torch

import ztk.deepspeed as deepspeed
from tests.deepspeed.elementwise import config
from tests.zero.update.random_wholes import STEPS, Drawn, Model, make, plainly, targets
from ztk.core.runtime import Process

# Drawn optimizers without a closure, among them writes by rebinding, states of odd shape, and groups that change.
SEEDS = [seed for seed in range(60) if Drawn.draw(seed).closure == "none" and not Drawn.draw(seed).torch][:6]
PLACES = ((0, "none", "none"), (2, "cpu", "none"), (3, "nvme", "cpu"))


def begin(seed: int, *, place: tuple[int, str, str], in_init: bool = False):
    stage, optimizer, parameters = place
    if in_init:
        with deepspeed.zero.Init():
            model = Model()
    else:
        model = Model()
    made = make(seed, model=model)
    ds_config = config(stage, optimizer=optimizer, parameters=parameters)
    return deepspeed.initialize(model=model, optimizer=made, config=ds_config)[0]


def train(engine, *, rank: int, start: int = 0, stop: int = STEPS) -> None:
    for step in range(start, stop):
        engine.backward(engine(targets(step, rank=rank)))
        engine.step()


def weights(engine) -> dict[str, torch.Tensor]:
    return {name: deepspeed.safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}


def differing(process: Process, *, place: tuple[int, str, str], in_init: bool) -> list[str]:
    wrong = []
    for seed in SEEDS:
        engine, expected = begin(seed, place=place, in_init=in_init), plainly(seed, world=process.world_size)
        train(engine, rank=process.rank)
        own = weights(engine)
        engine.destroy()
        if not all(torch.equal(own[name], value) for name, value in expected.items()):
            wrong.append(f"seed {seed}: {Drawn.draw(seed)}")
    return wrong


@pytest.mark.parametrize(("place", "in_init"), [*((place, False) for place in PLACES), (PLACES[-1], True)])
def test_scripts_have_torchs_bits(ranks, place, in_init):
    assert not ranks(2).run(differing, place=place, in_init=in_init)[0]


def through_checkpoint(process: Process, *, folder: str) -> list[str]:
    """Two steps at stage 1, the rest at stage 3 in another engine."""
    wrong = []
    for seed in SEEDS[:4]:
        first = begin(seed, place=(1, "none", "none"))
        train(first, rank=process.rank, stop=2)
        first.save_checkpoint(f"{folder}/{seed}")
        first.destroy()
        second = begin(seed, place=(3, "cpu", "none"))
        second.load_checkpoint(f"{folder}/{seed}")
        train(second, rank=process.rank, start=2)
        own, expected = weights(second), plainly(seed, world=process.world_size)
        second.destroy()
        if not all(torch.equal(own[name], value) for name, value in expected.items()):
            wrong.append(f"seed {seed}: {Drawn.draw(seed)}")
    return wrong


def test_checkpoints_go_on_with_torchs_bits(ranks, tmp_path):
    assert not ranks(2).run(through_checkpoint, folder=str(tmp_path))[0]


class Momentum(torch.optim.SGD):
    """Momentum over the norm of a parameter's gradient, and a state of another shape."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                velocity = state.setdefault("velocity", torch.zeros_like(p))
                state["norms"] = torch.stack([p.grad.norm(), p.norm()])
                p.sub_(velocity.mul_(0.9).add_(p.grad / (1 + state["norms"][0])), alpha=group["lr"])


def states_of(process: Process) -> dict[str, object]:
    model = Model()
    engine = deepspeed.initialize(
        model=model, optimizer=Momentum(model.parameters(), lr=0.1), config=config(3, optimizer="nvme")
    )[0]
    train(engine, rank=0, stop=2)
    parameter = dict(engine.module.named_parameters())["parts.4.0"]
    found = {"norms": deepspeed.safe_get_full_optimizer_state(parameter, "norms").tolist()}
    deepspeed.safe_set_full_optimizer_state(parameter, torch.zeros(40, 33), "velocity")
    found["velocity"] = float(deepspeed.safe_get_full_optimizer_state(parameter, "velocity").abs().sum())
    packed = engine.optimizer.state_dict()
    found["shapes"] = {key: tuple(value.shape) for key, value in packed["state"][4].items()}
    packed["state"][4]["norms"] = torch.tensor([5.0, 6.0])
    engine.optimizer.load_state_dict(packed)
    found["loaded"] = deepspeed.safe_get_full_optimizer_state(parameter, "norms").tolist()
    for call in (
        lambda: deepspeed.safe_get_full_optimizer_state(parameter, "exp_avg"),
        lambda: deepspeed.safe_get_local_optimizer_state(parameter, "velocity"),
    ):
        with pytest.raises(ValueError) as error:
            call()
        found[str(error.value)] = True
    return found


def test_states_are_read_and_set_in_full(ranks):
    found = ranks(2).run(states_of)[0]
    assert found["norms"][0] > 0 and found["velocity"] == 0 and found["loaded"] == [5.0, 6.0]
    assert found["shapes"] == {"velocity": (40, 33), "norms": (2,)}
    assert any("this optimizer keeps velocity, norms" in words for words in found)
    assert any("keeps full states on every rank: use safe_get_full_optimizer_state" in words for words in found)
