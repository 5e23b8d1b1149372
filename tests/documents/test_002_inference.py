"""Document 002, section 10: `init_inference`. A small Llama stands for the hub's, `.to(ds_engine.device)` for `.to("cuda")`.

fp16 answers are compared with the same weights in fp32: a rounding of 2^-11 in each of some 16 steps on values below 2.
"""

import pytest
import torch

from tests.documents.harness import Run, run

FP16 = 16 * 2 * 2**-11
PROMPT = "tokens = torch.arange(7, 16).view(1, -1)\n"
COMPARED = (
    PROMPT
    + """
from transformers import LlamaForCausalLM
plain = LlamaForCausalLM.from_pretrained("llama", dtype=torch.float32)
with torch.no_grad():
    far = float((ds_engine(input_ids=tokens).logits.float() - plain(input_ids=tokens).logits).abs().max())
options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
same = torch.equal(ds_engine.module.generate(tokens, **options), plain.half().generate(tokens, **options))
notes, dtype = ds_engine.notes, ds_engine.module.dtype
part = tuple(ds_engine.module.model.layers[0].mlp.up_proj.weight.shape)
ds_engine.destroy()
"""
)
KEPT = ("far", "same", "notes", "dtype", "part")


def answered(found) -> dict:
    assert found.error is None, found.error
    assert found.kept["far"] <= FP16 and found.kept["same"] and found.kept["dtype"] is torch.float16
    return found.kept


def test_10_1_kernel_injection(documents):
    """Two ranks, each with the full model; sampling as in the block."""
    work = Run(
        block="002_10_1.py",
        names="inference",
        options={"loads": False},
        replace={'"meta-llama/Llama-2-7b-hf"': '"llama"', '.to("cuda")': ".to(ds_engine.device)"},
        then="length = outputs.shape[1] - inputs['input_ids'].shape[1]\n" + COMPARED,
        keep=(*KEPT, "length"),
    )
    for found in documents.run(run, work=work):
        kept = answered(found)
        assert 1 <= kept["length"] <= 200
        assert "LlamaRMSNorm -> rms_norm" in kept["notes"][-1] and "LlamaMLP -> swiglu" in kept["notes"][-1]


def test_10_2_kernels_and_a_policy(documents):
    """The pair that DeepSpeed refuses, on two ranks instead of four."""
    work = Run(
        block="002_10_2.py",
        names="inference",
        replace={"mp_size=4": "mp_size=2"},
        then=COMPARED,
        keep=KEPT,
    )
    for found in documents.run(run, work=work):
        kept = answered(found)
        assert kept["part"] == (32, 32)  # of (64, 32)
        assert "LlamaMLP -> swiglu" in kept["notes"][-1]


def test_10_2_as_written_wants_four_ranks(documents):
    for found in documents.run(run, work=Run(block="002_10_2.py", names="inference")):
        assert "2 ranks cannot be divided by 4; start 4 ranks" in found.error and "or use tp_size=2" in found.error


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_10_3_zero_inference(documents, device, tmp_path):
    """From a disk, too, as the comment in the block."""
    disk = {'"device": "cpu"': f'"device": "nvme", "nvme_path": "{tmp_path}"'}
    work = Run(
        block="002_10_3.py",
        names="inference",
        replace=disk if device == "nvme" else {},
        then="stage = ds_engine._streaming.engine.zero.policy.stage\n" + COMPARED,
        keep=(*KEPT, "stage"),
    )
    for found in documents.run(run, work=work):
        assert answered(found)["stage"] == 3
