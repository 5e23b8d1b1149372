"""The engine's counters, its styles of loops, and its properties."""

import json

import pytest
import torch

import ztk.deepspeed as deepspeed
from tests.deepspeed import scripts
from tests.deepspeed.scripts import config, plain
from tests.deepspeed.test_train import STAGES, close


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("style", ["torch", "scale", "unscaled", "no_sync", "boundary"])
def test_ways_to_write_a_loop(ranks, stage, style):
    found = ranks(2).run(scripts.loops, stage=stage, style=style)[0]
    close(found, plain())
    assert found["global_steps"] == scripts.STEPS


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_overflow_counts_as_a_step_but_not_for_the_schedule(ranks, stage):
    rows = ranks(2).run(scripts.overflow, stage=stage)[0]
    steps, skipped, applied, overflowed, scales, rates, moved = (list(column) for column in zip(*rows, strict=True))
    assert steps == [1, 2, 3, 4, 5] and skipped == [0, 0, 1, 1, 1]
    assert applied == [True, True, False, True, True] and overflowed == [not flag for flag in applied]
    assert scales == [256, 256, 128, 128, 128]
    assert rates == pytest.approx([0, 0.0025, 0.0025, 0.005, 0.0075])
    assert moved == [False, False, False, True, True]  # the first two updates are made with rate 0


def test_what_an_engine_answers(ranks):
    found = ranks(2).run(scripts.surface)[0]
    assert found["sizes"] == (8, 4, 1) and found["stage"] == (True, 3, True)
    assert found["scale"] == (128, False, 128, 128) and found["names"] == ("adamw", [(0.9, 0.999)], 5)
    assert found["ranks"] == (True, 2, 2, 1) and found["module"] == (True, True, "module.fc1.weight")
    assert found["modes"] == (False, True) and found["norm"] is None and found["same"] and found["config"] == 8
    assert found["dtypes"] == (torch.float16,) * 3
    assert found["solved"] == (8, 1, "adamw") and found["group"] == [0, 1] and found["scaler"] == (128, 128, False)
    assert found["window"] == (False, 1000, 0)
    errors = found["errors"]
    assert "engine.step() updates" in errors["loss_scaler"]
    assert "no_such_thing" in errors["attribute"] and "scalar" in errors["vector"]
    assert "engine.step()" in errors["optimizer.step"]
    assert "no_sync" in errors["step"]


def test_training_data_becomes_a_loader(ranks):
    first, second = ranks(2).run(scripts.training_data)
    assert [len(batch) for batch in first["seen"]] == [4, 4] and first["steps"] == 2
    numbers = [number for rank in (first, second) for batch in rank["seen"] for number in batch]
    assert len(set(numbers)) == 16


WORDS = {
    "no model": "model is missing",
    "no config": "config is missing",
    "two configs": "given twice",
    "mpu": "get_model_parallel_world_size",
    "foreign": "not the model's",
    "closure": "optimizer=LBFGS: its step needs a closure, and DeepSpeed's engine.step() passes none",
    "no optimizer": "made a list",
    "stepped": "fresh one",
    "twice": "fc1.weight is in the parameter groups 0 and 1",
    "empty": "model_parameters is empty",
    "schedule": "needs something to train",
    "schedule rates": "warmup_min_lr=1",
}


def test_what_initialize_refuses(ranks):
    errors = ranks(2).run(scripts.refusals)[0]
    for name, part in WORDS.items():
        assert part in errors.get(name, "nothing was refused"), name


def test_what_is_passed_outranks_the_configuration(ranks):
    """As in DeepSpeed: with both the passed optimizer and schedule count, and of model_parameters those that the optimizer has."""
    found = ranks(2).run(scripts.passed)[0]
    expected = plain(
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        scheduler=scripts.halving,
        groups=scripts.last_layer,
        clip=0,
    )
    close(found, expected)
    for note in (
        "optimizer: is passed to initialize, too; the passed one counts",
        "scheduler: is passed to initialize, too; the passed one counts",
        "model_parameters: the optimizer lacks 2 of them; its own are trained, the others are frozen",
    ):
        assert note in found["notes"]
    assert found["names"] == ("SGD", None) and found["evaluated"]


def test_progress_and_breakdowns_are_printed_by_rank_0(ranks):
    first, second = ranks(2).run(scripts.printed)
    assert not second and "sub_group_size" in first[0]
    assert [line.split(",")[0] for line in first if line.startswith("step=")] == ["step=2", "step=4"]
    assert sum(line.startswith("milliseconds per step: forward") for line in first) == 2
    assert any(line.startswith("memory: device, parameters") for line in first)


def test_a_script_with_deepspeeds_arguments(ranks, tmp_path):
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(config(stage=1)))
    assert ranks(2).run(scripts.with_arguments, path=str(path))[0] == pytest.approx(plain()[0], abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [({"dist_backend": "mpi"}, "gloo"), ({"rank": 0}, "give both"), ({"rank": 2, "world_size": 2}, "from 0 to")],
)
def test_other_ways_of_joining_are_refused(arguments, part):
    with pytest.raises(ValueError, match=part):
        deepspeed.init_distributed(**arguments)


def optimizer_states(process, *, stage: int) -> dict:
    """Saved after two steps, loaded into a fresh optimizer of another stage, two steps more."""
    first, optimizer, *_ = deepspeed.initialize(model=scripts.build(), config=config(stage=stage))
    losses = scripts.loop(process, first, steps=2)
    state, model = optimizer.state_dict(), {name: value.clone() for name, value in first.module_state_dict().items()}
    losses += scripts.loop(process, first, steps=2, start=2)
    first.destroy()
    module = scripts.build()
    module.load_state_dict(model)
    second, other, *_ = deepspeed.initialize(model=module, config=config(stage=3 - stage))
    other.param_groups[0]["lr"] = 7.0
    other.load_state_dict(state)
    again = scripts.loop(process, second, steps=2, start=2)
    with pytest.raises(ValueError, match="group alike"):
        other.load_state_dict(state | {"param_groups": []})
    second.destroy()
    return {"losses": losses, "again": again, "state": state}


@pytest.mark.parametrize("stage", [0, 3])
def test_an_optimizers_state_dict(ranks, stage):
    """In torch's format, with the values of the plain optimizer; loaded, the run goes on as if nothing had been."""
    model = scripts.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    for step in range(2):
        x, y = scripts.data(step)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    expected = optimizer.state_dict()
    for found in ranks(2).run(optimizer_states, stage=stage):
        state = found["state"]
        assert state["param_groups"][0]["params"] == expected["param_groups"][0]["params"] == [0, 1, 2, 3]
        for number, own in expected["state"].items():
            assert set(state["state"][number]) == set(own) and state["state"][number]["step"] == own["step"] == 2
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(state["state"][number][key], own[key], atol=1e-6, rtol=1e-5)
        assert found["again"] == pytest.approx(found["losses"][2:], abs=1e-6)


def asked_along(process, *, stage: int) -> dict:
    """Properties that scripts read while they train."""
    settings = config(stage=stage, fp16={"enabled": True, "initial_scale_power": 8, "hysteresis": 1}, zero={})
    engine, optimizer, *_ = deepspeed.initialize(model=scripts.build(), config=settings)
    timer, weight, found = engine.tput_timer, engine.module.fc1.weight, {"overflows": []}
    for step in range(4):
        x, y = (value.chunk(2)[process.rank] for value in scripts.data(step))
        x = x * (float("inf") if step == 1 and process.rank == 1 else 1)
        engine.backward(torch.nn.functional.cross_entropy(engine(x).float(), y))
        found["overflows"].append(optimizer.check_overflow(external=True))
        assert optimizer.needs_scaler() == engine.fp16_enabled()
        engine.step()
    timer.update_epoch_count()
    found["speed"], found["epoch"], found["skipped"] = (
        timer.avg_samples_per_sec(),
        timer.epoch_count,
        engine.skipped_steps,
    )
    with engine.no_sync():
        x, y = (value.chunk(2)[process.rank] for value in scripts.data(7))
        engine.backward(torch.nn.functional.cross_entropy(engine(x).float(), y))
        found["own"] = deepspeed.safe_get_full_grad(weight)
        with pytest.raises(RuntimeError, match="between the backward at a boundary"):
            optimizer.check_overflow()
    engine.allreduce_gradients()
    found["mean"] = deepspeed.safe_get_full_grad(weight)
    engine.step()
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", STAGES)
def test_what_scripts_ask_while_they_train(ranks, stage):
    first, second = ranks(2).run(asked_along, stage=stage)
    for found in (first, second):
        assert found["overflows"] == [False, True, False, False] and found["skipped"] == 1
        assert found["speed"] > 0 and found["epoch"] == 1
    assert not torch.equal(first["own"], second["own"]) and torch.equal(first["mean"], second["mean"])
    mean = (first["own"] + second["own"]) / 2
    torch.testing.assert_close(
        first["mean"], mean, atol=2e-4, rtol=2**-9
    )  # fp16: 2^-11 for each rank and the sum, some of it subnormal
