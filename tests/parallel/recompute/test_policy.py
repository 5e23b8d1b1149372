"""Refusals of a policy, and the modules that it finds."""

from types import SimpleNamespace

import pytest
from torch import nn

from tests.parallel.recompute.models import Block, build
from ztk.nn import Decoder, DecoderConfig
from ztk.parallel.recompute import RecomputePolicy, recompute_blocks
from ztk.parallel.recompute.apply import blocks

FULL = RecomputePolicy(mode="full")


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        ({"mode": "some"}, "must be one of none, full, selective"),
        ({"mode": "full", "every": 0}, "must be 1 or more"),
        ({"mode": "full", "modules": ("(",)}, "not a regular expression"),
        ({"mode": "full", "num_checkpoints": 4}, "only with recompute.contiguous=true"),
        ({"mode": "full", "contiguous": True, "num_checkpoints": 0}, "must be 1 or more"),
        ({"every": 2}, "no effect here, only with recompute=full"),
        ({"inputs_on_cpu": True}, "no effect here, only with recompute=full"),
        ({"preserve_rng": False}, "no effect here, only with recompute=full"),
    ],
    ids=str,
)
def test_options_that_change_nothing_are_refused(options, fix):
    with pytest.raises(ValueError, match=fix):
        RecomputePolicy(**options)


class Nested(nn.Module):
    """Containers in containers, leaves in containers, one block under two names, a block without parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList(nn.Sequential(Block(), Block()) for _ in range(2))
        self.by_name = nn.ModuleDict({"one": Block(), "again": self.stages[0][0]})
        self.mixture = nn.ModuleList([nn.ModuleDict({"experts": Block()})])
        self.leaves = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.ReLU()))


def test_blocks_are_the_elements_of_containers():
    names = [name for name, _ in blocks(Nested(), policy=FULL)]
    assert names == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1", "by_name.one", "mixture.0.experts"]


def test_blocks_inside_blocks_are_left_alone():
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([build(), build()])

    assert [name for name, _ in blocks(Deep(), policy=FULL)] == ["layers.0", "layers.1"]


def test_the_decoders_blocks_and_every_other_one():
    config = DecoderConfig(vocab_size=8, dim=8, layers=5, heads=2, kv_heads=1, hidden_dim=8, max_seq_len=4)
    assert recompute_blocks(Decoder(config), policy=FULL) == [f"blocks.{i}" for i in range(5)]
    every = RecomputePolicy(mode="full", every=2)
    assert recompute_blocks(Decoder(config), policy=every) == ["blocks.0", "blocks.2", "blocks.4"]


def test_modules_by_name():
    policy = RecomputePolicy(mode="full", modules=(r"blocks\.[12]", "enter"))
    assert recompute_blocks(build(), policy=policy) == ["enter", "blocks.1", "blocks.2"]


def test_a_model_that_fills_a_cache_is_refused():
    """Like Hugging Face models by default."""
    model = build()
    model.config = SimpleNamespace(use_cache=True)
    with pytest.raises(ValueError, match="set model.config.use_cache = False"):
        recompute_blocks(model, policy=FULL)
    model.config.use_cache = False
    assert len(recompute_blocks(model, policy=FULL)) == 4


def test_partitioned_inputs_need_tensor_parallel_ranks():
    with pytest.raises(ValueError, match="use topology.tensor=2"):
        recompute_blocks(build(), policy=RecomputePolicy(mode="full", partition_inputs=True))


@pytest.mark.parametrize(
    ("model", "modules", "fix"),
    [
        (nn.Linear(2, 2), (), "put the blocks into one, use recompute=none"),
        (build(), (r"layers\.\d+",), "no module has such a name"),
        (build(), (r"blocks\.0", r"blocks\.0\.up"), "lies inside blocks.0"),
    ],
    ids=["no blocks", "no match", "nested"],
)
def test_nothing_to_recompute_is_refused(model, modules, fix):
    with pytest.raises(ValueError, match=fix):
        recompute_blocks(model, policy=RecomputePolicy(mode="full", modules=modules))
