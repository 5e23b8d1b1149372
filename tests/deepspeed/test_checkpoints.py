"""save_checkpoint and load_checkpoint by DeepSpeed's calls, at another stage and another number of ranks."""

import pytest
import torch
from torch import nn

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts

SCHEDULE = {"type": "WarmupDecayLR", "params": {"total_num_steps": 30, "warmup_num_steps": 3, "warmup_max_lr": 1e-2}}


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A run saved at stage 3 by two ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, ranks(2).run(scripts.save, folder=str(folder), stage=3, scheduler=SCHEDULE)[0]


@pytest.mark.parametrize(("world", "stage"), [(2, 3), (2, 1), (2, 0), (1, 2)])
def test_a_resumed_run_goes_on_as_if_nothing_had_been(ranks, saved, world, stage):
    folder, expected = saved
    found = ranks(world).run(scripts.resume, folder=str(folder), stage=stage, scheduler=SCHEDULE)[0]
    assert found["path"] == str(folder / f"global_step{scripts.STEPS}")
    assert found["client"]["epoch"] == 3 and found["client"]["order"].tolist() == [0, 1, 2]
    assert found["global_steps"] == scripts.STEPS and found["samples"] == scripts.STEPS * scripts.BATCH
    for name, value in expected["saved"].items():
        assert torch.equal(found["loaded"][name], value)
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    assert found["lr"] == pytest.approx(expected["lr"])


def test_the_module_alone(ranks, saved):
    folder, expected = saved
    found = ranks(2).run(
        scripts.resume, folder=str(folder), stage=2, scheduler=SCHEDULE, tag="global_step8", load_module_only=True
    )[0]
    assert found["global_steps"] == 0 and found["lr"] != expected["lr"]
    assert torch.equal(found["loaded"]["fc1.weight"], expected["saved"]["fc1.weight"])


def test_the_16_bit_model_is_a_plain_state_dict(saved):
    folder, expected = saved
    state = torch.load(folder / "model.bin", weights_only=True)
    scripts.build().load_state_dict(state)
    assert torch.equal(state["fc2.weight"], expected["saved"]["fc2.weight"])


def test_a_folder_without_latest_loads_nothing(ranks, tmp_path):
    found = ranks(2).run(scripts.resume, folder=str(tmp_path), stage=1, scheduler=SCHEDULE)[0]
    assert found == {"path": None, "client": {}}


def loaded_before_the_backward(process, *, folder: str, stage: int) -> dict[str, str]:
    """The error of a backward whose forward ran before a change of the weights, for each kind of change."""
    said = {}
    for change in ("load_checkpoint", "safe_set_full_fp32_param"):
        engine, *_ = deepspeed.initialize(model=scripts.build(), config=scripts.config(stage=stage))
        scripts.loop(process, engine, steps=1)
        engine.save_checkpoint(f"{folder}/{stage}{change}")
        scripts.loop(process, engine, steps=1)
        x, y = (part.chunk(process.world_size)[process.rank] for part in scripts.data(0))
        loss = nn.functional.cross_entropy(engine(x), y)
        if change == "load_checkpoint":
            engine.load_checkpoint(f"{folder}/{stage}{change}")
        else:
            deepspeed.utils.safe_set_full_fp32_param(engine.module.fc2.weight, torch.ones(10, 32))
        try:
            engine.backward(loss)
            said[change] = "trained"
        except RuntimeError as error:
            said[change] = str(error)
        engine.engine.discard_gradients()
        scripts.loop(process, engine, steps=1)  # a forward from after it trains
        engine.destroy()
    return said


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_load_between_forward_and_backward_is_an_error_as_in_plain_pytorch(ranks, stage, tmp_path):
    for said in ranks(2).run(loaded_before_the_backward, folder=str(tmp_path), stage=stage):
        assert "needed for gradient computation has been modified" in said["load_checkpoint"]
        if stage < 3:  # stage 3 reads the new values, as inside GatheredParameters
            assert "needed for gradient computation has been modified" in said["safe_set_full_fp32_param"]


def test_what_is_refused(ranks, tmp_path):
    errors = ranks(2).run(scripts.refuse_saving, folder=str(tmp_path))[0]
    assert "vars(args)" in errors["client_state"] and "without a path" in errors["tag"]
    assert "rank0, rank1" in errors["differing tags"]
    assert "does not exist" in errors["missing"]
    assert not list(tmp_path.iterdir())
