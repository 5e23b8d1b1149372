"""DeepSpeed's helper modules: the device, memory, seeds, and a configuration without an engine."""

import logging
import random

import numpy
import pytest
import torch

from ztk.deepspeed.config import DeepSpeedConfigError
from ztk.deepspeed.config.settings import DeepSpeedConfig
from ztk.deepspeed.tools import helpers
from ztk.deepspeed.tools.device import _OF_TORCH, Accelerator, get_accelerator


@pytest.fixture
def lines(caplog, monkeypatch):
    logger = logging.getLogger("ztk.deepspeed")
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "level", logging.INFO)
    caplog.set_level(logging.INFO, logger="ztk.deepspeed")
    return lambda: [record.getMessage() for record in caplog.records]


def test_the_device_of_a_machine_without_a_gpu(monkeypatch):
    device = get_accelerator()
    assert device is get_accelerator() and device.is_available()
    assert (device.device_name(), device.device_name(1), device.current_device_name()) == ("cpu", "cpu", "cpu")
    assert device.communication_backend_name() == "gloo" and not device.is_triton_supported()
    assert device.supported_dtypes() == [torch.float, torch.half, torch.bfloat16]
    tensor = torch.ones(2)
    assert device.on_accelerator(tensor) and device.pin_memory(tensor) is tensor and not device.is_pinned(tensor)
    assert device.FloatTensor([1.0]).dtype is torch.float and device.LongTensor([1]).device.type == "cpu"
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (device.current_device(), device.device_count()) == (1, 2)
    state = device.get_rng_state()
    first = torch.rand(1)
    device.set_rng_state(state)
    assert torch.rand(1) == first
    device.synchronize()
    device.empty_cache()
    with device.stream(None), device.device(0):
        assert device.current_stream() is None
    # Of the process and the machine, in bytes: torch alone takes over 100 MB.
    assert 10**8 < device.memory_allocated() <= device.max_memory_allocated() < device.total_memory()
    assert 0 < device.available_memory() < device.total_memory() and device.memory_stats() == {}


def test_a_gpus_names_are_torchs():
    """Nothing here needs a GPU: torch.cuda has every name that is passed on to it, and so has the CPU's stand-in."""
    gpu, cpu = Accelerator("cuda"), get_accelerator()
    for name, own in _OF_TORCH.items():
        assert getattr(gpu, name) is getattr(torch.cuda, own) and hasattr(cpu, name)
    assert gpu.device_name(1) == "cuda:1" and gpu.communication_backend_name() == "nccl"
    with pytest.raises(AttributeError, match="get_accelerator\\(\\).amp: not offered"):
        cpu.amp  # noqa: B018


def test_memory_is_seen_when_forced(lines):
    helpers.see_memory_usage("quiet")
    assert lines() == []
    helpers.see_memory_usage("loud", force=True)
    first, second = lines()
    assert first == "loud" and second.startswith("CPU virtual memory: used = ")
    helpers.empty_cache()


def test_seeds_make_all_three_repeat():
    def draw():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    helpers.set_random_seed(2**70 + 3)
    first = draw()
    helpers.set_random_seed(2**70 + 3)
    assert draw() == first


def test_tensors_in_containers_move():
    tensor = torch.ones(2)
    moved = helpers.move_to_device({"a": [tensor, (tensor, 3)]}, "meta")
    assert moved["a"][0].device.type == "meta" and moved["a"][1][1] == 3 and tensor.device.type == "cpu"
    assert helpers.move_to_device(tensor, "cpu", lambda x: True) is tensor


def test_a_model_is_made_on_another_device_and_in_another_dtype():
    with helpers.OnDevice(dtype=torch.bfloat16, device="meta"):
        model = torch.nn.Linear(4, 4)
    assert model.weight.device.type == "meta" and model.weight.dtype is torch.bfloat16
    with pytest.raises(KeyError), helpers.OnDevice(dtype=torch.float16):
        raise KeyError
    with helpers.OnDevice(dtype=torch.float16, enabled=False):
        assert torch.ones(1).dtype is torch.float and torch.ones(1).device.type == "cpu"
    assert torch.get_default_dtype() is torch.float


def test_small_helpers():
    @helpers.instrument_w_nvtx
    def double(x):
        return 2 * x

    assert double(3) == 6 and double.__name__ == "double"
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.full((4,), 3.0)
    assert helpers.clip_grad_norm_([parameter], 1.0) == 6.0 and parameter.grad.norm() == pytest.approx(1.0)
    with pytest.raises(ValueError, match="gradient_clipping"):
        helpers.clip_grad_norm_([parameter], 1.0, mpu=object())


def test_a_configuration_read_by_itself(lines, monkeypatch):
    monkeypatch.setattr(
        torch.distributed, "is_initialized", lambda: False
    )  # an earlier test may have joined a group here
    monkeypatch.setenv("WORLD_SIZE", "4")
    given = {
        "train_batch_size": 16,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 2},
        "csv_monitor": {"enabled": True},
    }
    config = DeepSpeedConfig(given)
    assert (config.train_micro_batch_size_per_gpu, config.world_size, config.gradient_clipping) == (2, 4, 1.0)
    assert (config.optimizer_name, config.optimizer_params, config.scheduler_name) == ("adamw", {"lr": 1e-3}, None)
    assert config.zero_enabled and config.zero_optimization_stage == 2 and config.monitor_config.enabled
    config.print("mine")
    assert lines()[0] == "mine:" and any("train_batch_size ............. 16" in line for line in lines())
    with pytest.raises(DeepSpeedConfigError, match="did you mean train_batch_size"):
        DeepSpeedConfig({"train_batchsize": 2})
    with pytest.raises(ValueError, match="mpu"):
        DeepSpeedConfig(given, mpu=object())
