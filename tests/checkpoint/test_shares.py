"""A load sends each rank the entries of the ranges that it reads, and no other rank reads the manifest."""

import pickle
import random
import sys
from pathlib import Path

import pytest
import torch

from tests.checkpoint.runs import Setup, canonical, train_steps
from tests.zero.models import Layout
from ztk.checkpoint import load, save
from ztk.checkpoint.manifest import Entry, Manifest, StateFile, TensorInfo
from ztk.checkpoint.shares import shares_of
from ztk.core.runtime import Process


def manifest_of(files: list[StateFile], *, shapes: dict[str, list[int]]) -> Manifest:
    infos = [TensorInfo(name=name, shape=shape, dtype="F32", trainable=True) for name, shape in shapes.items()]
    nothing = {
        "versions": {},
        "layout": {},
        "state_names": [],
        "control": {},
        "counters": {},
        "data": None,
        "extra": None,
    }
    options = {"step": 1, "created": 0.0, "metric": None, "block_bytes": 1 << 20, "tied": {}, "buffers": []}
    return Manifest(world_size=len(files), parameters=infos, files=files, **options, **nothing)


def state_file(number: int, *, entries: list[Entry]) -> StateFile:
    return StateFile(file=f"rank-{number:05d}.safetensors", nbytes=0, header_nbytes=0, header_crc32=0, entries=entries)


def entry(name: str, start: int, stop: int, *, box: list[list[int]] | None = None, kind: str = "master") -> Entry:
    return Entry(name=name, kind=kind, dtype="F32", start=start, stop=stop, offset=0, crc32=[0], box=box)


def flat_manifest(ranks: int, *, layers: int, numel: int) -> tuple[Manifest, list[dict[str, tuple[int, int]]]]:
    """A model of `layers` parameters, each divided over all ranks, and the ranges of the ranks."""
    step = numel // ranks
    wanted = [{f"layers.{i}": (rank * step, (rank + 1) * step) for i in range(layers)} for rank in range(ranks)]
    kinds = ("master", "exp_avg", "exp_avg_sq")
    files = [
        state_file(rank, entries=[entry(name, *span, kind=kind) for name, span in own.items() for kind in kinds])
        for rank, own in enumerate(wanted)
    ]
    return manifest_of(files, shapes={f"layers.{i}": [numel] for i in range(layers)}), wanted


@pytest.mark.parametrize("ranks", [4, 16, 64])
def test_a_ranks_share_has_as_many_bytes_whatever_the_number_of_ranks(ranks):
    manifest, wanted = flat_manifest(ranks, layers=8, numel=64 * 64)
    shares = shares_of(manifest, wanted=wanted)
    for rank, share in enumerate(shares):
        assert share == {rank: manifest.files[rank].entries}
    nbytes = [len(pickle.dumps(share)) for share in shares]
    assert max(nbytes) < 1.1 * len(pickle.dumps({0: flat_manifest(4, layers=8, numel=64 * 64)[0].files[0].entries}))


def test_shares_have_every_entry_that_has_a_wanted_element():
    draw = random.Random(5)
    for _ in range(50):
        shape = [draw.randint(1, 6) for _ in range(draw.randint(1, 3))]
        positions = torch.arange(torch.Size(shape).numel()).view(shape)
        entries, elements = [], []
        for _ in range(12):
            box = [[first := draw.randrange(size), draw.randint(1, size - first)] for size in shape]
            part = positions[tuple(slice(first, first + size) for first, size in box)].reshape(-1)
            start = draw.randrange(part.numel())
            stop = draw.randint(start + 1, part.numel())
            entries.append(entry("weight", start, stop, box=box))
            elements.append(set(part[start:stop].tolist()))
        manifest = manifest_of(
            [state_file(n, entries=[each]) for n, each in enumerate(entries)], shapes={"weight": shape}
        )
        start = draw.randrange(positions.numel())
        stop = draw.randint(start + 1, positions.numel())
        (share,) = shares_of(manifest, wanted=[{"weight": (start, stop)}])
        needed = {number for number, own in enumerate(elements) if own & set(range(start, stop))}
        assert needed <= share.keys()
        assert all(min(elements[number]) < stop and max(elements[number]) >= start for number in share)


def opened_by_a_load(process: Process, *, folder: str) -> tuple[list[str], bool]:
    """Names of the files that this rank opened, and whether the loaded states are equal."""
    setup = Setup(layout=Layout(stage=3))
    engine = setup.engine(process)
    train_steps(engine, start=0, stop=1)
    save(engine, folder=folder)
    opened, again, watching = [], setup.engine(process), [True]

    def note(event: str, arguments: tuple) -> None:
        if watching[0] and event == "open" and str(arguments[0]).startswith(folder):
            opened.append(Path(str(arguments[0])).name)

    sys.addaudithook(note)
    load(again, path=folder)
    watching[0] = False
    states, loaded = canonical(engine), canonical(again)
    return opened, all(torch.equal(states[key], loaded[key]) for key in states | loaded)


def test_only_rank_0_opens_the_manifest_and_each_rank_its_files(ranks, tmp_path):
    (first, first_same), (second, second_same) = ranks(2).run(opened_by_a_load, folder=str(tmp_path))
    assert first.count("manifest.json") == 1
    assert set(second) == {"rank-00001.safetensors"}, second
    assert first_same and second_same
