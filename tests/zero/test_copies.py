"""A copy of an engine's module is a plain model with weights of its own, or an error names the way to make one."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from tests.parallel.recompute.models import Residual, build, rows
from ztk.core.policies.recompute import RecomputePolicy
from ztk.core.runtime import Comm
from ztk.core.runtime.comm.transport import SingleRankTransport
from ztk.parallel.recompute.apply import recompute_blocks
from ztk.parallel.tensor.layers import TensorAxis, cut_column


def _pickled(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


WAYS = {"deepcopy": copy.deepcopy, "averaged": lambda model: AveragedModel(model).module, "pickled": _pickled}


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    model(rows()).backward()
    return [parameter.grad for parameter in model.parameters()]


def copies(process, *, stage: int, recomputes: bool) -> dict[str, dict]:
    engine, *_ = deepspeed.initialize(model=build(dropout=0.0), config=scripts.config(stage=stage))
    model, found = engine.module, {}
    if recomputes:
        recompute_blocks(model, policy=RecomputePolicy(mode="full"))
    engine.backward(engine(rows()))
    engine.step()
    for name, way in WAYS.items():
        refusals = []
        for make in (way, lambda model: copy.deepcopy(model.blocks[0].norm)):
            try:
                make(model)
            except RuntimeError as error:
                refusals.append(str(error))
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            made, weights = way(model), copy.deepcopy(dict(model.named_parameters()))
        plain = build(dropout=0.0)
        plain.load_state_dict(weights)
        for _ in range(2):
            engine.backward(engine(rows()))
            engine.step()
        same = all(map(torch.equal, _gradients(made), _gradients(plain)))
        found[name] = {"refusals": refusals, "same": same}
    return found


@pytest.mark.parametrize(("stage", "recomputes"), [(0, True), (3, False), (3, True)])
def test_a_copy_has_weights_of_its_own(ranks, stage, recomputes):
    for found in ranks(2).run(copies, stage=stage, recomputes=recomputes):
        assert found.keys() == WAYS.keys() and all(of_way["same"] for of_way in found.values())
        for name, of_way in found.items():
            assert len(of_way["refusals"]) == (2 if stage == 3 else 0), name
            assert all("inside deepspeed.zero.GatheredParameters" in text for text in of_way["refusals"])


def test_a_cut_module_is_not_copied():
    model = Residual()
    comm = Comm(SingleRankTransport(), rank=0, size=1, device=torch.device("cpu"))
    cut_column(model.enter, axis=TensorAxis(comm), name="enter")
    with pytest.raises(RuntimeError, match="one rank's part"):
        copy.deepcopy(model)
