"""A run moves from ztk to FSDP2 with torch's optimizer and back, by torch.distributed.checkpoint, and its losses continue."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.zero.models import Layout, batches, build, make_engine
from ztk.checkpoint import load, read_manifest, save
from ztk.checkpoint.convert import import_checkpoint
from ztk.checkpoint.export import export_torch_distributed
from ztk.optim import OptimizerPolicy

POLICY = OptimizerPolicy(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
MOVES = (2, 4, 6)  # steps of ztk, then of FSDP2, then of ztk again


def batch_of(process, *, step: int) -> torch.Tensor:
    return list(batches(step + 1, rank=process.rank, world=process.world_size))[-1]


def mean(process, loss: torch.Tensor) -> float:
    return float(process.comm.gather_scalars(loss.detach().view(1), label="loss").mean())


def with_ztk(process, *, start: int, stop: int, folder: str | None = None, to: str | None = None) -> list[float]:
    """Losses of steps [start, stop), after loading `folder`; saves at the end."""
    engine = make_engine(process, layout=Layout(stage=3), model=build(start), optimizer=POLICY)
    if folder is not None:
        assert load(engine, path=folder).step == start
    losses = []
    for step in range(start, stop):
        loss = engine(batch_of(process, step=step))
        engine.backward(loss)
        engine.step()
        losses.append(mean(process, loss))
    if to is not None:
        save(engine, folder=to)
    return losses


def with_fsdp(process, *, start: int, stop: int, folder: str, to: str) -> list[float]:
    """A usual FSDP2 script: other values in model and optimizer, `dcp.load`, `set_state_dict`, training, `dcp.save`."""
    mesh = init_device_mesh("cpu", (process.world_size,))
    model = fully_shard(build(77), mesh=mesh)
    decayed = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others}], lr=0.5)
    weights, states = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optim": states}, storage_reader=dcp.FileSystemReader(folder))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert [(g["lr"], g["betas"], g["eps"], g["weight_decay"]) for g in optimizer.param_groups] == [
        (1e-2, (0.8, 0.9), 1e-6, 0.1),
        (1e-2, (0.8, 0.9), 1e-6, 0.0),
    ]
    losses = []
    for step in range(start, stop):
        loss = model(batch_of(process, step=step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(process, loss))
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, storage_writer=dcp.FileSystemWriter(to))
    return losses


def test_a_run_continues_in_fsdp_and_back(ranks, tmp_path):
    pool, (first, second, third) = ranks(2), MOVES
    straight = pool.run(with_ztk, start=0, stop=third)[0]
    losses = pool.run(with_ztk, start=0, stop=first, to=str(tmp_path / "ztk"))[0]
    export_torch_distributed(tmp_path / "ztk", to=tmp_path / "dcp")
    losses += pool.run(with_fsdp, start=first, stop=second, folder=str(tmp_path / "dcp"), to=str(tmp_path / "fsdp"))[0]
    import_checkpoint(tmp_path / "fsdp", to=tmp_path / "back")
    losses += pool.run(with_ztk, start=second, stop=third, folder=str(tmp_path / "back"))[0]
    # torch's AdamW and FSDP's reductions round in another order: some 1e-7 per step, 6 steps
    assert losses == pytest.approx(straight, rel=1e-5)


def test_frozen_parameters_of_fsdp_stay_frozen(tmp_path):
    """They have no optimizer states; a tied weight that is stored twice is tied again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    model[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, storage_writer=dcp.FileSystemWriter(tmp_path / "dcp"), no_dist=True)
    manifest = read_manifest(import_checkpoint(tmp_path / "dcp", to=tmp_path / "in"))
    assert manifest.state_names == ["exp_avg", "exp_avg_sq"]
    assert {info.name for info in manifest.parameters if not info.trainable} == {"1.weight", "1.bias"}
    assert manifest.tied in ({"2.weight": "0.weight"}, {"0.weight": "2.weight"})
