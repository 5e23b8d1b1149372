"""verify, show, export and import: exported and imported values have the same bits."""

import json
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn

from tests.checkpoint.runs import Setup, canonical, digest, reload, save_some, try_load
from tests.zero.models import Layout, build, make_engine
from ztk.checkpoint import CheckpointError, load, read_manifest, resolve, save
from ztk.checkpoint.__main__ import main
from ztk.checkpoint.convert import import_checkpoint
from ztk.checkpoint.export import export_safetensors, export_state_dict, export_torch_distributed
from ztk.checkpoint.tensorfile import TensorFileWriter
from ztk.checkpoint.verify import verify

SETUP = Setup(layout=Layout(stage=3), dtype="bf16")


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    ranks(2).run(save_some, setup=SETUP, folder=str(folder), steps=[1, 2])
    return folder


def masters(ranks, folder) -> dict[str, torch.Tensor]:
    return ranks(1).run(read_masters, folder=str(folder))[0]


def read_masters(process, *, folder: str) -> dict[str, torch.Tensor]:
    engine = Setup().engine(process)
    load(engine, path=folder, weights_only=True)
    return {name: value for (kind, name), value in canonical(engine).items() if kind == "master"}


def test_verify_and_show(saved, capsys):
    assert main(["verify", str(saved)]) == 0
    assert capsys.readouterr().out.count("complete") == 2
    assert main(["show", str(saved), "--parameters"]) == 0
    out = capsys.readouterr().out
    assert (
        "stage=3" in out and "blocks.0.up.weight" in out and "head.weight" in out and "tied to embedding.weight" in out
    )


def test_a_closed_pipe_is_no_error(saved):
    """As `show DIR | head -1`."""
    command = [sys.executable, "-m", "ztk.checkpoint", "show", str(saved), "--parameters"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as shown:
        shown.stdout.close()
        assert shown.stderr.read() == b""
    assert shown.returncode == 0


def test_verify_names_the_fault(saved, tmp_path, capsys):
    step = tmp_path / "step-000002"
    step.mkdir()
    for path in (saved / "step-000002").iterdir():
        (step / path.name).write_bytes(path.read_bytes())
    path = step / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    (step / "rank-00000.safetensors").unlink()
    assert main(["verify", str(step)]) == 1
    out = capsys.readouterr().out
    assert "2 faults" in out and "rank-00001.safetensors" in out and "rank-00000.safetensors is missing" in out
    assert main(["verify", str(tmp_path / "nowhere")]) == 1


@pytest.mark.parametrize("shard_bytes", [1 << 30, 20_000])
def test_safetensors_out_and_in_again(ranks, saved, tmp_path, shard_bytes):
    report = export_safetensors(saved, to=tmp_path / "hf", dtype=torch.float32, shard_bytes=shard_bytes)
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    if report.files > 1:
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == names[:-1]
        assert all((tmp_path / "hf" / name).stat().st_size < shard_bytes + 2000 for name in names[:-1])
    tensors = {}
    for path in (tmp_path / "hf").glob("*.safetensors"):
        tensors |= load_file(path)
    expected = masters(ranks, saved)
    assert tensors.keys() == expected.keys() and "head.weight" not in tensors  # tied: once
    assert all(torch.equal(tensors[name].view(-1), expected[name]) for name in expected)
    assert tensors["blocks.0.up.weight"].shape == (96, 24)

    step = import_checkpoint(tmp_path / "hf", to=tmp_path / "back")
    assert not verify(step).faults
    assert "contains only weights" in ranks(2).run(try_load, setup=SETUP, path=str(step))[0]
    assert all(torch.equal(value, expected[name]) for name, value in masters(ranks, step).items())


def test_the_default_dtype_is_the_models(saved, tmp_path):
    export_safetensors(saved, to=tmp_path / "hf")
    assert {value.dtype for value in load_file(tmp_path / "hf" / "model.safetensors").values()} == {torch.bfloat16}


def test_state_dict_out_and_into_a_plain_model(ranks, saved, tmp_path):
    export_state_dict(saved, to=tmp_path / "model.pt", dtype=torch.float32)
    model = build(3)
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    expected = masters(ranks, saved)
    assert all(torch.equal(parameter.view(-1), expected[name]) for name, parameter in model.named_parameters())
    with pytest.raises(ValueError, match="exists"):
        export_state_dict(saved, to=tmp_path / "model.pt")


def test_import_renames(ranks, tmp_path):
    model = build(7)
    save_file({f"transformer.{name}": p.data for name, p in model.named_parameters()}, tmp_path / "other.safetensors")
    assert (
        main(["import", str(tmp_path / "other.safetensors"), str(tmp_path / "in"), "--rename", "^transformer.", ""])
        == 0
    )
    found = masters(ranks, tmp_path / "in")
    assert all(torch.equal(parameter.view(-1), found[name]) for name, parameter in model.named_parameters())


class Normed(nn.Module):
    """A model with buffers, one of them an integer, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.frozen = nn.Linear(4, 2).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.norm(self.up(x))).square().mean()


def train_normed(process, *, folder: str) -> dict[str, torch.Tensor]:
    engine = make_engine(process, layout=Layout(stage=2), model=Normed())
    for step in range(3):
        engine.backward(engine(torch.randn(5, 3) + step))
        engine.step()
    save(engine, folder=folder)
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def load_normed(process, *, folder: str, weights_only: bool) -> dict[str, torch.Tensor]:
    engine = make_engine(process, layout=Layout(stage=1), model=Normed())
    load(engine, path=folder, weights_only=weights_only)
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def test_buffers_return_from_formats_that_do_not_name_them(ranks, tmp_path):
    expected = ranks(1).run(train_normed, folder=str(tmp_path / "saved"))[0]
    assert expected["norm.num_batches_tracked"] == 3
    for to, *options in (("out.pt",), ("hf",), ("dcp", "--torch-distributed")):
        assert main(["export", str(tmp_path / "saved"), str(tmp_path / to), *options]) == 0
        assert main(["import", str(tmp_path / to), str(tmp_path / f"{to}-in")]) == 0
        found = ranks(1).run(load_normed, folder=str(tmp_path / f"{to}-in"), weights_only=not options)[0]
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype, (to, name)


def test_a_checkpoint_of_ztk_is_not_imported(saved, tmp_path, capsys):
    for path in (saved, saved / "step-000002"):
        assert main(["import", str(path), str(tmp_path / "in")]) == 1
        assert "a checkpoint of ztk already" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(saved, tmp_path, capsys):
    (tmp_path / "file").write_text("not a folder")
    for name in ("hf", "model.pt"):
        assert main(["export", str(saved), str(tmp_path / "file" / name)]) == 1
        assert "a part of the path is a file" in capsys.readouterr().err


def test_torch_distributed_checkpoint_resumes_with_its_optimizer(ranks, tmp_path):
    """An FSDP2 checkpoint: weights, moments and the step are imported, on another number of ranks."""
    state = ranks(1).run(write_dcp, folder=str(tmp_path / "dcp"))[0]
    step = import_checkpoint(tmp_path / "dcp", to=tmp_path / "in")
    assert step.name == "step-000004" and read_manifest(step).state_names == ["exp_avg", "exp_avg_sq"]
    for world, layout in ((2, Layout(stage=3, offload="cpu")), (1, Layout())):
        assert ranks(world).run(reload, setup=Setup(layout=layout), folder=str(tmp_path / "in"))[0].states == state


def test_torch_distributed_out_and_in_again(ranks, saved, tmp_path):
    expected = ranks(2).run(reload, setup=SETUP, folder=str(saved))[0].states
    assert main(["export", str(saved), str(tmp_path / "dcp"), "--torch-distributed"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dcp"]
    state = {"model.blocks.0.up.weight": torch.empty(96, 24)}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "dcp"), no_dist=True)
    assert torch.equal(state["model.blocks.0.up.weight"].view(-1), masters(ranks, saved)["blocks.0.up.weight"])
    import_checkpoint(tmp_path / "dcp", to=tmp_path / "back")
    assert ranks(2).run(reload, setup=SETUP, folder=str(tmp_path / "back"))[0].states == expected


def write_dcp(process, *, folder: str) -> str:
    model = build(2)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        model(torch.randint(10, (2, 6))).backward()
        optimizer.step()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {f"model.{name}": parameter.data for name, parameter in model.named_parameters()}
    result = {("master", name): parameter.detach().view(-1) for name, parameter in model.named_parameters()}
    for parameter, values in optimizer.state.items():
        for kind, value in values.items():
            state[f"optim.state.{names[id(parameter)]}.{kind}"] = value
            if kind != "step":
                result[kind, names[id(parameter)]] = value.view(-1)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    return digest(result)


def test_unknown_sources_are_refused(tmp_path):
    (tmp_path / "text.pt").write_text("hello")
    (tmp_path / "cut.safetensors").write_bytes(b"\xff" * 20)
    for name in ("text.pt", "cut.safetensors", "missing"):
        with pytest.raises(CheckpointError, match=name):
            import_checkpoint(tmp_path / name, to=tmp_path / "in")
    with pytest.raises(CheckpointError):
        resolve(tmp_path / "in")


def _imported(folder, *, value: float):
    weights = {"own.weight": torch.full((3, 5), value), "other.bias": torch.arange(4.0)}
    torch.save(weights, folder / "state.pt")
    return import_checkpoint(folder / "state.pt", to=folder / "in").parent


@pytest.mark.parametrize("export", [export_safetensors, export_state_dict])
def test_values_that_the_dtype_cannot_hold_are_refused(tmp_path, export):
    step, out = _imported(tmp_path, value=7e4), tmp_path / "out.pt"
    with pytest.raises(
        ValueError, match=r"own.weight has values up to 7e\+04, which float16 cannot hold; use --dtype fp32"
    ):
        export(step, to=out, dtype=torch.float16)
    assert not list(tmp_path.glob("out*"))
    export(step, to=out, dtype=torch.bfloat16)


def test_an_export_that_the_disk_changed_gets_no_name(tmp_path, monkeypatch):
    step, finish, save_ = _imported(tmp_path, value=1.0), TensorFileWriter.finish, torch.save

    def damaged(self):
        finish(self)
        with open(self.path, "r+b") as file:
            file.seek(self.offset("other.bias") + 5)
            file.write(b"x")

    monkeypatch.setattr(TensorFileWriter, "finish", damaged)
    with pytest.raises(CheckpointError, match="model.safetensors: other.bias differs from its value before the write"):
        export_safetensors(step, to=tmp_path / "out")
    monkeypatch.setattr(torch, "save", lambda state, to: save_(state | {"other.bias": state["other.bias"] + 1}, to))
    with pytest.raises(CheckpointError, match="differs from its value before the write"):
        export_state_dict(step, to=tmp_path / "out.pt")
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("damage", ["a value", "a number", "a cut file"])
def test_a_distributed_export_that_the_disk_changed_gets_no_name(ranks, saved, tmp_path, monkeypatch, damage):
    whole = dcp.save

    def damaged(state, *, storage_writer, no_dist):
        name = "optim.state.blocks.0.up.weight.exp_avg"
        other = {
            "a value": {name: state[name] + 1},
            "a number": {"optim.param_groups": changed(state["optim.param_groups"])},
        }
        whole(state | other.get(damage, {}), storage_writer=storage_writer, no_dist=no_dist)
        if damage == "a cut file":
            (file,) = storage_writer.path.glob("*.distcp")
            file.write_bytes(file.read_bytes()[:-5000])

    def changed(groups):
        return [{**groups[0], "lr": groups[0]["lr"] * 2}, *groups[1:]]

    monkeypatch.setattr(dcp, "save", damaged)
    said = {
        "a value": "optim.state.blocks.0.up.weight.exp_avg differs from its value before the write",
        "a number": "optim.param_groups differs from its value before the write",
        "a cut file": "cannot be read again",
    }
    with pytest.raises(CheckpointError, match=said[damage]):
        export_torch_distributed(saved, to=tmp_path / "dcp")
    assert not list(tmp_path.glob("dcp*"))
