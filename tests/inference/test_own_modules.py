"""Models outside of the engine's families run their own modules over its cache, as exactly, or are refused by name."""

import threading

import pytest
import torch
import transformers

from tests.inference.models import _GROUPED, greedy
from tests.inference.schedules import alone, run_schedule
from ztk.inference import Generator, InferencePolicy, SamplingParams
from ztk.inference.capacity import BUFFERS
from ztk.inference.module_model import ModuleModel
from ztk.zero.offload import OffloadPolicy

PROMPTS = [[3, 1, 4], [(7 * i + 3) % 96 for i in range(70)]]
OTHERS = {
    "cohere": ("CohereConfig", _GROUPED | {"intermediate_size": 64, "logit_scale": 0.5}),
    "starcoder2": ("Starcoder2Config", _GROUPED | {"intermediate_size": 64, "sliding_window": 24}),
    "smollm3": ("SmolLM3Config", _GROUPED | {"intermediate_size": 64}),
    "gpt_bigcode": (
        "GPTBigCodeConfig",
        {"vocab_size": 96, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 256},
    ),
}

LONGCAT = {
    **{
        "hidden_size": 32,
        "num_layers": 1,
        "num_attention_heads": 4,
        "ffn_hidden_size": 32,
        "expert_ffn_hidden_size": 16,
    },
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "n_routed_experts": 2, "zero_expert_num": 1, "moe_topk": 1},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 8},
}


def build_other(name: str, **options):
    kind, own = OTHERS[name]
    torch.manual_seed(1)
    config = getattr(transformers, kind)(**own | options)
    return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.mark.parametrize("name", OTHERS)
def test_greedy_tokens_equal_transformers(name):
    model = build_other(name)
    generator = Generator(model, policy=InferencePolicy(max_step_tokens=48))
    assert isinstance(generator._model, ModuleModel)
    answers = generator.generate(PROMPTS, sampling=SamplingParams(max_tokens=24, temperature=0))
    for prompt, [answer] in zip(PROMPTS, answers, strict=True):
        assert answer.tokens == greedy(model, prompt=prompt, count=24), f"prompt of {len(prompt)}"


def test_random_schedules_change_no_bit():
    model = build_other("starcoder2")
    expected = alone(model)
    assert all(run_schedule(model, seed=seed)[0] == expected for seed in range(2))


def test_rows_do_not_depend_on_how_threads_divide_them():
    """Three threads of four take these rows, some in the middle of a vector."""
    activation = Generator(build_other("smollm3", intermediate_size=1024))._model._blocks[0].mlp.act_fn
    x, before = torch.randn(1, 96, 1024, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        full = torch.cat([activation(x[:, row : row + 1]) for row in range(96)], dim=1)
        assert all(torch.equal(activation(x[:, :rows]), full[:, :rows]) for rows in range(65, 97))
    finally:
        torch.set_num_threads(before)


BLOCKS = {"kernels": True, "max_model_len": 192}


@pytest.mark.parametrize("name", OTHERS)
def test_tokens_by_kernels_are_those_of_products(name):
    model, sampling = build_other(name), SamplingParams(max_tokens=16, temperature=0, prompt_logprobs=True)
    products, kernels = (
        Generator(model, policy=InferencePolicy(max_step_tokens=48, **more)).generate(PROMPTS, sampling=sampling)
        for more in ({}, BLOCKS)
    )
    for [own], [expected] in zip(kernels, products, strict=True):
        assert own.tokens == expected.tokens
        # Sums in another order, as in test_blocks.
        torch.testing.assert_close(own.prompt_logprobs, expected.prompt_logprobs, rtol=0, atol=1e-4)


def test_random_schedules_over_blocks_change_no_bit():
    model, policy = build_other("starcoder2"), {**BLOCKS, "weights": "int8", "cache_dtype": "fp8"}
    expected, preempted = alone(model, **policy), 0
    for seed in range(2):
        found, generator = run_schedule(model, seed=seed, cache_tokens=192, **policy)
        assert found == expected, seed
        preempted += generator.preempted
    assert preempted > 0


def values(answers) -> list:
    return [(answer.tokens, answer.logprobs.tolist(), answer.prompt_logprobs.tolist()) for [answer] in answers]


def streamed(model, *, folder, layers=6, **more) -> Generator:
    """A generator that reads every layer in every pass."""
    offload = OffloadPolicy(parameters="nvme", nvme_path=str(folder), block_bytes=1 << 14, threads=2)
    options = {"offload": offload, "max_sequences": 2, "max_step_tokens": 48, **more}
    roomy = Generator(model, policy=InferencePolicy(**options))
    sizes = roomy.plan.sizes
    roomy.close()
    assert sizes.layers == layers and roomy.plan.resident == layers
    memory = sizes.fixed + 2 * sizes.sequence + sizes.working(sequences=2, rows=48) + BUFFERS * sizes.layer
    generator = Generator(model, policy=InferencePolicy(**options, memory_bytes=memory))
    assert generator.plan.resident == 0 and not list(folder.iterdir())
    return generator


@pytest.mark.parametrize(
    ("name", "weights"), [("cohere", "stored"), ("starcoder2", "int8"), ("smollm3", "int4"), ("gpt_bigcode", "stored")]
)
def test_streamed_blocks_change_no_bit_and_their_bytes_are_counted(name, weights, tmp_path, monkeypatch):
    model = build_other(name, **{"n_layer" if name == "gpt_bigcode" else "num_hidden_layers": 6})
    sampling = SamplingParams(max_tokens=6, temperature=0.8, seed=3, prompt_logprobs=True)
    expected = Generator(model, policy=InferencePolicy(weights=weights)).generate(PROMPTS, sampling=sampling)
    generator = streamed(model, folder=tmp_path, weights=weights)
    compute, passes, before = generator._model.own_logits, [], generator.streamed_bytes
    monkeypatch.setattr(
        generator._model, "own_logits", lambda *given, **named: passes.append(1) or compute(*given, **named)
    )
    assert values(generator.generate(PROMPTS, sampling=sampling)) == values(expected)
    assert generator.plan.pass_bytes == 6 * generator.plan.sizes.layer
    assert generator.streamed_bytes - before == len(passes) * generator.plan.pass_bytes
    generator.close()


def test_memory_of_streamed_blocks_does_not_follow_the_model(tmp_path):
    held = []
    for layers in (6, 24):
        model = build_other("cohere", num_hidden_layers=layers)
        generator = streamed(model, folder=tmp_path, layers=layers)
        generator.generate(PROMPTS, sampling=SamplingParams(max_tokens=2))
        linear = [part for part in generator._model._module.modules() if hasattr(part, "product")]
        own = sum(parameter.nbytes for parameter in generator._model._blocks[0].parameters())
        held.append((generator._streamed.memory_bytes, generator._model.resident_bytes - layers * own))
        assert len({id(part.product) for part in linear}) <= BUFFERS * len(generator._streamed.file.items) + 1
        generator.close()
    assert held[0] == held[1]


def test_blocks_that_run_in_another_order_are_noticed(tmp_path):
    """Planted: the second block runs before the first one."""
    model = build_other("cohere", num_hidden_layers=6)
    generator = streamed(model, folder=tmp_path)
    layers = generator._model._module.model.layers
    first, second = layers[0], layers[1]
    layers[0], layers[1] = second, first
    with pytest.raises(ValueError, match="another order"):
        generator.generate(PROMPTS)
    generator.close()


def test_two_threads_compute_two_models():
    """A step of one model begins while the other one is in the middle of its own."""
    first, second = (Generator(build_other(name)) for name in ("cohere", "smollm3"))
    inside, others = [], []

    def answers(generator):
        found = generator.generate(PROMPTS, sampling=SamplingParams(max_tokens=3, temperature=0))
        return [(answer.tokens, answer.logprobs.tolist()) for [answer] in found]

    expected = [answers(generator) for generator in (first, second)]

    def begin_the_other(module, given):
        if not inside:
            inside.append(threading.Thread(target=lambda: others.append(answers(second))))
            inside[0].start()
            inside[0].join()

    first._model._blocks[1].register_forward_pre_hook(begin_the_other)
    assert [answers(first), *others] == expected


def test_a_layer_that_is_not_finite_is_named():
    model = build_other("cohere")
    generator = Generator(model)
    generator._model._blocks[1].mlp.down_proj.product._bias = torch.full((32,), float("nan"))
    [[answer]] = generator.generate([PROMPTS[0]])
    assert answer.finish_reason == "error" and "first after layer 1 of 3" in answer.error
    generator = Generator(model, policy=InferencePolicy(**BLOCKS))
    generator._model._blocks[1].mlp.down_proj.product.bias = torch.full((32,), float("nan"))
    [[answer]] = generator.generate([PROMPTS[0]])
    assert answer.finish_reason == "error" and "first after layer 1 of 3" in answer.error


def test_the_module_itself_stays_as_it_is():
    model = build_other("cohere")
    names = [type(part).__name__ for part in model.modules()]
    Generator(model)
    assert [type(part).__name__ for part in model.modules()] == names and model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("MambaConfig", {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}, "mamba: it is recurrent"),
        ("GPTJConfig", {"n_embd": 32, "n_layer": 1, "n_head": 4, "rotary_dim": 4}, "gptj: it does not use transformers' attention interface"),
        ("LongcatFlashConfig", LONGCAT, "longcat_flash: it multiplies by a linear layer's weight itself"),
    ],
)  # fmt: skip
def test_what_cannot_run_over_the_cache_is_refused_by_name(kind, options, reason):
    config = getattr(transformers, kind)(vocab_size=32, **options)
    with pytest.raises(ValueError, match=f"model_type={reason}"):
        Generator(transformers.AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("kind", ["LlavaConfig", "Qwen2AudioConfig"])
def test_multimodal_models_are_refused_by_name(kind):
    """Models of text and images and models of text and sound are refused with the fix."""
    text = {
        "vocab_size": 32,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    other = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    }
    sound = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "num_mel_bins": 8}
    if kind == "LlavaConfig":
        config = transformers.LlavaConfig(
            text_config={"model_type": "llama", **text}, vision_config={"model_type": "clip_vision_model", **other}
        )
        model = transformers.LlavaForConditionalGeneration(config)
    else:
        config = transformers.Qwen2AudioConfig(
            text_config={"model_type": "qwen2", "num_key_value_heads": 2, **text}, audio_config=sound
        )
        model = transformers.Qwen2AudioForConditionalGeneration(config)
    with pytest.raises(
        ValueError, match=f"model_type={config.model_type}: it is multimodal.*load its text model by itself"
    ):
        Generator(model)


def test_modules_that_look_at_other_rows_are_refused():
    """Planted: a norm over all rows of a step."""
    model = build_other("cohere")

    class Everything(torch.nn.Module):
        def forward(self, x):
            return x / x.abs().max()

    model.model.norm = Everything()
    with pytest.raises(ValueError, match="depend on other sequences of the step"):
        Generator(model)
