"""Document 002: its Python blocks."""

import pytest

from tests.documents.comparing import ADAMW, compared, learns
from tests.documents.harness import Run, config_of, run

FILLED = {"train_batch_size": 8, "optimizer": ADAMW}


def test_1_2_initialize(documents):
    """The optimizer that the block makes is not passed on; the configuration's trains."""
    work = Run(block="002_1_2.py", names="my_model", config=FILLED, then="train(model_engine, steps=12)")
    assert learns(compared(documents, work), by=0.9)


ZERO_INIT = Run(
    block="002_2_3.py",
    names="hub",
    options={"positions": 16},
    config=config_of("002_2_3.json"),  # without a batch size, as in the document
    replace={'"meta-llama/Llama-2-7b-hf"': '"gpt2"'},
    then="""
import json, torch
from tests.documents.preludes import Texts
sharded = getattr(next(model.parameters()), "ds_tensor", None) is not None
settings = {**json.load(open("ds_config.json")), "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
engine, _, loader, _ = deepspeed.initialize(model=model, training_data=Texts(), config=settings)
for epoch in range(4):
    for batch in loader:
        engine.backward(engine(**batch).loss)
        engine.step()
""",
    keep=("sharded",),
)


def test_2_3_zero_init(documents):
    """The model is built sharded with the values of its file, without a batch size in the configuration, and trains."""
    found = compared(documents, ZERO_INIT)
    assert found.kept["sharded"] and learns(found, by=0.99)


@pytest.mark.parametrize("stage", [0, 3])
def test_5_2_checkpoints(documents, stage):
    """Saved at step 1000 (counted so), loaded, and extracted at stage 3."""
    prelude = """
import deepspeed
model_engine, *_ = deepspeed.initialize(model=MyModel(), config="ds_config.json")
train(model_engine, steps=3)
model_engine.engine.global_steps = 1000
before = {name: value.clone() for name, value in model_engine.engine.zero.full_parameters()}
"""
    after = """
after = {name: value.clone() for name, value in model_engine.engine.zero.full_parameters()}
same = all(torch.equal(before[name], after[name]) for name in before)
import os
torch.distributed.barrier()
extracted = torch.load("model_weights.pt") if os.path.exists("model_weights.pt") else None
full = extracted is not None and all(torch.equal(extracted[name], before[name]) for name in before)
"""
    work = Run(
        block="002_5_2.py",
        names="my_model",
        options={"zero_stage": stage},
        config={**FILLED, "zero_optimization": {"stage": stage}},
        replace={"# Save checkpoint\n": prelude},
        then=after,
        keep=("same", "full", "client_sd"),
    )
    first, second = documents.run(run, work=work)
    assert first.error is None and second.error is None
    for found in (first, second):
        assert found.kept == {"same": True, "full": stage == 3, "client_sd": {}}


def test_13_1_gathered_parameters(documents):
    """The norm of the full weight, the same on all ranks, at stage 3."""
    text = """
import deepspeed
torch.manual_seed(0)
model = MyModel()
expected = float(model.weight.detach().norm())
engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")
import math
sharded = math.isnan(model.weight.norm())
"""
    settings = {"stage": 3, "stage3_param_persistence_threshold": 0}
    work = Run(
        block="002_13_1_gathered.py",
        names="my_model",
        config={**FILLED, "zero_optimization": settings},
        replace={"# Accessing parameters directly under ZeRO-3\n": text},
        then="weight_norm, after = float(weight_norm), math.isnan(model.weight.norm())",
        keep=("sharded", "expected", "weight_norm", "after"),
    )
    for found in documents.run(run, work=work):
        assert found.error is None, found.error
        assert found.kept["sharded"] and found.kept["after"]
        assert found.kept["weight_norm"] == pytest.approx(found.kept["expected"], rel=1e-6)


def test_13_2_torch_compile(documents):
    """A compiled model trains under the tips' configuration (backend eager: no compiler is needed)."""
    work = Run(
        block="002_13_2.py",
        names="my_model",
        config=FILLED,
        replace={
            "# 1. Overlap": "import deepspeed\nmodel = MyModel()\n# 1. Overlap",
            "torch.compile(model)": 'torch.compile(model, backend="eager")',
        },
        then="model_engine, *_ = deepspeed.initialize(model=model, config='ds_config.json')\ntrain(model_engine, steps=12)",
    )
    assert learns(compared(documents, work), by=0.9)
