"""Layers cut over two ranks, by the model's plan or a policy: the answers of one rank."""

import pytest
import torch
from torch import nn

import ztk.deepspeed as deepspeed
from tests.deepspeed.serving import small
from ztk.core.runtime import Process

# fp32: sums of 48 terms are two sums of 24, in two layers, of values below 4: a few dozen roundings of 2^-23.
FP32 = 1e-5
LLAMA, OPT = ("self_attn.o_proj", "mlp.down_proj"), ("self_attn.out_proj", ".fc2")
BERT = ("attention.output.dense", "output.dense")


def policy(name: str) -> dict:
    from transformers.models.bert.modeling_bert import BertLayer
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer
    from transformers.models.opt.modeling_opt import OPTDecoderLayer

    known = {
        "llama": {LlamaDecoderLayer: LLAMA},
        "unplanned": {LlamaDecoderLayer: LLAMA},
        "opt": {OPTDecoderLayer: OPT},
        "bert": {BertLayer: BERT},
    }
    return {"injection_policy": known[name]}


def ask(process: Process, *, model: str, options: dict, by_policy: bool = False) -> dict:
    """Answers of a model that ranks share, and the shapes of a rank's parameters."""
    tokens = small.prompts()
    plain = getattr(small, model)()
    if process.rank > 0:  # the first rank's weights are everybody's
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.zero_()
    engine = deepspeed.init_inference(plain, dtype="fp32", **options, **(policy(model) if by_policy else {}))
    torch.manual_seed(process.rank)
    found = {"answer": small.answer(engine, tokens), "notes": engine.notes}
    found["shapes"] = {name: tuple(p.shape) for name, p in engine.module.named_parameters()}
    if hasattr(engine, "generate"):
        found["text"] = small.greedy(engine, tokens)
    engine.destroy()
    return found


def expected(model: str) -> dict:
    plain, tokens = getattr(small, model)(), small.prompts()
    found = {"answer": small.answer(plain, tokens)}
    return found | ({"text": small.greedy(plain, tokens)} if plain.can_generate() else {})


CASES = {
    "by the model's plan": {"model": "llama", "options": {"tensor_parallel": {"tp_size": 2}}},
    "a Conv1D, several projections in one weight": {"model": "gpt2", "options": {"mp_size": 2}},
    "heads that are counted, no policy": {"model": "opt", "options": {"mp_size": 2}},
    "three heads in one weight": {"model": "neox", "options": {"mp_size": 2}},
    "by a policy that agrees": {"model": "llama", "options": {"mp_size": 2}, "by_policy": True},
    "by a policy alone": {"model": "unplanned", "options": {"mp_size": 2}, "by_policy": True},
    "by a policy's names": {"model": "unplanned", "options": {"mp_size": 2, "injection_policy_tuple": LLAMA}},
    "heads that are counted": {"model": "opt", "options": {"mp_size": 2}, "by_policy": True},
    "an encoder": {"model": "bert", "options": {"mp_size": 2}, "by_policy": True},
    "policy and kernels": {
        "model": "llama",
        "options": {"mp_size": 2, "replace_with_kernel_inject": True},
        "by_policy": True,
    },
    "streamed": {
        "model": "llama",
        "options": {"mp_size": 2, "zero": {"stage": 3, "offload_param": {"device": "cpu"}}, "kernel_inject": True},
    },
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_a_model_answer_as_one(ranks, case):
    one = expected(CASES[case]["model"])
    for found in ranks(2).run(ask, **CASES[case]):
        torch.testing.assert_close(found["answer"], one["answer"], rtol=0, atol=FP32)
        if "text" in one:
            assert torch.equal(found["text"], one["text"])


def test_what_a_rank_holds(ranks):
    """Each rank holds half of every sharded layer, by transformers' plan, by the plan derived from the modules, and by a policy."""
    full = {name: tuple(p.shape) for name, p in small.llama().named_parameters()}
    for model in ("llama", "unplanned"):
        shapes = ranks(2).run(ask, model=model, options={"mp_size": 2}, by_policy=model == "unplanned")[0]["shapes"]
        for name, (first, *rest) in full.items():
            if name.endswith(("q_proj.weight", "k_proj.weight", "up_proj.weight")):
                assert shapes[name] == (first // 2, *rest), name
            elif name.endswith(("o_proj.weight", "down_proj.weight")):
                assert shapes[name] == (first, rest[0] // 2), name
            elif name == "lm_head.weight":
                assert shapes[name] == (first // 2, *rest)
            elif name.endswith("norm.weight"):
                assert shapes[name] == (first,), name


def sample(process: Process) -> torch.Tensor:
    model = small.llama()
    torch.manual_seed(process.rank)
    engine = deepspeed.init_inference(model, dtype="fp32", mp_size=2)
    return engine.generate(small.prompts(), max_new_tokens=12, do_sample=True)


def test_ranks_that_share_a_model_draw_the_same_tokens(ranks):
    first, second = ranks(2).run(sample)
    assert torch.equal(first, second)


def refused(process: Process, *, model: str, options: dict, kind: str | None = None) -> str:
    made = getattr(small, model)()
    if kind is not None:
        options = {
            "injection_policy": {type(next(m for m in made.modules() if type(m).__name__ == kind)): options["names"]}
        }
    try:
        deepspeed.init_inference(made, dtype="fp32", mp_size=2, **options)
    except ValueError as error:
        return str(error)
    try:
        deepspeed.init_inference(made, dtype="fp32")
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            {"model": "bert", "options": {}},
            "BertModel brings no tensor-parallel plan, and none follows from its modules",
        ),
        (
            {"model": "gpt2", "kind": "GPT2Block", "options": {"names": ("attn.c_proj",)}},
            "mlp.c_proj is summed over ranks, too: name it",
        ),
        ({"model": "llama", "kind": "LlamaDecoderLayer", "options": {"names": ("o_projj",)}}, "named ...o_projj"),
        (
            {"model": "llama", "kind": "LlamaDecoderLayer", "options": {"names": ("self_attn.o_proj",)}},
            "down_proj is summed over ranks, too: name it",
        ),
        (
            {"model": "llama", "kind": "LlamaDecoderLayer", "options": {"names": (*LLAMA, "up_proj")}},
            "up_proj is not summed over ranks in the model's own plan",
        ),
        ({"model": "llama", "options": {"injection_policy_tuple": ("o_projj",)}}, "no layer of LlamaForCausalLM"),
        ({"model": "llama", "options": {"injection_policy": {nn.Conv2d: ("o_proj",)}}}, "has no Conv2d"),
        ({"model": "llama", "options": {}}, "cut over 2 ranks already; load it anew"),
    ],
    ids=["no plan", "conv1d", "name", "less than the plan", "more than the plan", "names", "class", "twice"],
)
def test_what_cannot_be_cut_is_refused(ranks, case, message):
    for found in ranks(2).run(refused, **case):
        assert message in found
