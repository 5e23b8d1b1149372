"""The stand-in for NCCL finds missing waits, reused buffers and swapped messages, which transports of the CPU seldom show."""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.late_nccl import CPU, SKY, Race, late
from tests.parallel.topology.matrix import EXPERTS
from tests.parallel.topology.runs import CONFIG, Strategy, arranged, train
from ztk.core.runtime import Process, Topology
from ztk.core.runtime.comm import Comm, connect


class Forgotten:
    """A work whose `wait` was removed from the program."""

    is_done = True

    def wait(self) -> None:
        pass


def forgets(name: str, *, label: str = "") -> Callable[[int], AbstractContextManager]:
    """Removes the wait for the collectives `Comm.name` whose label has `label`."""
    method = getattr(Comm, name)

    def call(comm: Comm, *args: Any, **options: Any) -> Any:
        work = method(comm, *args, **options)
        return Forgotten() if re.search(label, options["label"]) else work

    return lambda rank: mock.patch.object(Comm, name, call)


def reuses_the_buffer(rank: int) -> AbstractContextManager:
    """Clears a gradient while it is reduced."""
    method = Comm.reduce_scatter

    def call(comm: Comm, full: Tensor, *, out: Tensor, label: str) -> Any:
        work = method(comm, full, out=out, label=label)
        full.zero_()
        return work

    return mock.patch.object(Comm, "reduce_scatter", call)


def swaps_messages(rank: int) -> AbstractContextManager:
    """The second rank posts each receive when it needs the message."""
    method = Comm.recv

    class Posted:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.given = args, options

        def wait(self) -> None:
            method(*self.given[0], **self.given[1]).wait()

    def call(comm: Comm, out: Tensor, *, source: int, label: str) -> Any:
        return (method if rank == 0 or "shapes" in label else Posted)(comm, out, source=source, label=label)

    return mock.patch.object(Comm, "recv", call)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """plant: makes the mistake on a rank."""

    plant: Callable[[int], AbstractContextManager]
    strategy: Strategy
    experts: bool = False


QUANTISED = {"quantized_gradients": True}
PIPELINE = Strategy(topology=Topology(pipeline=2), options={"accumulation_steps": 4})
MISTAKES = {
    "gather of parameters": Case(plant=forgets("all_gather", label="blocks"), strategy=Strategy(stage=3)),
    "reduction of gradients": Case(plant=forgets("reduce_scatter"), strategy=Strategy(stage=2)),
    "sum over tensor ranks": Case(plant=forgets("all_reduce"), strategy=Strategy(topology=Topology(tensor=2))),
    "ring of keys": Case(plant=forgets("pass_on"), strategy=Strategy(topology=Topology(context=2))),
    "all-to-all of heads": Case(plant=forgets("all_to_all"), strategy=Strategy(topology=Topology(sequence=2))),
    "all-to-all of experts": Case(
        plant=forgets("all_to_all_rows"), strategy=Strategy(topology=Topology(expert=2)), experts=True
    ),
    "int4 gradients": Case(plant=forgets("all_to_all"), strategy=Strategy(stage=3, zero=QUANTISED)),
    "activation of a stage": Case(plant=forgets("recv", label="activation"), strategy=PIPELINE),
    "order of messages": Case(plant=swaps_messages, strategy=PIPELINE),
    "reused buffer": Case(plant=reuses_the_buffer, strategy=Strategy(stage=2)),
}


@contextmanager
def own_connections(process: Process):
    """The process over NCCL, with connections that end with an error."""
    comm = connect(device=CPU, one_node=True, timeout_seconds=process.timeout_seconds)
    try:
        with late(replace(process, comm=comm)) as own:
            yield own
    finally:
        comm.close()


def symptoms(process: Process, *, names: list[str]) -> list[tuple[str, str]]:
    """Per mistake the differences from a run on the CPU: without it, and with it."""
    found = []
    for case in (MISTAKES[name] for name in names):
        run = {"strategy": case.strategy, "steps": 2, "config": EXPERTS if case.experts else CONFIG}
        expected = train(process, **run).digest
        with own_connections(process) as own:
            without = "" if train(own, **run).digest == expected else "other bits"
        found.append((without, planted(process, case=case, run=run, expected=expected)))
    return found


def planted(process: Process, *, case: Case, run: dict, expected: str) -> str:
    try:
        with own_connections(process) as own:
            mesh = arranged(own, topology=case.strategy.topology).mesh
            try:
                with case.plant(process.rank):
                    return "" if train(own, **run).digest == expected else "other bits"
            finally:
                mesh.close()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_ten_planted_mistakes_are_found(ranks):
    found = ranks(2).run(symptoms, names=list(MISTAKES))
    assert [[without for without, _ in rows] for rows in found] == [[""] * len(MISTAKES)] * 2
    missed = [name for name, *rows in zip(MISTAKES, *found, strict=True) if not any(planted for _, planted in rows)]
    assert not missed


def seen(process: Process) -> dict[str, Any]:
    """The stand-in's rules, each broken once by both ranks."""
    with own_connections(process) as own:
        rank, peer, found = process.rank, 1 - process.rank, {}
        comm, other = own.comm, own.connect([(0, 1)])

        def race(break_rule: Callable[[], object]) -> str:
            with pytest.raises(Race) as caught:
                break_rule()
            return str(caught.value)

        first, second = torch.zeros(4), torch.zeros(4)
        works = [comm.all_reduce(x.fill_(rank + 1), label="x", in_shard_order=False) for x in (first, second)]
        found["before the wait"] = first.isnan().all().item()
        works[1].wait()
        found["after a later wait"] = first.tolist()
        for_pair = torch.full((4,), float(rank)), torch.empty(4)
        calls = [
            lambda: comm.send(for_pair[0], to=peer, label="x"),
            lambda: comm.recv(for_pair[1], source=peer, label="x"),
        ]
        works = [call() for call in (calls if rank else calls[::-1])]
        for work in works:
            work.wait()
        found["messages"] = for_pair[1].tolist()

        def both_send_first() -> None:
            for work in [call() for call in calls]:
                work.wait()

        found["order"] = race(both_send_first)
        found["written"] = race(lambda: written_in_flight(comm, first))
        found["read elsewhere"] = race(lambda: read_in_flight(comm, first, by=other))
        other.close()
        SKY.clear()
    return found


def written_in_flight(comm: Comm, x: Tensor) -> None:
    work = comm.broadcast(x, source=0, label="x")
    x.zero_()
    work.wait()


def read_in_flight(comm: Comm, x: Tensor, *, by: Comm) -> None:
    comm.all_reduce(x, label="x")
    by.all_reduce(x, label="x").wait()


def test_its_rules(ranks):
    for rank, found in enumerate(ranks(2).run(seen)):
        assert found.pop("before the wait") and found.pop("after a later wait") == [3.0] * 4
        assert found.pop("messages") == [1.0 - rank] * 4
        assert re.match(r"message \[3, 1, 16\] of rank . meets \[3, 1, 16\]", found.pop("order"))
        assert "was written before the wait" in found.pop("written")
        assert re.match(
            "all_reduce .* of all_reduce .*, which was not waited for|reduce_scatter", found.pop("read elsewhere")
        )
        assert not found
