"""Checkpoints of smaller states: resumed to the bit in any layout, and loaded into other formats with a note."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.checkpoint.runs import Setup, canonical, resume, train_and_save
from tests.zero.models import Layout
from ztk.checkpoint import load
from ztk.core.runtime import Process

FORMATS = {
    "bf16": Setup(optimizer="bf16", dtype="bf16"),
    "bf16-stochastic": Setup(optimizer="bf16", dtype="bf16", master="stochastic"),
    "8bit": Setup(optimizer="8bit", dtype="bf16"),
}
SAVED, RESUMED = (
    (Layout(stage=0), Layout(stage=1, offload="cpu"), Layout(stage=3, offload="nvme")),
    (Layout(stage=3, offload="nvme"), Layout(stage=3), Layout(stage=2)),
)


@pytest.mark.parametrize(
    "places", list(zip(SAVED, RESUMED, strict=True)), ids=lambda places: f"{places[0].id}-to-{places[1].id}"
)
@pytest.mark.parametrize("name", FORMATS)
def test_a_resumed_run_has_the_same_bits_in_another_layout(ranks, tmp_path, name, places):
    before, after = (replace(FORMATS[name], layout=place) for place in places)
    straight = ranks(2).run(train_and_save, setup=before, folder=str(tmp_path), save_at=4, stop=8)
    resumed = ranks(2).run(resume, setup=replace(after, seed=1), folder=str(tmp_path), stop=8)
    assert resumed == straight


def loaded(process: Process, *, setup: Setup, folder: str) -> tuple[dict[tuple[str, str], Tensor], tuple[str, ...]]:
    """The states after a load, and the load's notes."""
    engine = setup.engine(process)
    notes = load(engine, path=folder).notes
    return canonical(engine), notes


@pytest.fixture
def saved(ranks, tmp_path):
    """`save(setup)`: a folder with a checkpoint after 4 steps, and the states that are in it."""

    def save(setup: Setup) -> tuple[str, dict[tuple[str, str], Tensor]]:
        ranks(1).run(train_and_save, setup=setup, folder=str(tmp_path), save_at=4, stop=4)
        states, notes = ranks(1).run(loaded, setup=setup, folder=str(tmp_path))[0]
        assert notes == ()
        return str(tmp_path), states

    return save


@pytest.mark.parametrize("name", FORMATS)
def test_float32_takes_every_format_exactly(ranks, saved, name):
    folder, states = saved(FORMATS[name])
    wide, (note,) = ranks(1).run(loaded, setup=Setup(dtype="bf16"), folder=folder)[0]
    assert "this run master: float32, exp_avg: float32" in note
    for key, value in states.items():
        assert torch.equal(wide[key], value), key


# Relative to the largest of 32 neighbours. The scale s is at most 2^-7 above it. A moment is (c / 127)^2 s and its code half a code off:
# (c + 1/2)^2 - c^2 <= 127.25 of 127^2. A second moment is (c / 255)^2 s^2 of a root's scale s. A bfloat16 has 2^-8, 24 bits of a float32
# 2^-16, and one in the middle between two bfloat16 a unit of float32 more.
BOUNDS = {
    "bf16": {"master": 0, "exp_avg": 2**-8, "exp_avg_sq": 2**-8},
    "bf16-stochastic": {"master": 2**-8, "exp_avg": 2**-8, "exp_avg_sq": 2**-8},
    "8bit": {
        "master": 2**-16 + 2**-23,
        "exp_avg": (1 + 2**-7) * 127.25 / 127**2,
        "exp_avg_sq": (1 + 2**-7) ** 2 * 255.25 / 255**2,
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_takes_float32_rounded_once_with_a_note(ranks, saved, name):
    folder, states = saved(Setup(dtype="bf16"))
    rounded, (note,) = ranks(1).run(loaded, setup=FORMATS[name], folder=folder)[0]
    assert note.startswith(str(Path(folder) / "step-")) and "rounded once" in note
    for (kind, parameter), value in states.items():
        error = (rounded[kind, parameter] - value).abs()
        size = value.abs() if name != "8bit" or kind == "master" else largest_of_32(value)
        assert (error <= BOUNDS[name][kind] * size).all(), (kind, parameter)


def largest_of_32(value: Tensor) -> Tensor:
    """For each element the largest size among the 32 that share its scale."""
    groups = torch.nn.functional.pad(value.abs(), (0, -len(value) % 32)).view(-1, 32)
    return groups.amax(dim=1).repeat_interleave(32)[: len(value)]
