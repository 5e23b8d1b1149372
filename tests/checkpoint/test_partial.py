"""Partial models: loading a part of a checkpoint, and saving only trained parameters."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.runs import Setup, canonical, resume, seed_all, train_steps, try_load
from tests.zero.models import DTYPES, Layout, build, make_engine
from ztk.checkpoint import LoadReport, load, read_manifest, resolve, save

FROZEN = ("embedding.weight", "blocks.1.up.weight", "blocks.1.up.bias")
SETUP = Setup(layout=Layout(stage=3, offload="nvme", zero={"bucket_size": 3000}), seed=1)


def save_trained(process, *, setup: Setup, folder: str) -> None:
    seed_all(process, seed=5)
    engine = setup.engine(process)
    train_steps(engine, start=0, stop=2)
    save(engine, folder=folder, trained_only=True, data_state={"position": 2}, extra={"note": "x"})


def load_part(process, *, setup: Setup, folder: str, **options) -> tuple[dict, dict, LoadReport]:
    """All states before and after."""
    engine = setup.engine(process)
    train_steps(engine, start=0, stop=1)  # the moments that are kept are not zero
    before = canonical(engine)
    report = load(engine, path=folder, weights_only=True, **options)
    return before, canonical(engine), report


def masters(states: dict[tuple[str, str], Tensor]) -> dict[str, Tensor]:
    return {name: value for (kind, name), value in states.items() if kind in ("master", "parameter")}


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    ranks(2).run(save_trained, setup=Setup(layout=Layout(stage=1)), folder=str(folder))
    return folder


@pytest.mark.parametrize("layout", [Layout(stage=0), SETUP.layout], ids=lambda layout: layout.id)
def test_patterns_choose_the_loaded_parameters_and_the_rest_stays(ranks, saved, layout):
    chosen = ("blocks.0.*", "*.down.weight")
    setup = replace(SETUP, layout=layout)
    full = masters(ranks(2).run(load_part, setup=setup, folder=str(saved))[0][1])
    before, after, report = ranks(2).run(load_part, setup=setup, folder=str(saved), only=chosen)[0]
    names = {name for name in full if name.startswith("blocks.0.") or name.endswith(".down.weight")}
    assert 0 < len(names) < len(full) and set(report.kept) == full.keys() - names
    assert set(report.unused) >= set(report.kept)
    for key, value in after.items():
        if key[1] not in names:
            assert torch.equal(value, before[key]), key
        elif key[0] == "master":
            assert torch.equal(value, full[key[1]]) and not torch.equal(value, before[key])


def test_a_pattern_that_matches_nothing_is_named(ranks, saved):
    text = ranks(2).run(try_load, setup=SETUP, path=str(saved), weights_only=True, only=["bloks.*"])[0]
    assert "only='bloks.*'" in text and "embedding.weight" in text
    text = ranks(2).run(try_load, setup=SETUP, path=str(saved), strict=False)[0]
    assert "weights_only=True" in text


class Wider(torch.nn.Module):
    """The model of the checkpoint under its own names, without one of its blocks, and with a head of its own."""

    def __init__(self) -> None:
        super().__init__()
        model = build(8)
        self.embedding, self.blocks, self.extra = model.embedding, model.blocks[:2], torch.nn.Linear(24, 3)


def load_wider(process, *, folder: str, strict: bool) -> LoadReport | str:
    engine = make_engine(process, layout=Layout(stage=3), model=Wider())
    try:
        return load(engine, path=folder, weights_only=True, strict=strict)
    except ValueError as error:
        return str(error)


def test_what_only_one_side_has_is_reported(ranks, saved):
    refused = ranks(2).run(load_wider, folder=str(saved), strict=True)[0]
    assert "lacks extra.weight, extra.bias" in refused and "it has blocks.2" in refused
    report = ranks(2).run(load_wider, folder=str(saved), strict=False)[0]
    assert set(report.kept) == {"extra.weight", "extra.bias"}
    assert {name.split(".")[0] for name in report.unused} == {"blocks", "sometimes"}  # the head is the embedding
    assert all("blocks.2." in name for name in report.unused if name.startswith("blocks"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_trained_parameters_alone_continue_to_the_same_bits(ranks, tmp_path, dtype):
    """The model provides the frozen ones: here from the seed."""
    setup = Setup(layout=Layout(stage=2), frozen=FROZEN, dtype=dtype)
    for folder, layout in (("a", setup.layout), ("b", Layout(stage=3, offload="nvme"))):
        ranks(2).run(save_trained, setup=replace(setup, layout=layout), folder=str(tmp_path / folder))
    manifest = read_manifest(resolve(tmp_path / "a"))
    assert sorted(manifest.left_out) == sorted(FROZEN)
    assert not any(entry.name in FROZEN for file in manifest.files for entry in file.entries)
    one, other = (ranks(2).run(resume, setup=setup, folder=str(tmp_path / name), stop=4) for name in ("a", "b"))
    assert one == other
    trained = replace(setup, frozen=FROZEN[1:])
    assert "embedding.weight" in ranks(2).run(try_load, setup=trained, path=str(tmp_path / "a"))[0]
