"""transformers' models on parts of sequences: one rank's loss, with windows, packed documents, and combined with other strategies."""

from dataclasses import dataclass, field

import pytest
import torch

from tests.hf.test_causal import RELATIVE, saved
from tests.parallel.topology.families import VOCABULARY, make
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.runtime import Process, Topology
from ztk.hf.causal import CausalForward, open_causal
from ztk.hf.sequences import divisible
from ztk.nn import Documents
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.pipeline import MicroBatch
from ztk.parallel.recompute import RecomputePolicy

SIZES = (5, 1, 6, 4, 8)  # of documents, two sequences of 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Settings that must not change the losses, and the model and batches, which do."""

    family: str = "Llama"
    world: int = 2
    topology: Topology = field(default_factory=Topology)
    stage: int = 2
    kernels: bool = False
    recompute: str = "none"
    changes: dict = field(default_factory=dict)
    packed: bool = False
    length: int = 12


def batches(case: Case) -> list[MicroBatch]:
    tokens = torch.randint(3, VOCABULARY, (2, case.length), generator=torch.Generator().manual_seed(4))
    targets = tokens.roll(-1, 1)
    targets[1, :5] = -100  # unevenly
    documents = Documents.at(torch.cat([torch.arange(size) for size in SIZES]).view(2, 12)) if case.packed else None
    return [MicroBatch(args=(tokens, targets, documents)), MicroBatch(args=(tokens.flip(0), targets.flip(0), None))]


def losses_of(process: Process, *, folder: str, case: Case) -> list[float]:
    """Of three steps, means over all ranks."""
    model, values = open_causal(folder, init="pretrained", seed=1, kernels=case.kernels)
    engine = parallelize(
        model,
        process=process.arrange(case.topology),
        optimizer=OptimizerPolicy(name="adamw", lr=1e-3),
        zero=ZeroPolicy(stage=case.stage, bucket_size=1 << 12, param_persistence_threshold=0),
        recompute=RecomputePolicy(mode=case.recompute),
        accumulation_steps=2,
        initial_values=values,
    )
    losses = []
    for _ in range(3):
        loss = engine.train_batch(batches(case))
        losses.append(float(engine.comm.gather_scalars(loss.detach().view(1), label="loss").mean()))
    engine.close()
    return losses


SEQUENCE, CONTEXT = Topology(sequence=2), Topology(context=2)
CASES = {
    "window, sp2": Case(family="Mistral", topology=SEQUENCE, changes={"sliding_window": 3}),
    "window, cp2": Case(family="Mistral", topology=CONTEXT, changes={"sliding_window": 3}),
    "window and documents, sp2": Case(family="Mistral", topology=SEQUENCE, changes={"sliding_window": 3}, packed=True),
    "documents, sp2": Case(family="GPT2", topology=SEQUENCE, packed=True),
    "documents, cp2, recomputed": Case(topology=CONTEXT, packed=True, recompute="full"),
    "odd length, cp2, kernels, stage 3": Case(family="Gemma2", topology=CONTEXT, length=11, kernels=True, stage=3),
    "tp2 sp2, documents": Case(world=4, topology=Topology(tensor=2, sequence=2), packed=True),
    "pp2 cp2": Case(family="GPT2", world=4, topology=Topology(pipeline=2, context=2)),
    "pp2 sp2": Case(world=4, topology=Topology(pipeline=2, sequence=2), packed=True),
    "ep2 sp2": Case(family="Qwen3Moe", topology=Topology(expert=2, sequence=2)),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_equal_one_rank(ranks, tmp_path, name):
    case = CASES[name]
    folder = str(tmp_path / case.family)
    make(case.family, **case.changes).save_pretrained(folder)
    alone = Case(family=case.family, changes=case.changes, packed=case.packed, length=case.length)
    [expected] = ranks(1).run(losses_of, folder=folder, case=alone)
    for losses in ranks(case.world).run(losses_of, folder=folder, case=case):
        assert losses == pytest.approx(expected, rel=RELATIVE)
    assert expected[-1] < expected[0]


WINDOW = {"sliding_window": 3}
CHOSEN = WINDOW | {"use_sliding_window": True}
WINDOWS = dict.fromkeys(("Mistral", "Mixtral", "Phi3", "Gemma2", "Starcoder2"), WINDOW)
WINDOWS |= dict.fromkeys(("Qwen2", "Qwen3"), CHOSEN | {"max_window_layers": 0})
WINDOWS |= {"Qwen2Moe": CHOSEN | {"max_window_layers": 2}, "Qwen3Moe": CHOSEN}


@pytest.mark.parametrize("family", WINDOWS)
def test_the_attention_of_parts_applies_the_window(family):
    """Every family hands its window on to attention, which gets no mask."""
    plain, model = (make(family, **WINDOWS[family]).eval() for _ in range(2))
    divisible(model)
    model.part_attention.positions = slice(0, 12)  # all of the sequence
    tokens = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        found, expected = CausalForward(model)(tokens), plain(input_ids=tokens).logits
        full = make(family).eval()(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # fp32 rounding of logits of size 1
    assert not torch.allclose(full, expected, atol=1e-3)  # the window matters


def refusal_of(process: Process, *, folder: str) -> str:
    try:
        losses_of(process, folder=folder, case=Case(topology=SEQUENCE))
    except ValueError as error:
        return str(error)
    return ""


def test_attention_that_is_not_the_interfaces_is_refused(ranks, tmp_path):
    for text in ranks(2).run(refusal_of, folder=saved(tmp_path, family="Falcon")):
        assert "sequences of models of type falcon are not divided" in text
