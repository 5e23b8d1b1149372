"""A damaged checkpoint is never loaded, and the error names the file and the remaining checkpoints."""

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from tests.checkpoint.runs import Setup, canonical, digest, reload, save_some, try_load
from tests.zero.models import WIDTH, Block, Layout, build, make_engine
from ztk.checkpoint import CheckpointError, load, read_manifest, resolve
from ztk.checkpoint.__main__ import main
from ztk.deepspeed.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

SETUP = Setup(layout=Layout(stage=1))


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    names = ranks(2).run(save_some, setup=SETUP, folder=str(folder), steps=[1, 2, 3])[0]
    assert names == ["latest", "step-000002", "step-000003"]
    return folder


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def files_of(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "step-000003").iterdir())


FILES = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]


def load_error(ranks, path: Path, *, setup: Setup = SETUP, **options) -> str:
    """The error's text, equal on all ranks."""
    texts = ranks(2).run(try_load, setup=setup, path=str(path), **options)
    assert texts[0] == texts[1]
    return texts[0]


def test_files(saved):
    assert files_of(saved) == FILES


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_anywhere_is_found_and_named(ranks, copy, name, seed):
    path = copy / "step-000003" / name
    data = bytearray(path.read_bytes())
    position = random.Random(seed).randrange(len(data)) if seed else 9 + len(data) // 9
    data[position] ^= 1 << seed
    path.write_bytes(data)
    text = load_error(ranks, copy)
    assert str(path) in text and "step-000002" in text, text
    assert load_error(ranks, copy / "step-000002") == ""


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("keep", [None, 0, 0.5, -1])
def test_a_missing_or_truncated_file_is_named(ranks, copy, name, keep):
    path = copy / "step-000003" / name
    data = path.read_bytes()
    path.unlink()
    if keep is not None:
        path.write_bytes(data[: int(len(data) * keep)] if 0 <= keep < 1 else data[:-1])
    text = load_error(ranks, copy)
    assert str(path) in text and "step-000002" in text, text


def test_a_broken_pointer_is_named(ranks, copy):
    (copy / "latest").write_text("step-000009\n")
    text = load_error(ranks, copy)
    assert "latest" in text and "step-000009" in text and "step-000003, step-000002" in text
    (copy / "latest").unlink()  # as after a kill between the first two renames
    assert resolve(copy).name == "step-000003"


@pytest.mark.parametrize(
    "text, fault", [("", "latest is empty"), ("tag9", "latest names 'tag9', which does not exist")]
)
def test_a_broken_pointer_names_the_tags(copy, tmp_path, text, fault):
    """A folder of tags, as DeepSpeed scripts save; every reader of `latest`."""
    tags = tmp_path / "tags"
    for tag in ("tag1", "tag2"):
        shutil.copytree(copy, tags / tag)
    (tags / "latest").write_text(text)
    for read in (resolve, get_fp32_state_dict_from_zero_checkpoint):
        with pytest.raises(CheckpointError, match=f"{fault}; still usable in .*: tag2, tag1"):
            read(tags)


@pytest.mark.parametrize("name", [".", "..", "../copy", "step-000003/.."])
def test_a_pointer_out_of_the_folder_is_named(copy, name):
    (copy / "latest").write_text(f"{name}\n")
    with pytest.raises(CheckpointError, match="latest names"):
        resolve(copy)


def test_a_run_folder_means_its_checkpoints(copy, tmp_path):
    (tmp_path / "run").mkdir()
    copy.rename(tmp_path / "run" / "checkpoints")
    assert resolve(tmp_path / "run") == tmp_path / "run" / "checkpoints" / "step-000003"


def test_leftovers_are_not_seen(copy):
    shutil.copytree(copy / "step-000003", copy / "step-000009.tmp-12ab")
    (copy / "latest").unlink()
    assert resolve(copy).name == "step-000003"


def test_folders_of_other_programs_are_recognised(tmp_path):
    for name, expected in {
        "model.safetensors": "Hugging Face",
        ".metadata": "torch.distributed.checkpoint",
        "mp_rank_00_model_states.pt": "DeepSpeed",
        "notes.txt": "not a ztk checkpoint",
    }.items():
        folder = tmp_path / name.strip(".")
        folder.mkdir()
        (folder / name).touch()
        with pytest.raises(CheckpointError, match=expected):
            resolve(folder)
    with pytest.raises(CheckpointError, match="does not exist"):
        resolve(tmp_path / "nowhere")


def test_folders_of_tags_of_deepspeed_scripts_are_read(copy, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    copy.rename(tmp_path / "out" / "global_step3")
    (tmp_path / "out" / "latest").write_text("global_step3")
    assert resolve(tmp_path / "out") == tmp_path / "out" / "global_step3" / "step-000003"
    assert main(["verify", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.count("complete") == 2


def test_the_error_for_deepspeeds_own_folder_names_the_import(tmp_path, capsys):
    assert main(["show", str(Path(__file__).parent / "data" / "deepspeed" / "stage3")]) == 1
    assert "DeepSpeed" in (printed := capsys.readouterr().err) and "ztk.checkpoint import" in printed


def test_another_version_is_refused(copy):
    with pytest.raises(CheckpointError, match="version 2"):
        read_manifest(rewritten(copy, lambda content: content | {"version": 2}))


@pytest.mark.parametrize("key", ["files", "parameters", "step"])
def test_a_manifest_that_lacks_a_key_is_damaged(copy, key):
    with pytest.raises(CheckpointError, match=key):
        read_manifest(rewritten(copy, lambda content: {k: v for k, v in content.items() if k != key}))


def rewritten(copy: Path, change: Callable[[dict], dict]) -> Path:
    """The last step's folder with another content of its manifest, under the right hash."""
    path = copy / "step-000003" / "manifest.json"
    text = path.read_bytes()[len('{"sha256":"') + 64 + len('",\n"manifest":') : -2]
    changed = json.dumps(change(json.loads(text))).encode()
    path.write_bytes(
        b'{"sha256":"' + hashlib.sha256(changed).hexdigest().encode() + b'",\n"manifest":' + changed + b"}\n"
    )
    return path.parent


def test_another_optimizer_is_refused_and_weights_still_load(ranks, saved):
    other = Setup(layout=Layout(stage=2), optimizer="sgd")
    text = load_error(ranks, saved, setup=other)
    assert "exp_avg, exp_avg_sq" in text and "momentum_buffer" in text and "weights_only" in text
    assert load_error(ranks, saved, setup=other, weights_only=True) == ""


def test_another_model_is_refused(ranks, saved):
    text = ranks(2).run(load_other_model, path=str(saved))[0]
    assert "it lacks blocks.3.norm.weight" in text and "and 1 more" in text
    assert "it has sometimes.0.norm.weight" in text
    assert "embedding.weight [10, 24] instead of [11, 24]" in text


def load_other_model(process, *, path: str) -> str:
    model = build()
    model.blocks.append(Block(odd=3))
    model.sometimes = nn.ModuleList()
    model.embedding = nn.Embedding(11, WIDTH)
    model.head.weight = model.embedding.weight
    try:
        load(make_engine(process, layout=Layout(stage=3), model=model), path=path)
    except ValueError as error:
        return str(error)
    return ""


def test_a_parameter_frozen_when_saved_cannot_resume_but_loads_as_weights(ranks, tmp_path):
    frozen = Setup(frozen=("blocks.0.up.weight",))
    ranks(2).run(save_some, setup=frozen, folder=str(tmp_path), steps=[1])
    assert "blocks.0.up.weight" in load_error(ranks, tmp_path)
    assert load_error(ranks, tmp_path, weights_only=True) == ""


def test_load_after_a_failed_load(ranks, copy, saved):
    path = copy / "step-000003" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    setup = Setup(layout=Layout(stage=3, offload="nvme"), dtype="bf16")
    texts = ranks(2).run(load_twice, setup=setup, first=str(copy), second=str(copy / "step-000002"))
    assert "damaged" in texts[0][0]
    assert texts[0][1] == ranks(2).run(reload, setup=setup, folder=str(saved / "step-000002"))[0].states


def load_twice(process, *, setup: Setup, first: str, second: str) -> tuple[str, str]:
    engine = setup.engine(process)
    try:
        load(engine, path=first)
        text = ""
    except ValueError as error:
        text = str(error)
    load(engine, path=second)
    return text, digest(canonical(engine))
