"""`init_inference`'s configuration: merged keys, accepted keys, keys accepted with a note, and refusals."""

import json

import pytest
import torch
from torch import nn

import ztk.deepspeed as deepspeed
from tests.deepspeed.serving import small
from ztk.deepspeed.config import DeepSpeedConfigError
from ztk.deepspeed.serving.config import ALIASES, KEYS


def test_keys_equal_deepspeeds():
    """All fields and aliases of `inference/config.py` in 0.19.8; here `aio` is next to `zero`."""
    fields = """replace_with_kernel_inject dtype tensor_parallel enable_cuda_graph use_triton triton_autotune zero triangular_masking moe
        keep_module_on_host quant checkpoint base_dir set_empty_params save_mp_checkpoint_path checkpoint_config return_tuple
        training_mp_size replace_method injection_policy injection_policy_tuple config max_out_tokens min_out_tokens transposed_mode
        mp_size mpu ep_size ep_group ep_mp_group moe_experts moe_type"""
    assert set(KEYS) == {*fields.split(), "aio"}
    assert set(ALIASES.values()) <= set(KEYS)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ({}, torch.float16),
        ({"dtype": torch.half}, torch.float16),
        ({"dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"dtype": "float"}, torch.float32),
    ],
)
def test_dtypes(given, dtype):
    assert deepspeed.DeepSpeedInferenceConfig(**given).dtype is dtype


def test_old_names_and_other_names():
    config = deepspeed.DeepSpeedInferenceConfig(
        kernel_inject=True,
        tp={"tp_size": 2},
        max_tokens=7,
        injection_dict={nn.Linear: ".o_proj"},
        replace_method="auto",
    )
    assert config.replace_with_kernel_inject and config.tensor_parallel.tp_size == 2 and config.max_out_tokens == 7
    assert config.injection_policy == {nn.Linear: ("o_proj",)}
    assert deepspeed.DeepSpeedInferenceConfig(mp_size=4).tensor_parallel.tp_size == 4
    assert deepspeed.DeepSpeedInferenceConfig(mp_size=4, tp={"enabled": False}).tensor_parallel.tp_size == 1


def test_the_defaults_are_accepted_and_say_nothing():
    defaults = deepspeed.default_inference_config()
    assert deepspeed.DeepSpeedInferenceConfig(**defaults).notes == ()


@pytest.mark.parametrize(
    "given",
    [
        {"use_triton": True},
        {"triton_autotune": True},
        {"triangular_masking": False},
        {"return_tuple": False},
        {"transposed_mode": True},
        {"replace_method": "module"},
        {"min_out_tokens": 5},
        {"moe": {"num_experts": [8]}},
        {"moe_type": "residual"},
        {"tensor_parallel": {"tp_grain_size": 1}},
    ],
)
def test_hints_are_noted(given):
    notes = deepspeed.DeepSpeedInferenceConfig(dtype="fp32", **given).notes
    assert len(notes) == 1 and next(iter(given)) in notes[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dtype": "int8"}, "quantised weights are not offered"),
        ({"dtype": None}, "must be fp16, bf16 or fp32"),
        ({"replace_with_kernel_injection": True}, "did you mean replace_with_kernel_inject"),
        ({"tensor_parallel": {"tp_sice": 2}}, "did you mean tp_size"),
        ({"mp_size": 2, "tensor_parallel": {"tp_size": 4}}, "old name of tensor_parallel.tp_size, which is 4"),
        ({"mp_size": 2, "mpu": object()}, "keep one"),
        ({"max_tokens": 5, "max_out_tokens": 6}, "another name of max_out_tokens"),
        ({"enable_cuda_graph": True}, "reduce-overhead"),
        ({"quant": {"enabled": True}}, "quantised weights are not offered"),
        ({"quant": {"activation": {}, "enabeld": True}}, "did you mean enabled"),
        ({"moe": {"ep_size": 2}}, "expert_parallel"),
        ({"ep_size": 2}, "expert_parallel"),
        ({"base_dir": "weights"}, "no effect without checkpoint"),
        ({"checkpoint": 3}, "must be a path"),
        ({"set_empty_params": True}, "meta device"),
        ({"save_mp_checkpoint_path": "there"}, "leave it out"),
        ({"training_mp_size": 2}, "zero_to_fp32"),
        ({"zero_optimization": {"stage": 3}}, "is called zero"),
        ({"fp16": {"enabled": True}}, "dtype='fp16'"),
        ({"aio": {"block_size": 4096}}, "no effect without zero"),
        ({"zero": {"stage": 3}, "keep_module_on_host": True}, "offload_param.device=cpu"),
        ({"injection_policy": {"LlamaDecoderLayer": ("o_proj",)}}, "must be a class of modules"),
        ({"injection_policy": {nn.Linear: ()}}, "ends of names"),
        ({"injection_policy": {nn.Linear: "a"}, "injection_policy_tuple": ("a",)}, "keep one"),
        ({"zero": {"stage": 1}}, "use stage 3"),
        ({"zero": {"stage": 3, "offload_param": {"device": "nvme"}}}, "zero.offload_param.nvme_path"),
        ({"zero": {"offload_param": {"device": "cpu"}}}, "zero.offload_param.device=cpu: has no effect at stage 0"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_refused_with_a_fix(given, message):
    with pytest.raises(DeepSpeedConfigError, match=message):
        deepspeed.init_inference(nn.Linear(2, 2), config=given)


def test_all_faults_come_at_once():
    with pytest.raises(DeepSpeedConfigError) as caught:
        deepspeed.DeepSpeedInferenceConfig(dtype="int8", enable_cuda_graph=True, tp={"tp_size": 0}, dtipe="fp16")
    assert len(caught.value.faults) == 4


def test_arguments_and_configuration_are_one(tmp_path):
    path = tmp_path / "inference.json"
    path.write_text(json.dumps({"dtype": "fp32", "max_out_tokens": 5}))
    engine = deepspeed.init_inference(nn.Linear(2, 2), config=str(path), max_out_tokens=5)
    assert engine.module.weight.dtype is torch.float32
    with pytest.raises(DeepSpeedConfigError, match="max_out_tokens: is 5 in config and 6 as an argument"):
        deepspeed.init_inference(nn.Linear(2, 2), config=str(path), max_out_tokens=6)


@pytest.mark.parametrize(
    ("model", "given", "message"),
    [
        (small.llama, {"mp_size": 4}, r"1 ranks cannot be divided by 4; start 4 ranks.* or use tp_size=1"),
        (lambda: "llama", {}, "must be a module"),
        (lambda: deepspeed.init_inference(nn.Linear(2, 2)), {}, "pass engine.module"),
        (lambda: nn.Linear(2, 2, device="meta"), {}, "has no weights; give checkpoint="),
        (lambda: nn.Linear(2, 2), {"replace_with_kernel_inject": True}, "Linear has no module that a kernel"),
    ],
)
def test_models_that_do_not_fit_are_refused(model, given, message):
    with pytest.raises(ValueError, match=message):
        deepspeed.init_inference(model(), **given)


def test_a_model_of_another_engine_is_refused():
    engine, *_ = deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})
    with pytest.raises(ValueError, match="belongs to another engine; call its destroy"):
        deepspeed.init_inference(engine.module)
    engine.destroy()
    deepspeed.init_inference(engine.module)


def test_a_prompt_that_is_too_long():
    engine = deepspeed.init_inference(small.llama(), dtype="fp32", max_tokens=8)
    with pytest.raises(ValueError, match="max_out_tokens=8: the prompt has 9 tokens"):
        engine.generate(small.prompts(), max_new_tokens=1)
    assert engine.generate(small.prompts(length=8), max_new_tokens=2, do_sample=False).shape == (2, 10)


def test_the_engine_answers_for_its_module():
    model = small.llama()
    engine = deepspeed.init_inference(model, dtype="bf16")
    assert engine.module is model and engine.config is model.config and not engine.training
    assert {p.dtype for p in engine.parameters()} == {torch.bfloat16}
    assert model.model.rotary_emb.inv_freq.dtype is torch.float32  # buffers keep theirs
    assert engine.get_input_embeddings() is model.get_input_embeddings()
    with pytest.raises(AttributeError):
        engine.no_such_name  # noqa: B018
    with pytest.raises(ValueError, match="profile_model_time"):
        engine.model_times()
    engine.profile_model_time()
    engine(input_ids=small.prompts())
    engine(input_ids=small.prompts())
    times = engine.model_times()
    assert len(times) == 2 and min(times) > 0 and engine.model_times() == []
    assert not hasattr(deepspeed.init_inference(nn.Linear(2, 2)), "generate")
