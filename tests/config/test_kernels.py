"""`kernels.log_every` and the hardware that its floors are counted with."""

import json

import pytest

from tests.config.test_config import CPU, GPU, composed, faults
from ztk.config.identity import job_hash
from ztk.core.policies.hardware import REQUIRED

RATES = ("memory_bandwidth", "bf16_rate", "fp16_rate", "fp32_rate")


def test_it_is_off_and_no_part_of_the_experiment():
    assert composed().kernels.log_every == 0
    assert job_hash(composed()) == job_hash(composed("kernels.log_every=10"))


def test_a_gpu_run_takes_peak_rates_from_its_hardware():
    config = composed("kernels.log_every=10", "hardware=h200", machine=GPU)
    assert config.hardware.name == "h200" and config.hardware.memory_bandwidth == 4.8e12
    assert config.hardware.pcie_bandwidth is None and config.hardware.capacity_bytes is None
    assert composed("kernels.log_every=10", machine=GPU).hardware.memory_bandwidth is None


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_a_gpu_run_takes_the_peak_of_its_mfu_from_hardware(precision):
    name = f"{precision}_rate"
    config = composed("hardware=h200", f"precision={precision}", machine=GPU)
    assert config.hardware.name == "h200" and getattr(config.hardware, name) > 0
    assert [key for key in RATES if getattr(config.hardware, key) is not None] == [name]
    assert getattr(composed(f"hardware.{name}=1e12", f"precision={precision}", machine=GPU).hardware, name) == 1e12


@pytest.mark.parametrize(
    "words, fault",
    [
        (("hardware=h200", "hardware.memory_bandwidth=1e12"), "hardware.memory_bandwidth"),
        (("hardware.bf16_rate=1e12", "precision=fp32"), "hardware.bf16_rate"),
        (("hardware=h200", "task=sft"), "hardware=h200 has no effect with task=sft"),
        (("hardware=h200", "data._target_=x.Y"), "hardware=h200 has no effect"),
        (("hardware=h200", "launch.device=cpu"), "hardware=h200 has no effect"),
    ],
)
def test_hardware_is_refused_where_no_mfu_is_counted(words, fault):
    assert any(fault in line for line in faults(*words, machine=GPU)), faults(*words, machine=GPU)


def test_a_run_with_rates_is_planned_without_hardware():
    from ztk.experiments.policies import hardware

    assert hardware(composed("kernels.log_every=10", "hardware=h200", machine=GPU)) is None
    assert hardware(composed("task=plan", "hardware=h200")).name == "h200"


def test_this_machine_as_it_was_measured(tmp_path):
    file = tmp_path / "here.json"
    needed = [name for name in REQUIRED if not name.startswith("network")]
    file.write_text(
        json.dumps({"hardware": {name: 8 for name in needed if name != "name"} | {"memory_bandwidth": 1e10}})
    )
    config = composed("kernels.log_every=5", "hardware=here", f"hardware.file={file}")
    assert config.hardware.memory_bandwidth == 1e10 and config.hardware.fp32_rate == 8
    (fault,) = faults("kernels.log_every=5", "hardware=here", f"hardware.file={tmp_path / 'none'}")
    assert "was never written" in fault


@pytest.mark.parametrize(
    "words, fault",
    [
        (("kernels.log_every=-1",), "kernels.log_every=-1"),
        (("kernels.log_every=5", "train.log_every=2"), "use kernels.log_every=6"),
        (("kernels.log_every=5", "logger.every=4"), "use kernels.log_every=8"),
        (("kernels.log_every=50", "train.steps=20"), "use kernels.log_every=20"),
        (("kernels.log_every=5", "kernels=reference"), "use kernels=auto, or kernels.log_every=0"),
        (("kernels.log_every=5", "hardware=h100"), "use hardware=here, or leave it out"),
        (("kernels.log_every=5", "hardware.memory_bandwidth=1e10"), "hardware.bf16_rate=VALUE"),
        (("hardware=h100",), "use task=plan, or kernels.log_every=N"),
        (("kernels.log_every=5", "hardware.pcie_bandwidth=1e10"), "only with task=plan and hardware=NAME"),
        (("task=generate", "kernels.log_every=5"), "only with tasks that train"),
    ],
)
def test_what_cannot_be_timed_is_refused_with_the_fix(words, fault):
    assert any(fault in line for line in faults(*words, machine=CPU))


def test_what_wandb_never_sees_is_no_fault():
    assert composed("kernels.log_every=5", "logger=disabled").kernels.log_every == 5


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "stage3"])
def test_every_engine_takes_it(engine):
    assert composed(f"zero={engine}", "kernels.log_every=5").kernels.log_every == 5


def test_a_profile_is_no_part_of_the_experiment():
    assert job_hash(composed()) == job_hash(composed("train.profile=2:3"))


@pytest.mark.parametrize(
    "words, fault",
    [
        (("train.profile=3",), "must be START:STOP"),
        (("train.profile=0:2",), "must be START:STOP"),
        (("train.profile=3:2",), "must be START:STOP"),
        (("train.profile=18:30", "train.steps=20"), "use train.profile=18:20, or train.steps=30"),
        (("task=eval", "eval.path=x", "model.path=x", "train.profile=1:2"), "train.profile"),
    ],
)
def test_a_profile_of_no_steps_is_refused(words, fault):
    assert any(fault in line for line in faults(*words)), faults(*words)
