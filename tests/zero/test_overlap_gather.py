"""`overlap_gather`: the forward of stages 1 and 2 begins while updated parameters are gathered, and each use waits for its gather."""

import contextlib
import copy
import io
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from torch import nn

from tests.core.streams.model import modelled
from tests.planner.measure import Case, planned
from tests.zero.models import Layout, batches, make_engine, train
from ztk.core.policies.zero import ZeroPolicy
from ztk.zero.parameters import awaited

OVERLAP = {"overlap_gather": True}
DELAY = 0.05  # of a gather; only a read that does not wait depends on it


@contextlib.contextmanager
def compiled(*backends: object) -> Iterator[None]:
    """Inside, torch.compile was called with these and no others: a process of tests may have compiled something long before."""
    import torch._dynamo.eval_frame

    with mock.patch.dict(torch._dynamo.eval_frame.cached_backends, dict(enumerate(backends)), clear=True):
        yield


def train_overlapping(process, **given):
    with compiled():
        return train(process, **given)


@pytest.mark.parametrize("offload", ["none", "cpu"])
@pytest.mark.parametrize("stage", [1, 2])
def test_the_same_bits(ranks, stage, offload):
    layouts = [Layout(stage=stage, offload=offload, zero=zero) for zero in ({}, OVERLAP)]
    usual, overlapping = (ranks(2).run(train_overlapping, layout=layout, steps=4, dtype="bf16") for layout in layouts)
    assert [run.digest for run in usual] == [run.digest for run in overlapping]
    assert [run.elements for run in usual] == [run.elements for run in overlapping]


READS = {
    "a sum": lambda p, m: p.sum(),
    "data": lambda p, m: p.data.clone(),
    "a list": lambda p, m: torch.tensor(p.tolist()),
    "in a list": lambda p, m: torch.stack([p, p]),
    "foreach": lambda p, m: torch._foreach_norm([p])[0],
    "a state dict": lambda p, m: m.state_dict()["norm.weight"].clone(),
    "a copy": lambda p, m: copy.deepcopy(p).detach(),
    "a copy of the module": lambda p, m: copy.deepcopy(m).norm.weight.detach(),
    "a file": lambda p, m: torch.save(p, file := io.BytesIO()) or file.seek(0) or torch.load(file, weights_only=False).detach(),
    "an attribute": lambda p, m: _not_seen(m.norm.weight),
    "a view": lambda p, m: p.view(-1)[:3].clone(),
    "numpy": lambda p, m: torch.from_numpy(p.detach().numpy().copy()),
}  # fmt: skip


def _not_seen(parameter: nn.Parameter) -> torch.Tensor:
    """As a function of an extension reads it."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.detach().clone()


def reads(process, *, stage: int) -> dict[str, tuple[bool, bool, bool]]:
    """For each read: whether the gather was pending before, whether it is pending after, and whether the read value equals the final one."""
    engine, found = make_engine(process, layout=Layout(stage=stage, zero=OVERLAP)), {}
    stream = batches(len(READS), rank=process.rank, world=process.world_size)
    module = engine.module.blocks[1]
    kept = module.norm.weight
    engine.zero.buckets[0].comm.before = lambda label: (
        time.sleep(DELAY) if "all_gather" in label and "blocks.1" in label else None
    )
    for (name, read), tokens in zip(READS.items(), stream, strict=True):
        engine.backward(engine(tokens, outside=False))
        with compiled():
            engine.step()
        is_awaited = isinstance(kept, awaited._Awaited)
        _ = kept.shape, kept.grad, kept.requires_grad, kept._version
        still = isinstance(kept, awaited._Awaited)
        value = read(kept, module)
        is_there = not isinstance(kept, awaited._Awaited)
        engine.zero.finish_update()
        for bucket in engine.zero.buckets:
            bucket.residency.wait_for_values()
        found[name] = is_awaited and still, is_there, bool(torch.equal(value, read(kept, module)))
    engine.close()
    assert type(kept).__name__ == "WatchedParameter"
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_whoever_reads_a_parameter_waits(ranks, stage):
    for found in ranks(2).run(reads, stage=stage):
        assert found == dict.fromkeys(READS, (True, True, True))


VIEWS = {"data": lambda p: p.data, "detached": lambda p: p.detach(), "a slice": lambda p: p.view(-1)[:3].detach()}


def views(process) -> dict[str, tuple[bool, bool, bool]]:
    """Of each view that a script keeps over a step: the parameter's value was awaited before, is not while there is one, and is seen by it."""
    engine, found = make_engine(process, layout=Layout(stage=1, zero=OVERLAP)), {}
    kept = engine.module.blocks[1].norm.weight
    engine.zero.buckets[0].comm.before = lambda label: (
        time.sleep(DELAY) if "all_gather" in label and "blocks.1" in label else None
    )

    def is_awaited(tokens) -> bool:
        engine.backward(engine(tokens, outside=False))
        with compiled():
            engine.step()
        return isinstance(kept, awaited._Awaited)

    stream = batches(2 * len(VIEWS), rank=process.rank, world=process.world_size)
    for name, of in VIEWS.items():
        before, view = is_awaited(next(stream)), of(kept)
        during, seen = is_awaited(next(stream)), view.clone()
        found[name] = before, during, bool(torch.equal(seen, of(kept)))
        del view
    engine.close()
    return found


def test_a_step_waits_while_a_script_has_a_view(ranks):
    for found in ranks(2).run(views):
        assert found == dict.fromkeys(VIEWS, (True, False, True))


def test_two_threads_wait_for_one_gather(ranks):
    assert all(ranks(2).run(reads_of_two_threads))


def reads_of_two_threads(process) -> bool:
    engine = make_engine(process, layout=Layout(stage=1, zero=OVERLAP))
    kept = engine.module.blocks[1].norm.weight
    engine.zero.buckets[0].comm.before = lambda label: (
        time.sleep(DELAY) if "all_gather" in label and "blocks.1" in label else None
    )
    engine.backward(engine(next(batches(1, rank=process.rank, world=process.world_size)), outside=False))
    with compiled():
        engine.step()
    assert isinstance(kept, awaited._Awaited)
    with ThreadPoolExecutor(2) as threads:
        values = list(threads.map(lambda _: kept.detach().clone(), range(2)))
    is_seen = all(torch.equal(value, kept) for value in values)
    engine.close()
    return is_seen


def test_after_torch_compile_a_step_waits_for_all(ranks):
    """Compiled code reads parameters without hooks."""
    assert all(ranks(2).run(is_awaited_after_compiling))


def is_awaited_after_compiling(process) -> bool:
    engine = make_engine(process, layout=Layout(stage=1, zero=OVERLAP))
    kept = engine.module.blocks[1].norm.weight
    found = []
    for backends in ((), ("inductor",)):
        engine.backward(engine(next(batches(1, rank=process.rank, world=process.world_size)), outside=False))
        with compiled(*backends):
            engine.step()
            engine.zero._update._join()
        found.append(isinstance(kept, awaited._Awaited))
        engine.zero.finish_update()
    engine.close()
    return found == [True, False]


CASE = Case(ranks=2, stage=1, dtype="bf16", zero=OVERLAP)


@pytest.mark.parametrize("case", [CASE, Case(ranks=2, stage=2, dtype="bf16", offload="cpu", zero=OVERLAP)], ids=str)
def test_no_race(case, tmp_path):
    with compiled(), modelled() as model:
        planned(case, folder=str(tmp_path))
    assert not model.races and model.checked > 1000


def test_an_early_read_is_a_race(tmp_path):
    with compiled(), modelled() as model, mock.patch.object(awaited, "_arrive", lambda value: None):
        planned(CASE, folder=str(tmp_path))
    assert any("all_gather" in race for race in model.races)


def test_it_is_refused_without_effect_and_where_reads_are_invisible(ranks):
    for stage in (0, 3):
        with pytest.raises(ValueError, match="overlap_gather"):
            ZeroPolicy(stage=stage, overlap_gather=True)
    assert all(ranks(2).run(refusals))


def refusals(process) -> bool:
    engine = make_engine(process, layout=Layout(stage=1, zero=OVERLAP))
    with pytest.raises(ValueError, match="compiled code"):
        engine.zero.compile(engine.module)
    engine.close()
    scripted = nn.Sequential(torch.jit.script(nn.Linear(4, 4)))
    with pytest.raises(ValueError, match="scripted module 0"):
        make_engine(process, layout=Layout(stage=1, zero=OVERLAP), model=scripted)
    return True
