"""The layers of a stage, and the parts of a model that a rank keeps."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from tests.parallel.pipeline.models import DECODER, decoder, micro_batches, pipeline_module
from ztk.nn import Decoder, initial_values
from ztk.parallel.pipeline import LayerSpec, MicroBatch, PipelineModule, PipelinePolicy, TiedLayerSpec
from ztk.parallel.pipeline.partition import balanced, by_type, uniform
from ztk.parallel.pipeline.stages import cut, layered, plan


def sizes(cuts: tuple[range, ...]) -> list[int]:
    assert [index for part in cuts for index in part] == list(range(cuts[-1].stop))  # contiguous, nothing left out
    return [len(part) for part in cuts]


def test_uniform_gives_the_first_stages_the_remainder():
    assert sizes(uniform(10, num_stages=4)) == [3, 3, 2, 2]
    assert sizes(uniform(4, num_stages=4)) == [1, 1, 1, 1]


def brute_force(costs: list[float], *, num_stages: int) -> tuple[float, float]:
    """Smallest (dearest stage, sum of squares) of all cuts."""
    best = (float("inf"), float("inf"))
    for ends in itertools.combinations(range(1, len(costs)), num_stages - 1):
        bounds = (0, *ends, len(costs))
        totals = [sum(costs[a:b]) for a, b in itertools.pairwise(bounds)]
        best = min(best, (max(totals), sum(t * t for t in totals)))
    return best


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_balanced_is_the_best_of_all_cuts(num_stages):
    generator = torch.Generator().manual_seed(num_stages)
    for length in range(num_stages, 9):
        costs = [float(cost) for cost in torch.randint(0, 20, (length,), generator=generator)]
        cuts = balanced(costs, num_stages=num_stages)
        assert len(cuts) == num_stages
        assert min(sizes(cuts)) >= 1
        totals = [sum(costs[i] for i in part) for part in cuts]
        dearest, squares = brute_force(costs, num_stages=num_stages)
        assert max(totals) == dearest
        assert sum(t * t for t in totals) == squares


def test_by_type_counts_matching_layers():
    kinds = ["Embedding", "Block", "Block", "Block", "Block", "RMSNorm", "Linear"]
    assert sizes(by_type(kinds, pattern="block", num_stages=2)) == [3, 4]
    with pytest.raises(ValueError, match=r"matches 1 of the layers .*topology\.partition=uniform"):
        by_type(kinds, pattern="embedding", num_stages=2)


def test_products_leave_lookups_out_and_count_a_head_as_its_matrix():
    """An embedding of 64 x 8 costs nothing, the head as much as four blocks."""
    config = replace(DECODER, vocab_size=64, dim=8, heads=2, kv_heads=2, hidden_dim=8, layers=4, tie_embeddings=True)
    with torch.device("meta"):
        model = layered(Decoder(config))
    costs = [layer.num_multiplied for layer in model.layers]
    block = 4 * 8 * 8 + 3 * 8 * 8
    assert costs == [0, block, block, block, block, 64 * 8]
    assert sizes(plan(model, method="products", num_stages=2)) == [4, 2]
    assert sizes(plan(model, method="parameters", num_stages=2)) == [3, 3]
    modules = pipeline_module()
    assert all(layer.num_multiplied <= layer.num_parameters for layer in modules.layers)


def test_too_many_stages_and_unknown_methods_are_refused():
    with pytest.raises(ValueError, match="3 layers cannot make 4 pipeline stages"):
        uniform(3, num_stages=4)
    with pytest.raises(ValueError, match=r"topology\.partition=evenly: must be uniform"):
        PipelinePolicy(partition="evenly")
    with pytest.raises(ValueError, match="Linear cannot be cut into stages"):
        layered(nn.Linear(2, 2))


@pytest.mark.parametrize("tied", [False, True])
def test_names_and_first_values_do_not_depend_on_the_layout(tied):
    config = replace(DECODER, tie_embeddings=tied)
    full, _ = decoder(config)
    expected = {
        name: initial_values(full, name=name, start=0, stop=p.numel(), seed=3) for name, p in full.named_parameters()
    }
    for num_ranks, virtual_stages in ((2, 1), (4, 1), (2, 2)):
        found: set[str] = set()
        for rank in range(num_ranks):
            model, _ = decoder(config)
            values = partial(initial_values, model, seed=3)
            layers = layered(model)
            bounds = plan(layers, method="parameters", num_stages=num_ranks * virtual_stages)
            stages = cut(layers, boundaries=bounds, rank=rank, num_ranks=num_ranks)
            for name, parameter in stages.module.named_parameters():
                assert torch.equal(values(name=name, start=0, stop=parameter.numel()), expected[name])
            own = {name for name, _ in stages.module.named_parameters()}
            copies = {"embedding.weight"} if tied and rank in (0, num_ranks - 1) else set()
            assert set(stages.holders) == copies
            assert found.isdisjoint(own - copies)
            found |= own
        assert found == set(expected)


def test_stages_one_after_the_other_are_the_model():
    torch.manual_seed(0)
    model, tokens = Decoder(DECODER), micro_batches(0, replica=0, replicas=1)[0]
    expected = model(*tokens)
    layers = layered(model)
    bounds = plan(layers, method="type:block", num_stages=3)
    stages = cut(layers, boundaries=bounds, rank=0, num_ranks=1)
    carry = None
    for stage in range(3):
        carry = stages.module(stage, carry, MicroBatch.of(tokens))
    assert torch.equal(carry, expected)


def test_a_pipeline_module_builds_its_own_layers_alone():
    built = []

    class Noted(nn.Linear):
        def __init__(self, width: int) -> None:
            super().__init__(width, width)
            if not self.weight.is_meta:
                built.append(width)

    def make() -> PipelineModule:
        return PipelineModule([LayerSpec(Noted, width) for width in (1, 2, 3, 4)])

    model = make()
    cut(model, boundaries=uniform(4, num_stages=2), rank=1, num_ranks=2)
    assert built == [3, 4]
    assert [name for name, _ in model.named_parameters()] == ["2.weight", "2.bias", "3.weight", "3.bias"]
    full = make().build()
    assert torch.equal(full.get_parameter("3.weight"), model.get_parameter("3.weight"))


def test_tied_layers_are_one_module():
    model = pipeline_module().build()
    assert sum(name.startswith("tied_modules.words") for name, _ in model.named_parameters()) == 1
    inputs, labels = micro_batches(0, replica=0, replicas=1)[0]
    loss = model(inputs, labels)
    loss.backward()
    assert model.tied_modules["words"].weight.grad is not None
    assert model(inputs).shape == (*inputs.shape, 50)


def test_modules_that_share_a_weight_across_ranks_are_refused():
    """Each rank would train a copy: other numbers than on one rank, without a word."""
    embedding, head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
    head.weight = embedding.weight
    layers = [embedding, nn.Linear(4, 4), nn.Linear(4, 4), head]
    with pytest.raises(ValueError, match=r"layers 0 and 3 share weight .* TiedLayerSpec"):
        cut(PipelineModule(layers), boundaries=uniform(4, num_stages=2), rank=0, num_ranks=2)
    cut(PipelineModule(layers), boundaries=uniform(4, num_stages=4), rank=0, num_ranks=1)  # all on one rank: one weight


def test_specs_want_module_classes():
    with pytest.raises(ValueError, match="must be a subclass"):
        LayerSpec(nn.Linear(2, 2))
    assert repr(LayerSpec(nn.Linear, 2, 3, bias=False)) == "Linear(2, 3, bias=False)"
    assert TiedLayerSpec("k", nn.Linear, 2, 2).tied_weight_attr == "weight"
