"""Kernel injection: the replaced modules, and equal answers."""

import pytest
import torch
from torch import nn

import ztk.deepspeed as deepspeed
from tests.deepspeed.serving import small
from ztk.hf import attention_interface
from ztk.hf.kernels import inject_kernels

# fp32: sums of up to 48 terms in another order, through two layers, of values below 4: a few dozen roundings of 2^-23.
FP32 = 1e-5
# 16 bits: HF's norms round twice, the kernels once; a rounding of 2^-11 (2^-8) in each of 8 steps on values below 2.
HALF = {torch.float16: 8 * 2 * 2**-11, torch.bfloat16: 8 * 2 * 2**-8}
FULL_PROMPTS = "2 attention of full prompts -> attention"
EXPECTED = {
    small.llama: {"2 LlamaAttention -> rope", "2 LlamaMLP -> swiglu", "5 LlamaRMSNorm -> rms_norm", FULL_PROMPTS},
    small.gpt2: {"5 LayerNorm -> layer_norm", FULL_PROMPTS},
    small.gemma: {"2 GemmaAttention -> rope", "2 GemmaMLP -> geglu", FULL_PROMPTS},  # its norms compute something else
    small.bert: {"5 LayerNorm -> layer_norm", FULL_PROMPTS},
}


@pytest.mark.parametrize("make", EXPECTED, ids=lambda make: make.__name__)
def test_what_is_replaced_and_that_nothing_changes(make):
    tokens = small.prompts()
    expected = small.answer(make(), tokens)
    engine = deepspeed.init_inference(make(), dtype="fp32", replace_with_kernel_inject=True)
    assert set(str(engine._injection).split(", ")) == EXPECTED[make]
    assert any(note.startswith("replace_with_kernel_inject: ") for note in engine.notes)
    torch.testing.assert_close(small.answer(engine, tokens), expected, rtol=0, atol=FP32)


@pytest.mark.parametrize("make", [small.llama, small.gpt2, small.gemma], ids=lambda make: make.__name__)
def test_generated_texts_are_the_same(make):
    """Greedy, by beams, and with padded prompts."""
    tokens, mask = small.prompts(), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    plain, engine = make(), deepspeed.init_inference(make(), dtype="fp32", kernel_inject=True)
    for more in ({}, {"num_beams": 3}, {"attention_mask": mask}):
        assert torch.equal(small.greedy(engine, tokens, **more), small.greedy(plain, tokens, **more))


@pytest.mark.parametrize("dtype", HALF)
def test_in_16_bits(dtype):
    expected = small.answer(small.llama().to(dtype), small.prompts())
    engine = deepspeed.init_inference(small.llama(), dtype=dtype, replace_with_kernel_inject=True)
    torch.testing.assert_close(small.answer(engine, small.prompts()), expected, rtol=0, atol=HALF[dtype])


def test_the_attention_kernel_reads_prompts_and_nothing_else(monkeypatch):
    calls = []
    original = attention_interface.attention
    monkeypatch.setattr(
        attention_interface, "attention", lambda q, k, v, **more: calls.append(q.shape[1]) or original(q, k, v, **more)
    )
    engine = deepspeed.init_inference(small.llama(), dtype="fp32", replace_with_kernel_inject=True)
    small.greedy(engine.module, small.prompts(), new=3)
    assert calls == [9, 9]  # both layers, the prompt; later tokens look back at a cache
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, 0] = 0
    engine(input_ids=small.prompts(), attention_mask=mask)
    assert calls == [9, 9]


def test_a_window_is_kept():
    """Mistral with a window shorter than the prompt: transformers brings a mask, torch's attention computes."""
    from transformers import MistralConfig, MistralForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 4}
    model = MistralForCausalLM(MistralConfig(**sizes, **heads)).eval()
    tokens = small.prompts(length=12)
    expected, text = small.answer(model, tokens), small.greedy(model, tokens)
    engine = deepspeed.init_inference(model, dtype="fp32", replace_with_kernel_inject=True)
    torch.testing.assert_close(small.answer(engine, tokens), expected, rtol=0, atol=FP32)
    assert torch.equal(small.greedy(engine, tokens), text)


def test_destroy_gives_the_forwards_back():
    model, tokens = small.llama(), small.prompts()
    expected = small.answer(model, tokens)
    engine = deepspeed.init_inference(model, dtype="fp32", replace_with_kernel_inject=True)
    engine.destroy()
    engine.destroy()
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(small.answer(model, tokens), expected)


class ScaledNorm(nn.Module):
    """Looks like a norm by its name and attributes, and computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x):
        return x * self.weight / x.abs().mean(-1, keepdim=True)


class GatedMLP(nn.Module):
    """A gated MLP; no kernel has a gate by relu, or by the exact form of gelu."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 8)
        self.act_fn = act

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


@pytest.mark.parametrize(
    "module", [ScaledNorm(), GatedMLP(nn.ReLU()), GatedMLP(nn.GELU())], ids=["norm", "relu", "erf gelu"]
)
def test_what_computes_otherwise_is_left_alone(module):
    model = nn.Sequential(module, nn.LayerNorm(8))
    assert str(inject_kernels(model)) == "1 LayerNorm -> layer_norm"


def test_random_states_are_left_alone():
    model = nn.Sequential(GatedMLP(nn.SiLU()), nn.RMSNorm(8, eps=1e-6))
    before = torch.get_rng_state()
    assert len(inject_kernels(model).forwards) == 2
    assert torch.equal(torch.get_rng_state(), before)
