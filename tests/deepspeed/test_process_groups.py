"""`deepspeed.utils.groups` on 4 ranks: every group against the ranks that a sum over it finds."""

import pytest
import torch
import torch.distributed as dist

import ztk.deepspeed as deepspeed
from tests.deepspeed.test_meshes import config, made
from ztk.core.runtime import Process, Topology
from ztk.deepspeed.collectives import groups as process_groups
from ztk.deepspeed.collectives.groups import members
from ztk.deepspeed.engine import owners
from ztk.deepspeed.names.tree import module_of

# The ranks of rank 1's groups under an engine of each kind on 4 ranks.
OF_RANK_1 = {
    "none": {"data": [0, 1, 2, 3], "tensor": [1], "experts": [1], "expert_data": [0, 1, 2, 3]},
    "tp": {"data": [1, 3], "tensor": [0, 1], "experts": [1], "expert_data": [1, 3]},
    "ep": {"data": [0, 1, 2, 3], "tensor": [1], "experts": [0, 1], "expert_data": [1, 3]},
    "pp": {"data": [0, 1], "tensor": [1], "experts": [1], "expert_data": [0, 1]},
}


def asked(process: Process, *, kind: str) -> dict:
    """The groups' answers to a script. The ranks of each group can sum."""
    for left in iter(owners.newest, None):  # by tests before
        owners.forget(left)
    groups = module_of("deepspeed.utils.groups")
    engine = None
    if kind != "none":
        settings = config(kind, stage=1)  # of 2 ranks
        settings["train_batch_size"] *= 2
        engine = deepspeed.initialize(model=made(kind), config=settings)[0]
    name = groups._get_max_expert_size_name()
    found = {"name": name, "clone": sums(groups._clone_world_group())}
    for word, group, size, rank, ranks in (
        (
            "data",
            groups._get_data_parallel_group(),
            groups._get_data_parallel_world_size(),
            groups.get_data_parallel_rank(),
            groups._get_data_parallel_group_ranks(),
        ),
        (
            "tensor",
            groups.get_model_parallel_group(),
            groups._get_model_parallel_world_size(),
            groups.get_tensor_model_parallel_rank(),
            sums(groups.get_tensor_model_parallel_group()),
        ),
        (
            "experts",
            groups._get_expert_parallel_group(name),
            groups._get_expert_parallel_world_size(name),
            groups._get_expert_parallel_rank(name),
            groups._get_expert_parallel_group_ranks(name),
        ),
        (
            "expert_data",
            groups._get_expert_data_parallel_group(name),
            groups._get_expert_data_parallel_world_size(name),
            groups._get_expert_data_parallel_rank(name),
            groups._get_expert_data_parallel_group_ranks(name),
        ),
    ):
        assert sums(group) == list(ranks) == dist.get_process_group_ranks(group), word
        assert (dist.get_world_size(group), dist.get_rank(group)) == (size, rank), word
        found[word] = list(ranks)
    assert groups._get_max_expert_parallel_group() is groups._get_expert_parallel_group_dict()[name]
    assert groups._get_expert_data_parallel_group_ranks("ep_size_1") == groups._get_data_parallel_group_ranks()
    assert groups.get_tensor_model_parallel_src_rank() == found["tensor"][0]
    assert groups._get_broadcast_src_rank() == found["data"][0]
    assert groups._get_expert_broadcast_src_rank(name) == found["expert_data"][0]
    assert groups._get_sequence_parallel_world_size() == 1 and groups._get_sequence_parallel_rank() == 0
    assert groups._get_sequence_data_parallel_group() is groups._get_data_parallel_group()
    assert groups._get_zero_param_intra_parallel_group() is None
    found["refused"] = refusals(groups)
    if engine is not None:
        engine.destroy()
    assert groups._get_data_parallel_world_size() == process.world_size  # all of them again
    return found


def sums(group: dist.ProcessGroup) -> list[int]:
    """The ranks of a group, by adding a bit of each."""
    bits = torch.tensor(1 << dist.get_rank())
    dist.all_reduce(bits, group=group)
    return [rank for rank in range(dist.get_world_size()) if bits.item() >> rank & 1]


def refusals(groups) -> list[str]:
    texts = []
    for call in (
        lambda: groups._get_expert_parallel_group("ep_size_3"),
        lambda: groups._get_expert_parallel_group("experts"),
        lambda: groups._get_sequence_parallel_group(),
        lambda: groups.initialize(ep_size=2),
        lambda: groups._create_expert_and_data_parallel,
    ):
        with pytest.raises((ValueError, KeyError, AttributeError)) as caught:
            call()
        texts.append(str(caught.value))
    return texts


@pytest.mark.parametrize("kind", OF_RANK_1)
def test_groups_belong_to_the_newest_engine(ranks, kind):
    found = ranks(4).run(asked, kind=kind)
    assert {word: found[1][word] for word in OF_RANK_1[kind]} == OF_RANK_1[kind]
    for rank, of_rank in enumerate(found):
        assert of_rank["clone"] == [0, 1, 2, 3] and of_rank["name"] == ("ep_size_2" if kind == "ep" else "ep_size_1")
        assert all(rank in of_rank[word] for word in OF_RANK_1[kind])
        sizes, word, sequence, old, internal = of_rank["refused"]
        assert "no engine has experts over 3 ranks" in sizes and of_rank["name"] in sizes
        assert "must be ep_size_N" in word and "sequences are not cut" in sequence
        assert "MoE(..., ep_size=)" in old and "not offered by ztk" in internal


def near(process: Process) -> list[int]:
    """Neighbours of ZeRO++'s hpz partitions."""
    settings = config("tp", stage=3)
    del settings["tensor_parallel"]
    settings["zero_optimization"]["zero_hpz_partition_size"] = 2
    settings["train_batch_size"] *= 4
    engine = deepspeed.initialize(model=made("tp"), config=settings)[0]
    group = process_groups._get_zero_param_intra_parallel_group()
    found = [sums(group), process_groups._get_zero_param_intra_parallel_rank_in_mygroup()]
    engine.destroy()
    return found


def test_neighbours_of_hpz_partitions(ranks):
    assert ranks(4).run(near) == [[[0, 1], 0], [[0, 1], 1], [[2, 3], 0], [[2, 3], 1]]


def test_data_parallel_ranks_with_divided_sequences():
    """8 ranks: 2 stages, 2 replicas and 2 parts of a sequence."""
    topology = Topology(pipeline=2, sequence=2)
    found = {axis: members(axis, topology=topology, rank=5, world_size=8) for axis in ("dp", "sp", "data", "pp")}
    assert found == {"dp": (5, 7), "sp": (4, 5), "data": (4, 5, 6, 7), "pp": (1, 5)}


def test_without_a_process_group_the_error_names_the_call(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    for ask in (process_groups._get_data_parallel_rank, lambda: process_groups._get_expert_parallel_rank("ep_size_1")):
        with pytest.raises(RuntimeError, match="init_distributed"):
            ask()
