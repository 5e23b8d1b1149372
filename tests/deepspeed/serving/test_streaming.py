"""ZeRO-Inference: parameters that are stored elsewhere change nothing."""

import gc
import math

import pytest
import torch

import ztk.deepspeed as deepspeed
from tests.deepspeed.serving import small
from ztk.core.runtime import Process

CPU = {"stage": 3, "offload_param": {"device": "cpu"}, "stage3_param_persistence_threshold": 0}


def stream(process: Process, *, options: dict) -> dict:
    """Every rank has its own prompt and another number of tokens."""
    model = small.llama()
    engine = deepspeed.init_inference(model, **{"dtype": "fp32"} | options)
    own = small.prompts(seed=process.rank, length=7 + process.rank)
    found = {
        "answer": small.answer(engine, own),
        "text": small.greedy(engine.module, own, new=4 + 5 * process.rank),
        "again": small.greedy(engine, own, new=3),
        "sharded": math.isnan(model.model.layers[0].mlp.up_proj.weight.norm()),
        "notes": engine.notes,
    }
    engine.destroy()
    return found


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
def test_every_rank_has_its_own_text(ranks, tier, tmp_path):
    """To the bit: a layer computes with the same weights wherever they are stored."""
    places = {"cpu": {"device": "cpu"}, "nvme": {"device": "nvme", "nvme_path": str(tmp_path)}}
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    zero |= {"offload_param": places[tier]} if tier in places else {}
    plain = small.llama()
    for rank, found in enumerate(ranks(2).run(stream, options={"zero": zero})):
        own = small.prompts(seed=rank, length=7 + rank)
        assert found["sharded"]
        assert torch.equal(found["answer"], small.answer(plain, own))
        assert torch.equal(found["text"], small.greedy(plain, own, new=4 + 5 * rank))
        assert torch.equal(found["again"], small.greedy(plain, own, new=3))


def test_with_kernels_and_in_16_bits(ranks):
    options = {"zero": CPU, "dtype": "bf16", "replace_with_kernel_inject": True}
    kernels = deepspeed.init_inference(small.llama(), dtype="bf16", replace_with_kernel_inject=True)
    for rank, found in enumerate(ranks(2).run(stream, options=options)):
        own = small.prompts(seed=rank, length=7 + rank)
        assert torch.equal(found["answer"], small.answer(kernels, own))


def test_what_has_no_effect_is_noted(ranks):
    zero = CPU | {"overlap_comm": False, "offload_optimizer": {"device": "cpu"}}
    notes = ranks(2).run(stream, options={"zero": zero})[0]["notes"]
    assert any(note.startswith("zero.overlap_comm") for note in notes)
    assert any(note.startswith("zero.offload_optimizer") for note in notes)


def once_more(process: Process) -> list[torch.Tensor]:
    """The same module behind one engine after the other."""
    model, own = small.llama(), small.prompts()
    answers = [small.answer(model, own)]
    for _ in range(2):
        engine = deepspeed.init_inference(model, dtype="fp32", zero=CPU)
        answers.append(small.answer(engine, own))
        engine.destroy()
        gc.collect()
    return answers


def test_a_model_may_have_another_engine(ranks):
    for first, *others in ranks(2).run(once_more):
        assert all(torch.equal(first, other) for other in others)


def build_partitioned(process: Process) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Built sharded, never full on a rank."""
    own = small.prompts()
    expected = small.answer(small.llama(nudged=False), own)
    with deepspeed.zero.Init():
        model = small.llama(nudged=False)
    try:
        deepspeed.init_inference(model, dtype="fp32")
    except ValueError as error:
        refused = str(error)
    engine = deepspeed.init_inference(model, dtype="fp32", zero=CPU)
    answer = small.answer(engine, own)
    engine.destroy()
    return expected, answer, refused


def test_a_model_that_was_built_sharded(ranks):
    for expected, answer, refused in ranks(2).run(build_partitioned):
        assert torch.equal(expected, answer)
        assert 'give zero={"stage": 3}' in refused
