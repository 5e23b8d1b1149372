"""No more than two eager elementwise operations follow each other in a step of the decoder at stage 3: the rest are kernels."""

import sys

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.planner.chains import chains_of_last_steps
from tests.planner.measure import SHAPE, Case, planned
from ztk.optim import OptimizerPolicy
from ztk.planner import plan
from ztk.planner.trace import STEPS
from ztk.zero.update.piece_update import PieceUpdate

CASES = (
    Case(ranks=2, stage=3, dtype="fp32"),
    Case(ranks=2, stage=3, dtype="bf16"),
    Case(ranks=2, stage=3, dtype="fp16", accumulation=2),
    Case(ranks=2, stage=3, dtype="bf16", recompute="full"),
    Case(ranks=2, stage=3, dtype="bf16", states="8bit", master="stochastic"),
    Case(ranks=2, stage=3, dtype="bf16", offload="nvme", parameters="nvme"),
    Case(ranks=2, stage=3, dtype="bf16", offload="cpu", parameters="cpu", accumulation=2),
    Case(ranks=2, stage=3, dtype="bf16", experts=4),
    Case(ranks=4, stage=3, dtype="bf16", experts=4, expert=2),
    Case(ranks=4, stage=3, dtype="bf16", tensor=2),
    Case(ranks=4, stage=3, dtype="bf16", tensor=2, sequence_parallel=True),
    Case(ranks=4, stage=3, dtype="bf16", sequence=2),
    Case(ranks=4, stage=3, dtype="bf16", context=2),
)
# The function in which a chain ends -> why it is one.
EXCEPTIONS = {
    "zero.offload.host._copy": "copies between host and device around the sum of two micro-batches, on the host: no kernel joins two memories",
    "tensor.collectives.summed": "the gradients of queries, keys and values arrive one after another, autograd adds them; then the sum goes "
    "into the memory that is sent",
    "parallel.sequence.ring._merged": "blocks of attention arrive one after another from the ring, and each is merged when it is there",
    "parallel.sequence.ring.backward": "likewise the gradients of keys and values, which go on to the next rank",
    "parallel.sequence.ring._joined": "likewise, and then the two chunks of a rank are joined",
    "parallel.sequence.ring.<genexpr>": "likewise, and then they are rounded to the model's dtype",
}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_has_no_eager_chain_of_more_than_two(case, tmp_path):
    with chains_of_last_steps() as chains:
        planned(case, folder=str(tmp_path))
    assert chains.seen > 20
    unexplained = [str(chain) for chain in chains.found if chain.places[-1] not in EXCEPTIONS]
    assert not unexplained, "\n".join(unexplained)


UPDATES = {
    "adamw": {},
    "lion": {"optimizer": "lion"},
    "sgd": {"optimizer": "sgd"},
    "adamw_bf16": {"states": "bf16", "master": "fp32"},
    "adamw_stochastic": {"states": "bf16", "master": "stochastic"},
    "adamw_8bit": {"states": "8bit", "master": "stochastic"},
}


class Updates(TorchDispatchMode):
    """Counts the launches of an optimizer's op."""

    sees_everything = True

    def __init__(self, op: str) -> None:
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.name() == f"ztk::{self.op}"
        return func(*args, **(kwargs or {}))


def updates_of_a_bucket(op: str, *, ranks: int, stage: int, folder: str) -> float:
    """In a step on rank 0, on average. Norms have no weight decay, so a bucket has two groups, one behind the other."""
    case = Case(ranks=ranks, stage=stage, dtype="bf16", **UPDATES[op])
    policy = OptimizerPolicy(name=case.optimizer, states=case.states, weight_decay=0.1)
    policies = case.policies(folder) | {"optimizer": policy}
    tokens = torch.empty(4, 128, dtype=torch.int64, device="meta")
    with Updates(op) as updates:
        plan(case.model, batch=(tokens, tokens), world_size=ranks, topology=case.topology, **policies)
    return updates.count / STEPS / (SHAPE["layers"] + 1)


@pytest.mark.parametrize(("ranks", "stage"), [(1, 0), (1, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize("op", UPDATES)
def test_one_launch_updates_a_bucket_whatever_groups_it_has(op, ranks, stage, tmp_path):
    """A single rank has both groups of every bucket, the first of two only one, and where positions count several parts of it. At stage 0 a
    rank of several updates all shards, each by one launch."""
    assert updates_of_a_bucket(op, ranks=ranks, stage=stage, folder=str(tmp_path)) == 1


@pytest.mark.parametrize("op", UPDATES)
def test_a_launch_per_segment_is_seen(op, tmp_path, monkeypatch):
    monkeypatch.setattr(PieceUpdate, "_is_one_launch", lambda *_, **__: False)
    assert updates_of_a_bucket(op, ranks=1, stage=3, folder=str(tmp_path)) >= 2


def test_a_chain_is_seen(tmp_path, monkeypatch):
    """An activation by torch's own operations: silu, a product and a sum, and the same backwards."""
    monkeypatch.setattr(sys.modules["ztk.nn.mlp"], "swiglu", lambda gate, up: F.silu(gate) * up + gate)
    with chains_of_last_steps() as chains:
        planned(CASES[1], folder=str(tmp_path))
    assert [chain.places[-1] for chain in chains.found] == ["nn.mlp.forward", "train.engine.engine.backward"]
