"""Experts of Hugging Face's models are found, cut and trained as on one rank."""

import pytest
import torch
from torch import nn

from tests.parallel.moe.hugging_face import train
from tests.ranks import RankFailed
from ztk.core.runtime import Topology
from ztk.parallel.moe import expert_layers

EP2 = Topology(expert=2)


@pytest.mark.parametrize(("kind", "stage"), [("mixtral", 3), ("qwen2_moe", 1), ("gpt_oss", 3)])
def test_models_of_the_hub_train_as_on_one_rank(ranks, kind, stage):
    (alone, full, _) = ranks(1).run(train, topology=Topology(), kind=kind)[0]
    assert alone[-1] < alone[0]
    for losses, shapes, calls in ranks(2).run(train, topology=EP2, kind=kind, stage=stage):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-5, atol=0)
        assert calls["all_to_all"] == 8 * 2 * 4, "two all-to-alls per layer and direction"
        for name, shape in shapes.items():
            assert shape == ((2, *full[name][1:]) if ".experts." in name else full[name]), name


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_attention_is_sharded_by_the_models_own_plan_with_experts(ranks, kind):
    (alone, full, _) = ranks(1).run(train, topology=Topology(), kind=kind)[0]
    for losses, shapes, _ in ranks(4).run(train, topology=Topology(expert=2, tensor=2), kind=kind, stage=3):
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(alone), rtol=1e-5, atol=0)
        heads, experts = "model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.experts.down_proj"
        assert (shapes[heads][0], shapes[experts][0]) == (full[heads][0] // 2, full[experts][0] // 2)


def test_a_pattern_chooses_the_sharded_layers(ranks):
    _, shapes, calls = ranks(2).run(train, topology=EP2, kind="mixtral", steps=2, experts=r"layers\.1\.")[0]
    assert shapes["model.layers.0.mlp.experts.down_proj"][0] == 4
    assert shapes["model.layers.1.mlp.experts.down_proj"][0] == 2
    assert calls["all_to_all"] == 2 * 4
    with pytest.raises(RankFailed, match="matches no layer with experts"):
        ranks(2).run(train, topology=EP2, kind="mixtral", steps=2, experts="no such layer")


def test_only_modules_called_as_experts_count_as_experts():
    class Stacked(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.num_experts = 4
            self.weight = nn.Parameter(torch.zeros(shape))

    class Called(Stacked):
        def forward(self, hidden_states, top_k_index, top_k_weights):
            return hidden_states

    class CalledOtherwise(Stacked):
        def forward(self, hidden_states):
            return hidden_states

    model = nn.ModuleDict(
        {"yes": Called(4, 2, 3), "one too many": Called(5, 2, 3), "another call": CalledOtherwise(4, 2, 3)}
    )
    assert [(layer.name, layer.num_experts) for layer in expert_layers(model)] == [("yes", 4)]
