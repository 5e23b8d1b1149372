"""Checkpoints that every node keeps in a folder of its own: four ranks on two nodes, as far as their folders go."""

import shutil
import warnings
from pathlib import Path

import pytest
import torch

from tests.checkpoint.runs import Outcome, Setup, canonical, digest, outcome, seed_all, train_steps
from tests.zero.models import Layout
from ztk.checkpoint import SaveFailed, Saver, load, load_newest, save
from ztk.checkpoint.verify import verify
from ztk.core.runtime import Process

WORLD, SAVED, STOP = 4, 2, 4
SETUPS = {
    "stage 0": Setup(layout=Layout(stage=0)),
    "stage 1": Setup(layout=Layout(stage=1, offload="cpu")),
    "stage 2": Setup(layout=Layout(stage=2), frozen=("blocks.0.up.weight",)),
    "stage 3": Setup(layout=Layout(stage=3, offload="nvme"), dtype="bf16"),
}


def node_of(process: Process, *, folder: str) -> Path:
    """Ranks 0 and 1 are on node 0, ranks 2 and 3 on node 1."""
    return Path(folder, f"node{process.rank // 2}")


def engine_of(process: Process, *, setup: Setup):
    """An engine whose model has a buffer, which rank 0 alone saves."""
    engine = setup.engine(process)
    engine.module.register_buffer("passes", torch.full((3,), float(engine.global_steps)))
    return engine


def undisturbed(process: Process, *, setup: Setup, folder: str) -> Outcome:
    """Saves at steps 1 and SAVED, and goes on. Losses are those after SAVED."""
    seed_all(process, seed=5)
    engine = engine_of(process, setup=setup)
    for step in range(1, SAVED + 1):
        train_steps(engine, start=step - 1, stop=step)
        engine.module.passes.fill_(float(step))
        save(engine, folder=node_of(process, folder=folder), local=True)
    return outcome(engine, losses=train_steps(engine, start=SAVED, stop=STOP))


def continued(process: Process, *, setup: Setup, folder: str) -> tuple[Outcome, int, list[float], str, list[str]]:
    """The rest of the run from the newest checkpoint: its outcome, the first step, the buffer, the loaded states, warnings."""
    seed_all(process, seed=99)
    engine = engine_of(process, setup=setup)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = load_newest(engine, folder=node_of(process, folder=folder), local=True)
    assert report.path.is_relative_to(node_of(process, folder=folder))
    told = [str(warning.message) for warning in caught if warning.category is RuntimeWarning]
    loaded = digest(canonical(engine))
    losses = train_steps(engine, start=report.step, stop=STOP)
    return outcome(engine, losses=losses), report.step, engine.module.passes.tolist(), loaded, told


def refusal(process: Process, *, setup: Setup, folder: str) -> str:
    try:
        report = load_newest(engine_of(process, setup=setup), folder=node_of(process, folder=folder), local=True)
    except ValueError as error:
        return everywhere(error)
    return "nothing" if report is None else "loaded"


def everywhere(error: Exception) -> str:
    """The message without the node's number in its paths, which are equal on real nodes."""
    return str(error).replace("/node1", "/node0")


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """The folder of each kind of run, and its outcome on each rank."""
    made = {}

    def make(kind: str) -> tuple[Path, list[Outcome]]:
        if kind not in made:
            folder = tmp_path_factory.mktemp("nodes")
            made[kind] = folder, ranks(WORLD).run(undisturbed, setup=SETUPS[kind], folder=str(folder))
        return made[kind]

    return make


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved("stage 3")[0], tmp_path / "copy"))


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("kind", SETUPS)
def test_a_run_continues_with_the_bits_of_an_undisturbed_one(ranks, saved, kind):
    folder, straight = saved(kind)
    for node, numbers in enumerate([(0, 1), (2, 3)]):
        step = folder / f"node{node}" / f"step-{SAVED:06d}"
        assert files(step) == {"manifest.json", *(f"rank-{number:05d}.safetensors" for number in numbers)}
        assert (step.parent / "latest").read_text() == f"{step.name}\n"
    for rank, (found, step, buffer, _, told) in enumerate(
        ranks(WORLD).run(continued, setup=SETUPS[kind], folder=str(folder))
    ):
        assert (found, step, buffer, told) == (straight[rank], SAVED, [SAVED] * 3, [])
    for node in range(2):
        assert files(folder / f"node{node}") == {"latest", "step-000001", "step-000002"}  # no borrowed files are left


def test_the_files_of_all_nodes_in_one_folder_are_an_ordinary_checkpoint(ranks, saved, tmp_path):
    folder, _ = saved("stage 3")
    for node in range(2):
        shutil.copytree(folder / f"node{node}", tmp_path / "merged", dirs_exist_ok=True)
    step = tmp_path / "merged" / f"step-{SAVED:06d}"
    assert verify(step).faults == ()
    states = ranks(WORLD).run(continued, setup=SETUPS["stage 3"], folder=str(folder))[0][3]
    for world, setup in ((2, SETUPS["stage 0"]), (1, SETUPS["stage 3"])):
        loaded = ranks(world).run(merged_states, setup=setup, folder=str(tmp_path / "merged"))
        assert set(loaded) == {(states, (float(SAVED),) * 3)}


def merged_states(process: Process, *, setup: Setup, folder: str) -> tuple[str, tuple[float, ...]]:
    engine = engine_of(process, setup=setup)
    load(engine, path=folder)
    return digest(canonical(engine)), tuple(engine.module.passes.tolist())


def test_another_layout_loads_from_the_folders_of_the_same_nodes(ranks, saved):
    folder, _ = saved("stage 3")
    states = {each[3] for each in ranks(WORLD).run(continued, setup=SETUPS["stage 3"], folder=str(folder))}
    for setup in (SETUPS["stage 0"], Setup(layout=Layout(stage=3, zero={"bucket_size": 500}))):
        assert {each[3] for each in ranks(WORLD).run(continued, setup=setup, folder=str(folder))} == states


def test_one_node_without_its_files_is_named(ranks, copy, saved):
    shutil.rmtree(copy / "node1")
    (copy / "node1").mkdir()
    first, *others = ranks(WORLD).run(refusal, setup=SETUPS["stage 3"], folder=str(copy))
    assert others == [first] * 3
    assert "no node has rank-00002.safetensors of" in first and "has no such checkpoint" in first
    assert "copy the folders of these nodes into one" in first
    shutil.rmtree(copy / "node0")
    shutil.copytree(saved("stage 3")[0] / "node1", copy / "node1", dirs_exist_ok=True)
    (copy / "node0").mkdir()
    first, *others = ranks(WORLD).run(refusal, setup=SETUPS["stage 3"], folder=str(copy))
    assert others == [first] * 3
    assert "rank 2 has step-000002, and rank 0 has no checkpoint" in first


def cut(step: Path, *, folder: Path) -> None:
    file = step / "rank-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip(step: Path, *, folder: Path) -> None:
    file = step / "rank-00003.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def lose(step: Path, *, folder: Path) -> None:
    shutil.rmtree(step)


def replace(step: Path, *, folder: Path) -> None:
    """By a checkpoint of the same step of another run."""
    shutil.rmtree(step)
    shutil.copytree(folder / "node1" / step.name, step)


SPOILT = {
    cut: "has rank-00003.safetensors with",
    flip: "are damaged",
    lose: "has no such checkpoint",
    replace: "has another checkpoint of this name",
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_the_newest_step_that_every_node_has_is_loaded(ranks, copy, saved, spoil):
    spoil(copy / "node1" / f"step-{SAVED:06d}", folder=saved("stage 1")[0])
    found = ranks(WORLD).run(continued, setup=SETUPS["stage 3"], folder=str(copy))
    assert [step for _, step, *_ in found] == [1] * WORLD
    assert {tuple(buffer) for _, _, buffer, *_ in found} == {(1.0,) * 3}
    told = found[0][4]
    assert len(told) == 1 and SPOILT[spoil] in told[0] and "step-000001" in told[0]
    assert found[0][3] == ranks(WORLD).run(older_states, folder=str(saved("stage 3")[0]))[0]


def older_states(process: Process, *, folder: str) -> str:
    engine = engine_of(process, setup=SETUPS["stage 3"])
    load(engine, path=node_of(process, folder=folder) / "step-000001", local=True)
    return digest(canonical(engine))


def test_a_save_that_fails_on_one_node_leaves_the_last_one_on_all(ranks, copy):
    texts = ranks(WORLD).run(failing_save, folder=str(copy))
    assert texts == [texts[0]] * WORLD and "rank 2" in texts[0] and "step 3 was not saved" in texts[0]
    for node in range(2):
        assert (copy / f"node{node}" / "latest").read_text() == "step-000002\n"
        assert files(copy / f"node{node}") == {"latest", "step-000001", "step-000002"}
    assert ranks(WORLD).run(refusal, setup=SETUPS["stage 3"], folder=str(copy)) == ["loaded"] * WORLD


def failing_save(process: Process, *, folder: str) -> str:
    """The commit fails on node 1: a folder has taken the name of its pointer."""
    setup = SETUPS["stage 3"]
    engine = engine_of(process, setup=setup)
    load_newest(engine, folder=node_of(process, folder=folder), local=True)
    train_steps(engine, start=SAVED, stop=SAVED + 1)
    pointer = node_of(process, folder=folder) / "latest"
    process.comm.barrier()
    if process.rank == 2:
        pointer.unlink()
        Path(pointer, "inner").mkdir(parents=True)
    process.comm.barrier()
    try:
        save(engine, folder=node_of(process, folder=folder), local=True)
    except SaveFailed as error:
        if process.rank == 2:
            shutil.rmtree(pointer)
            pointer.write_text("step-000002\n")
        process.comm.barrier()
        return everywhere(error)
    return "saved"


def test_unmerged_files_name_the_node_that_has_the_others(ranks, saved):
    folder, _ = saved("stage 3")
    (fault, *_) = verify(folder / "node0" / "step-000002").faults
    assert (
        "rank-00002.safetensors is missing" in fault and "copy the files of that node's folder into this one" in fault
    )
    assert ranks(1).run(reload_error, folder=str(folder / "node0"))[0].count("checkpoint.local=true") == 1


def reload_error(process: Process, *, folder: str) -> str:
    try:
        load(engine_of(process, setup=SETUPS["stage 3"]), path=folder)
    except ValueError as error:
        return str(error)
    return "loaded"


def test_background_saves_are_kept_per_node(ranks, tmp_path):
    from_disk = ranks(WORLD).run(background, folder=str(tmp_path))
    assert len(set(from_disk)) == 1
    for node in range(2):
        assert files(tmp_path / f"node{node}") == {"latest", "step-000002", "step-000003"}


def background(process: Process, *, folder: str) -> str:
    setup = SETUPS["stage 1"]
    engine = engine_of(process, setup=setup)
    with Saver(engine, folder=node_of(process, folder=folder), local=True, asynchronous=True) as saver:
        for step in range(3):
            train_steps(engine, start=step, stop=step + 1)
            saver.save()
    again = engine_of(process, setup=setup)
    load_newest(again, folder=node_of(process, folder=folder), local=True)
    states = digest(canonical(engine))
    assert digest(canonical(again)) == states
    return states
