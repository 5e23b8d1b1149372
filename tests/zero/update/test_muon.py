"""Muon over shards: the same bits at every stage and tier, torch's update, and the bytes of its exchange."""

import math
import sys
from collections import Counter
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.optim import _muon

from tests.zero.models import BATCH, WIDTH, Layout, Model, batches, build, make_engine, train
from tests.zero.update.bits import check_bits
from ztk.checkpoint import CheckpointError, load, save
from ztk.checkpoint.groups import gather_groups
from ztk.core.runtime import Process
from ztk.core.runtime.part import Part
from ztk.optim import OptimizerPolicy
from ztk.train.engine import Engine
from ztk.zero.offload import NvmeStore

MUON = OptimizerPolicy(name="muon", lr=1e-2, adam_lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5)
STEPS = 4  # one of them without a block


def matrices(model: Model) -> list[Tensor]:
    return [p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith(("embedding", "head"))]


@pytest.mark.parametrize(("world", "dtype"), [(1, "fp32"), (2, "fp32"), (2, "bf16"), (2, "fp16"), (3, "fp32")])
def test_every_stage_and_tier_gives_the_same_bits(ranks, world, dtype):
    """Also after skipped steps; on three ranks shards end inside of matrices, and ranks have batches of other sizes."""
    check_bits(ranks, world=world, dtype=dtype, optimizer=MUON, steps=STEPS)


def same_gradients(
    process: Process, *, layout: Layout, steps: range, folder: str, saves: bool = False
) -> dict[str, Tensor]:
    """Weights after `steps`, in which every rank has the same micro-batch: with 1, 2 and 4 ranks their mean is exact.

    The first steps start from the checkpoint in `folder` unless they begin at 0, and end with one there if `saves`.
    """
    engine = make_engine(process, layout=layout, optimizer=replace(MUON, clip_grad_norm=0.0))
    if steps.start:
        load(engine, path=folder)
    for tokens in list(batches(steps.stop, rank=0, world=1))[steps.start :]:
        engine.backward(engine(tokens))
        engine.step()
    if saves:
        save(engine, folder=folder)
    return {name: value.clone() for name, value in engine.zero.full_parameters()}


def test_the_number_of_ranks_changes_no_bit_nor_does_a_resume_on_another(ranks, tmp_path):
    folder = str(tmp_path)
    first = ranks(1).run(same_gradients, layout=Layout(), steps=range(4), folder=folder)[0]
    early = ranks(2).run(same_gradients, layout=Layout(stage=3), steps=range(2), folder=folder, saves=True)[0]
    assert not torch.equal(first["blocks.0.up.weight"], early["blocks.0.up.weight"])
    weights = ranks(4).run(same_gradients, layout=Layout(stage=2, offload="cpu"), steps=range(2, 4), folder=folder)[0]
    assert [name for name in first if not torch.equal(first[name], weights[name])] == []


def test_fp32_equals_torchs(ranks, monkeypatch):
    """torch.optim.Muon and AdamW on one process: losses within 1e-5.

    Both orthogonalise in fp32. In bf16 a direction that differs in its last bit may round to the next bf16 number, 2^-8 away.
    """
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", _widened(_muon._zeropower_via_newtonschulz))
    model = build()
    body = matrices(model)
    others = [p for p in model.parameters() if all(p is not other for other in body)]
    groups = [
        {"params": [p for p in others if p.dim() == 2], "weight_decay": 0.1},
        {"params": [p for p in others if p.dim() < 2], "weight_decay": 0.0},
    ]
    muon = torch.optim.Muon(body, lr=1e-2, weight_decay=0.1, momentum=0.95, nesterov=True)
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
    losses = []
    for step, tokens in enumerate(batches(10, rank=0, world=1)):
        assert len(tokens) == BATCH
        loss = model(tokens, use_all=step % 3 != 1)
        for optimizer in (muon, adamw):
            optimizer.zero_grad(set_to_none=False)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        muon.step()
        adamw.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    fp32 = replace(MUON, ns_dtype="fp32")
    for world in (1, 2):
        run = ranks(world).run(train, layout=Layout(stage=3), steps=10, optimizer=fp32)[0]
        torch.testing.assert_close(torch.tensor(run.losses), torch.tensor(losses), rtol=1e-5, atol=0)


def _widened(torchs):
    """Calls torch's function on an object whose `bfloat16()` returns float32."""

    class Wide(torch.Tensor):
        def bfloat16(self):
            return self.as_subclass(torch.Tensor).clone()

    return lambda grad, *rest: torchs(grad.as_subclass(Wide), *rest)


def moved(process: Process, *, stage: int, ns_dtype: str) -> tuple[int, int]:
    """Calls and bytes of one step."""
    engine = make_engine(process, layout=Layout(stage=stage), optimizer=replace(MUON, ns_dtype=ns_dtype))
    process.comm.counters.reset()
    (tokens,) = batches(1, rank=process.rank, world=process.world_size)
    engine.backward(engine(tokens))
    engine.step()
    return process.comm.counters.calls["muon"], process.comm.counters.bytes["muon"]


@pytest.mark.parametrize(("stage", "ns_dtype"), [(0, "bf16"), (1, "bf16"), (3, "fp32")])
def test_bytes_of_the_exchange(ranks, stage, ns_dtype):
    """Elements sent by all ranks: every element of a matrix to its owner and back. At stage 0 only the results are sent, to every rank."""
    elements, itemsize = sum(p.numel() for p in matrices(build())), 2 if ns_dtype == "bf16" else 4
    counted = ranks(2).run(moved, stage=stage, ns_dtype=ns_dtype)
    assert [calls for calls, _ in counted] == [1 if stage == 0 else 2] * 2
    assert sum(nbytes for _, nbytes in counted) == 2 * elements * itemsize


def stored(process: Process, *, layout: Layout, optimizer: OptimizerPolicy) -> tuple[int, set[int], int]:
    """Bytes of the optimizer's states on this rank; how often one step writes a range of them, each as often; elements of padding."""
    engine, written = make_engine(process, layout=layout, optimizer=optimizer), Counter()

    def put(store, slot, *, value):
        written[slot.name] += slot.category == "optimizer"
        return original(store, slot, value=value)

    original = NvmeStore.put
    with mock.patch.object(NvmeStore, "put", put):
        (tokens,) = batches(1, rank=process.rank, world=process.world_size)
        engine.backward(engine(tokens))
        engine.step()
        engine.zero.full_parameters()
        engine.close()
    pieces = [piece for bucket in engine.zero.buckets for piece in bucket.pieces]
    slots = [slot for piece in pieces for slot in (piece.states, piece.momentum) if slot is not None]
    padding = sum(bucket.size - sum(p.numel for p in bucket.layout.placements) for bucket in engine.zero.buckets)
    return sum(4 * math.prod(slot.shape) for slot in slots), {count for count in written.values() if count}, padding


@pytest.mark.parametrize("layout", [Layout(stage=1), Layout(stage=3, offload="nvme")], ids=lambda layout: layout.id)
def test_a_matrix_has_no_second_moment_and_its_states_are_written_once(ranks, layout):
    adamw = OptimizerPolicy(lr=1e-2, weight_decay=0.1, clip_grad_norm=0.5)
    found = [ranks(2).run(stored, layout=layout, optimizer=policy) for policy in (adamw, MUON)]
    full, less = (sum(nbytes for nbytes, *_ in own) for own in found)
    elements, padding = sum(p.numel() for p in matrices(build())), found[1][0][2]  # behind a matrix it is as the matrix
    smallest = 64 * 64  # bytes of slots of matrices alone whose weights are elsewhere
    assert 4 * elements - smallest <= full - less <= 4 * (elements + padding)
    assert all(counts == ({1} if layout.offload == "nvme" else set()) for own in found for _, counts, _ in own)


def loads(process: Process, *, folder: str, early: bool) -> dict[str, str]:
    """The error of loading a checkpoint of Muon, by optimizer. early: a checkpoint without the names of Muon's matrices."""

    def groups(engine: Engine) -> list[dict]:
        found = gather_groups(engine)
        return [{key: value for key, value in group.items() if key != "muon"} for group in found] if early else found

    with mock.patch.object(sys.modules["ztk.checkpoint.save"], "gather_groups", groups):
        save(make_engine(process, layout=Layout(stage=1), optimizer=MUON), folder=folder)
    said = {}
    for name, optimizer in {
        "muon": MUON,
        "fewer matrices": replace(MUON, adam_names="down"),
        "adamw": OptimizerPolicy(),
        "sgd": OptimizerPolicy(name="sgd", momentum=0.9),
    }.items():
        try:
            load(make_engine(process, layout=Layout(stage=3), optimizer=optimizer), path=folder)
            said[name] = ""
        except CheckpointError as error:
            said[name] = str(error)
    return said


@pytest.mark.parametrize("early", [False, True])
def test_who_divides_by_second_moments_is_refused_a_checkpoint_without(ranks, tmp_path, early):
    said = ranks(1).run(loads, folder=str(tmp_path), early=early)[0]
    assert said["muon"] == "" and "another optimizer" in said["sgd"]
    assert "no second moment of blocks.0.down.weight and" in said["adamw"]
    assert ("no second moment of blocks.0.down.weight and" in said["fewer matrices"]) is not early


def refusal(process: Process) -> None:
    with pytest.raises(
        ValueError,
        match="the parts of blocks.0.down.weight are not on the tensor-parallel ranks: use topology.expert=1",
    ):
        part = Part.cut((2 * WIDTH, 4 * WIDTH), dim=0, start=0, stop=WIDTH)
        make_engine(process, layout=Layout(), optimizer=MUON, parts={"blocks.0.down.weight": part})


def test_matrices_with_separate_parts_are_refused(ranks):
    ranks(1).run(refusal)
