"""The full model's weights from ranks that hold parts of it, and a warning when a part is read like the full model."""

import warnings

import pytest
import torch

from tests.parallel.topology.runs import CONFIG, Strategy, arranged, make_engine
from ztk.checkpoint import full_state_dict
from ztk.core.runtime import Process, Topology
from ztk.nn import Decoder, initial_values


def read(process: Process, *, strategy: Strategy, everywhere: bool) -> tuple[dict | None, list[bool]]:
    """The full state_dict, and whether the module's own gave a warning: as it is, and with everything gathered."""
    engine = make_engine(arranged(process, topology=strategy.topology), strategy=strategy)
    warned = []
    for around in (warnings.catch_warnings, engine.zero.gathered):
        with around(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.module.state_dict()
        warned.append(any("full_state_dict" in str(warning.message) for warning in caught))
    state = full_state_dict(engine, everywhere=everywhere)
    engine.close()
    return state, warned


@pytest.mark.parametrize(
    ("world", "strategy", "warned"),
    [
        (2, Strategy(stage=2), [False, False]),
        (2, Strategy(stage=3), [True, False]),
        (2, Strategy(topology=Topology(tensor=2)), [True, True]),
        (4, Strategy(topology=Topology(tensor=2, pipeline=2), stage=3), [True, True]),
    ],
    ids=["stage 2", "stage 3", "tp2", "tp2_pp2 stage 3"],
)
def test_full_weights_are_collected_and_parts_give_a_warning(ranks, world, strategy, warned):
    found = ranks(world).run(read, strategy=strategy, everywhere=world == 4)
    assert [told for _, told in found] == [warned] * world
    with torch.device("meta"):
        model = Decoder(CONFIG)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    for rank, (state, _) in enumerate(found):
        if rank and world != 4:
            assert state is None
            continue
        assert state.keys() == shapes.keys()
        for name, value in state.items():
            expected = initial_values(model, seed=3, name=name, start=0, stop=value.numel())
            assert torch.equal(value, expected.view(shapes[name])), name
