"""`Engine.full_grad` and `full_parameter`: the numbers of one rank, in every layout, stage and tier, and in a hook of the loop."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import ztk
from tests.parallel.topology.runs import Strategy, alone, arranged, make_engine, train_step
from ztk.core.runtime import Process, Topology
from ztk.deepspeed.zero.states import safe_get_full_grad


class Reads:
    """Reads gradients before the update of every step, and parameters before and after it."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.gradients: list[dict[str, Tensor]] = []
        self.parameters: list[dict[str, Tensor]] = []
        self.deepspeeds: list[Tensor | None] = []
        self.refused: list[str] = []

    def before_update(self, loop: ztk.Loop) -> None:
        engine = loop.engine
        self.gradients.append({name: engine.full_grad(name).cpu() for name in self.names})
        self.parameters.append({name: engine.full_parameter(name).cpu() for name in self.names})
        named = dict(engine.module.named_parameters())
        self.deepspeeds += [safe_get_full_grad(named[name]) for name in self.names[:1] if name in named]

    def after_step(self, loop: ztk.Loop, *, loss: Tensor) -> None:
        self.parameters.append({name: loop.engine.full_parameter(name).cpu() for name in self.names})
        for name in (self.names[0], "no.such"):
            try:
                loop.engine.full_grad(name)
            except (RuntimeError, ValueError) as error:
                self.refused.append(str(error))


def read(process: Process, *, strategy: Strategy, steps: int = 2) -> Reads:
    """Runs a loop with the hook."""
    engine = make_engine(process, strategy=strategy)
    own = [name for name, _ in engine.module.named_parameters()]
    known = engine.process.comm.gather_objects(own)
    names = sorted(dict.fromkeys(name for rank in known for name in rank))
    reads = Reads(["embedding.weight", *names[::5]])  # the first is tied, and two stages hold it

    def step(number: int) -> Tensor:
        return torch.tensor(train_step(engine, step=number))

    ztk.Loop(engine, train_step=step, steps=steps, callbacks=[reads]).run()
    assert engine.before_update is None
    engine.close()
    return reads


def both(process: Process, *, strategy: Strategy) -> tuple[Reads, Reads]:
    """On this layout, and on one rank without sharding."""
    one = replace(strategy, topology=Topology(), stage=0, offload="none", options={})
    return read(arranged(process, topology=strategy.topology), strategy=strategy), read(alone(process), strategy=one)


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(stage=1, offload="cpu"),
        Strategy(stage=2, options={"accumulation_steps": 2}),
        Strategy(stage=3, offload="nvme"),
        Strategy(topology=Topology(tensor=2)),
        Strategy(topology=Topology(pipeline=2), stage=1),
        Strategy(topology=Topology(sequence=2), stage=3),
    ],
    ids=["stage 1 cpu", "stage 2 accumulated", "stage 3 nvme", "tp2", "pp2", "sp2"],
)
def test_gradients_and_parameters_are_those_of_one_rank(ranks, strategy):
    for own, one in ranks(2).run(both, strategy=strategy):
        assert len(own.gradients) == 2 and len(own.names) > 4
        for ours, theirs in zip(own.gradients, one.gradients, strict=True):
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-6, msg=name)
                assert value.abs().max() > 0
        for ours, theirs in zip(own.parameters, one.parameters, strict=True):
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4, msg=name)
        assert not torch.equal(own.parameters[0][own.names[0]], own.parameters[1][own.names[0]])
        assert "there is no gradient now; call it in the hook before_update" in own.refused[0]
        assert "'no.such': the model has no parameter of this name" in own.refused[1]
        if strategy.topology == Topology():
            for number, found in enumerate(own.deepspeeds):
                assert torch.equal(found, own.gradients[number][own.names[0]])
