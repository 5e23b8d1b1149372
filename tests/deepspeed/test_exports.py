"""Full weights out of checkpoints, of ztk and of DeepSpeed, and parts of checkpoints into models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.deepspeed_model import TinyModel
from tests.deepspeed import exports
from ztk.deepspeed import zero_to_fp32

RECORDED = Path(__file__).parents[1] / "checkpoint" / "data" / "deepspeed"


@pytest.fixture(scope="module", params=[(1, False, False), (3, True, False), (3, False, True)], ids=str)
def saved(request, ranks, tmp_path_factory):
    """(folder, rank 0's results, whether only trained parameters were saved)."""
    stage, bf16, trained_only = request.param
    folder = tmp_path_factory.mktemp("saved")
    arguments = {"folder": str(folder), "stage": stage, "bf16": bf16, "trained_only": trained_only}
    return folder, ranks(2).run(exports.save, **arguments)[0], trained_only


def test_fp32_weights_of_a_checkpoint(saved):
    folder, found, trained_only = saved
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder)
    frozen = {"base.weight", "base.bias"}
    expected = {name: value for name, value in found["full"].items() if name != "losses"}
    assert set(state) == set(expected) - (frozen if trained_only else set())
    for name, value in state.items():
        assert value.dtype is expected[name].dtype and torch.equal(value, expected[name]), name
    assert state["again.weight"] is state["head.weight"]
    trained = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(
        folder, "global_step3", exclude_frozen_parameters=True, lazy_mode=True
    )
    assert frozen.isdisjoint(trained) and torch.equal(trained["up.weight"].contiguous(), expected["up.weight"])
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(exports.make(seed=2), folder)
    assert torch.equal(model.up.weight, expected["up.weight"])


def test_weights_in_the_models_dtype(saved):
    folder, found, _ = saved
    state = torch.load(folder / "trained.bin", weights_only=True)
    assert set(state) == {"down.weight", "up.weight", "head.weight", "again.weight", "scale", "prompt", "places"}
    assert set(found["consolidated"]) == set(found["full"]) - {"losses"}
    assert found["module"]["model.up.weight"] == (24, 4) and "model.base.weight" not in found["module"]


def test_the_script_in_a_checkpoint_runs(ranks, tmp_path):
    found = ranks(2).run(exports.save, folder=str(tmp_path), stage=1, bf16=False, trained_only=False)[0]
    script = [sys.executable, tmp_path / "zero_to_fp32.py", tmp_path, tmp_path / "out", "--max_shard_size", "4KB", "-d"]
    done = subprocess.run(script, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "out" / "pytorch_model.bin.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    state = {}
    for name in set(index["weight_map"].values()):
        state |= torch.load(tmp_path / "out" / name, weights_only=True)
    assert torch.equal(state["up.weight"], found["full"]["up.weight"])
    assert index["metadata"]["total_size"] == sum({id(v): v.nbytes for v in state.values()}.values())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_checkpoint_of_deepspeed_itself(stage, tmp_path):
    """Recorded from DeepSpeed 0.19.8 by tests/checkpoint/make_deepspeed.py."""
    folder = RECORDED / f"stage{stage}"
    state = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(folder, "global_step3")
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(TinyModel(), folder, "global_step3")
    for name, value in model.state_dict().items():
        assert torch.equal(value, state[name].to(value.dtype)), name
    zero_to_fp32.convert_zero_checkpoint_to_state_dict(
        folder, tmp_path, dtype="bfloat16", safe_serialization=True, tag="global_step3", max_shard_size=None
    )
    for name, value in load_file(tmp_path / "model.safetensors").items():
        expected = state[name].bfloat16() if state[name].is_floating_point() else state[name]
        assert torch.equal(value, expected)


def test_folders_that_are_no_checkpoints(tmp_path):
    with pytest.raises(ValueError, match="latest"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="global_step7"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, "global_step7")
    with pytest.raises(ValueError, match="such as 5GB"):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
            RECORDED / "stage2", tmp_path, max_shard_size="many", tag="global_step3"
        )


def test_a_checkpoint_of_trained_parameters_resumes(ranks, tmp_path):
    expected = ranks(2).run(exports.save, folder=str(tmp_path), stage=3, bf16=False, trained_only=True)[0]["full"]
    found = ranks(2).run(exports.resume, folder=str(tmp_path), stage=2)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)  # the two stages add gradients up alike; losses to rounding


@pytest.mark.parametrize("stage", [1, 3])
def test_parts_of_a_checkpoint(ranks, tmp_path, stage):
    saved = ranks(2).run(exports.save, folder=str(tmp_path), stage=3, bf16=False, trained_only=False)[0]["full"]
    for found in ranks(2).run(exports.partial, folder=str(tmp_path), stage=stage):
        for name, value in found["lenient"].items():
            expected = found["before"][name] if name.startswith("more.") else saved[name]
            assert torch.equal(value, expected), name
        assert "more" in found["strict"]
        for name, value in found["renamed"].items():
            if name.startswith("inner."):
                assert torch.equal(value, saved[name.removeprefix("inner.")]), name
        assert all(value.eq(0.25).all() for value in found["loaded"].values())
        assert "missing extra.bias" in found["missing"] and found["bias"].eq(1).all()
