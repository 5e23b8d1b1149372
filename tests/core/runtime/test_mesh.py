"""Who works with whom: arithmetic on ranks, then real groups."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ztk.core.runtime import Process, Topology
from ztk.core.runtime.part import Part


def test_every_axis_divides_the_world_into_equal_groups():
    topology = Topology(pipeline=2, tensor=2, sequence=2, expert=2)
    sizes = {"pp": 2, "data": 4, "sp": 2, "tp": 2, "ep": 2, "expert_data": 2}
    for axis, size in sizes.items():
        groups = topology.groups(axis, world_size=16)
        assert {len(group) for group in groups} == {size}
        assert sorted(rank for group in groups for rank in group) == list(range(16))


def test_neighbours_share_tensors_and_stages_lie_farthest_apart():
    topology = Topology(pipeline=2, tensor=2)
    assert topology.groups("tp", world_size=8) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert topology.groups("data", world_size=8) == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert topology.groups("pp", world_size=8) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert [topology.replica(rank, world_size=8) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


def test_experts_cut_the_data_group():
    topology = Topology(expert=2)
    assert topology.groups("ep", world_size=4) == [(0, 1), (2, 3)]
    assert topology.groups("expert_data", world_size=4) == [(0, 2), (1, 3)]


@pytest.mark.parametrize(
    ("topology", "world", "ranks"),
    [
        (Topology(pipeline=2, tensor=2), 6, 4),
        (Topology(expert=4), 6, 4),
        (Topology(sequence=2, expert=3), 4, 6),
        (Topology(pipeline=2, expert=2), 2, 4),
    ],
)
def test_degrees_that_do_not_fit_are_refused_with_the_number_that_does(topology: Topology, world: int, ranks: int):
    with pytest.raises(ValueError, match=rf"{world} ranks cannot be cut .* launch\.ranks={ranks} "):
        topology.replicas(world_size=world)
    assert topology.min_ranks == ranks
    assert topology.replicas(world_size=ranks) >= 1


def test_a_degree_below_one_is_refused():
    with pytest.raises(ValueError, match=r"topology\.tensor=0"):
        Topology(tensor=0)


def test_positions_of_a_box_index_the_full_tensor():
    full = torch.arange(5 * 7 * 3).view(5, 7, 3)
    for part in (
        Part.everything((5, 7, 3)),
        Part.cut((5, 7, 3), dim=0, start=2, stop=5),
        Part.cut((5, 7, 3), dim=1, start=3, stop=4),
        Part.cut((5, 7, 3), dim=2, start=1, stop=3),
        Part(full_shape=(5, 7, 3), start=(1, 2, 0), shape=(3, 4, 2)),
    ):
        flat = part.of(full).flatten()
        assert flat.numel() == part.numel
        assert torch.equal(part.positions(0, stop=part.numel), flat)
        assert torch.equal(part.positions(1, stop=part.numel - 1), flat[1:-1])


def _sums(process: Process, *, topology: Topology) -> dict[str, float]:
    mesh = process.arrange(topology).mesh
    sums = {}
    for axis in ("pp", "data", "sp", "tp", "ep", "expert_data"):
        comm = mesh.comm(axis)
        values = torch.full((comm.size,), float(1 << process.rank))
        comm.all_reduce(values, label=axis).wait()
        sums[axis] = float(values[0])
    assert mesh.counters.calls["all_reduce"] >= 6
    mesh.close()
    return sums


def test_collectives_reach_their_own_group_only(ranks):
    topology = Topology(pipeline=2, expert=2)
    for rank, sums in enumerate(ranks(4).run(_sums, topology=topology)):
        for axis, total in sums.items():
            group = next(group for group in topology.groups(axis, world_size=4) if rank in group)
            assert total == sum(1 << member for member in group), (rank, axis)


def _created(process: Process, *, topologies: list[Topology]) -> list[tuple[int, int]]:
    """Per topology the calls of new_group, and the different communicators of several ranks."""
    found = []
    for topology in topologies:
        with mock.patch.object(dist, "new_group", wraps=dist.new_group) as called:
            mesh = process.arrange(topology).mesh
        found.append((called.call_count, sum(comm.size > 1 for comm in mesh.comms)))
        mesh.close()
    return found


def test_connections_are_counted_without_processes(ranks):
    topologies = [
        Topology(),
        Topology(tensor=2),
        Topology(tensor=2, pipeline=2),
        Topology(expert=2),
        Topology(expert=4),
        Topology(context=2, tensor=2),
        Topology(sequence=2, pipeline=2),
        Topology(intra_node=2),
        Topology(intra_node=4),
    ]
    counted = [topology.connections(world_size=4) for topology in topologies]
    neighbours = [topology.pipeline - 1 for topology in topologies]
    expected = [(of.new_groups, of.communicators - extra) for of, extra in zip(counted, neighbours, strict=True)]
    assert ranks(4).run(_created, topologies=topologies) == [expected] * 4
    assert Topology(pipeline=8).connections(world_size=8).communicators == 4  # world, pp, two neighbours
    assert Topology().connections(world_size=1).communicators == 0
