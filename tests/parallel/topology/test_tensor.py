"""Sharded layers: sent bytes, heads that do not divide, a user's plan, Hugging Face models, and plans that do not fit."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.topology.runs import BATCH, CONFIG, LENGTH, Strategy, alone, train, train_alone
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.runtime import Process, Topology
from ztk.core.runtime.seed import generator
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.tensor import TensorPlan, TensorPolicy
from ztk.parallel.tensor.shard import part_range

RELATIVE = 1e-5  # see test_layouts.py
TENSOR2 = Topology(tensor=2)


def test_four_activation_all_reduces_per_layer_and_step(ranks):
    steps, activation = 3, BATCH * LENGTH * CONFIG.dim
    outcome = ranks(2).run(train, strategy=Strategy(topology=TENSOR2), steps=steps)[0]
    # Megatron's four, the embedding's sum in the forward, the head's in the backward; an all-reduce counts twice its elements.
    assert outcome.elements["tp"]["all_reduce"] == steps * (4 * CONFIG.layers + 2) * 2 * activation
    assert (
        outcome.elements["tp"]["all_gather"] == steps * 3 * 2 * BATCH * LENGTH
    )  # three numbers per row and rank, not logits


def test_with_sequence_parallel_the_same_elements_are_sent(ranks):
    steps, activation = 3, BATCH * LENGTH * CONFIG.dim
    options = {"tensor": TensorPolicy(sequence_parallel=True)}
    outcome = ranks(2).run(train, strategy=Strategy(topology=TENSOR2, options=options), steps=steps)[0]
    moved = outcome.elements["tp"]
    statistics = steps * 3 * 2 * BATCH * LENGTH
    # An all-reduce is a reduce-scatter and an all-gather; a norm's gradient, summed, is small: two per block and the last.
    assert (
        moved["all_gather"] - statistics + moved["reduce_scatter"] == steps * (4 * CONFIG.layers + 2) * 2 * activation
    )
    assert moved["all_reduce"] == steps * (2 * CONFIG.layers + 1) * 2 * CONFIG.dim


@pytest.mark.parametrize("tied", [False, True])
def test_heads_widths_and_words_that_do_not_divide(ranks, tied):
    config = replace(CONFIG, heads=6, kv_heads=3, dim=36, hidden_dim=41, vocab_size=49, tie_embeddings=tied)
    reference = ranks(1).run(train_alone, strategy=Strategy(), config=config, steps=8)[0]
    for outcome in ranks(2).run(train, strategy=Strategy(topology=TENSOR2, stage=3), config=config, steps=8):
        assert outcome.losses == pytest.approx(reference.losses, rel=RELATIVE)
        assert outcome.grad_norms == pytest.approx(reference.grad_norms, rel=RELATIVE)
        assert outcome.parameters == reference.parameters


class Mlp(nn.Module):
    """Layers with biases, one called by itself, one whose outputs are put together."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(16, 44), "down": nn.Linear(44, 16)}) for _ in range(2)
        )
        self.full = nn.Linear(16, 22)
        self.back = nn.Linear(22, 16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["down"](torch.tanh(layer["up"](x)))
        return self.back(torch.tanh(self.full(x))).square().mean()


def train_mlp(process: Process, *, plan: dict | None) -> list[float]:
    torch.manual_seed(process.rank)  # ranks build different values: the first one's count
    arranged = alone(process) if plan is None else process.arrange(TENSOR2)
    engine = parallelize(
        Mlp(),
        process=arranged,
        optimizer=OptimizerPolicy(lr=1e-2),
        zero=ZeroPolicy(stage=2),
        tensor=TensorPolicy(plan=plan),
    )
    losses = []
    for step in range(8):
        loss = engine(torch.randn(4, 16, generator=generator("mlp", step)))
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


def test_a_users_plan(ranks):
    plan = {"layers.*.up": "column", "layers.*.down": "row", "full": "column_gathered", "back": "row_split"}
    expected = ranks(2).run(train_mlp, plan=None)[0]
    for losses in ranks(2).run(train_mlp, plan=plan):
        assert losses == pytest.approx(expected, rel=RELATIVE)


def train_hugging_face(process: Process, *, name: str, tied: bool, cut: bool) -> list[float]:
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}
    extra = {"tie_word_embeddings": tied} | ({"head_dim": 8} if name in ("Qwen3", "Gemma2") else {})
    torch.manual_seed(1)
    config = getattr(transformers, f"{name}Config")(**sizes, **heads, **extra)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    arranged = process.arrange(TENSOR2) if cut else alone(process)
    engine = parallelize(model, process=arranged, optimizer=OptimizerPolicy(lr=1e-2), zero=ZeroPolicy(stage=3))
    losses = []
    for step in range(6):
        tokens = torch.randint(
            64, (2, 12), generator=generator("words", step)
        )  # padding among them, which learns nothing
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("name", "tied"), [("Llama", False), ("Qwen3", False), ("Phi3", False), ("Llama", True), ("Gemma2", True)]
)
def test_hugging_face_models_by_their_own_plan(ranks, name, tied):
    """Plans of tied models name the head alone; Gemma's embedding scales its rows."""
    expected = ranks(2).run(train_hugging_face, name=name, tied=tied, cut=False)[0]
    for losses in ranks(2).run(train_hugging_face, name=name, tied=tied, cut=True):
        assert losses == pytest.approx(expected, rel=RELATIVE)


def test_ranges_cover_all_in_grains():
    for size, parts, grain in ((12, 3, 1), (12, 5, 1), (24, 3, 4), (20, 3, 4)):
        ranges = [part_range(size, part=part, parts=parts, grain=grain) for part in range(parts)]
        assert [index for own in ranges for index in own] == list(range(size))
        assert all(len(own) % grain == 0 for own in ranges)
    with pytest.raises(ValueError, match="cannot be cut into 4 parts"):
        part_range(12, part=0, parts=4, grain=4)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        ({"layers.*.up": "diagonal"}, "must be one of column, row"),
        ({"layer.*.up": "column"}, r"layer\.\*\.up: the model has no such module"),
    ],
)
def test_plans_that_do_not_fit_are_refused(patterns, message):
    with pytest.raises(ValueError, match=message):
        TensorPlan.of(patterns).matches(Mlp())


def build_without_plan(process: Process, *, plan: dict | None) -> str:
    model = Mlp()
    model.again = nn.Linear(16, 22)
    model.again.weight = model.full.weight
    try:
        parallelize(
            model, process=process.arrange(TENSOR2), optimizer=OptimizerPolicy(), tensor=TensorPolicy(plan=plan)
        )
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (None, "Mlp has no tensor plan, and none follows from its modules; give the class an attribute tensor_plan ="),
        ({"layers.*": "column"}, "ModuleDict has no weight"),
        ({"layers": "row"}, "ModuleList has no weight"),
        ({"again": "column"}, "tensor plan again=column: full has the same weight"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_on_all_ranks(ranks, plan, message):
    assert all(message in text for text in ranks(2).run(build_without_plan, plan=plan))
