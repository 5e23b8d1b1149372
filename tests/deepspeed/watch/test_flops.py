"""The FLOPs profiler's multiply-accumulates equal DeepSpeed's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import ztk.deepspeed as deepspeed
from tests.deepspeed import test_meshes as meshes
from ztk.deepspeed.watch.flops import FlopsProfiler, get_model_profile, number_to_string
from ztk.nn.linear import speed_up_linear_layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(4, 16, 3, 4, 8).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(4, 16, 32))
        return x + self.down(F.gelu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(50, 32), nn.ModuleList([Block(), Block()])
        self.conv, self.head = nn.Conv1d(32, 8, 3), nn.Linear(32, 50)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.softmax(self.head(x), -1), F.relu(self.conv(x.transpose(1, 2)))


TOKENS = torch.zeros(4, 16, dtype=torch.long)
# Recorded from DeepSpeed 0.19.8's get_model_profile of the same model and input.
DEEPSPEED = {"flops": 3_739_648, "macs": 1_849_344, "params": 29_306}


def test_products_are_deepspeeds():
    flops, macs, params = get_model_profile(Model(), args=[TOKENS], as_string=False, print_profile=False)
    assert (macs, params) == (DEEPSPEED["macs"], DEEPSPEED["params"]) and flops == 2 * macs
    with torch.inference_mode():
        again = get_model_profile(Model(), kwargs={"tokens": TOKENS}, as_string=False, print_profile=False)
    assert again == (flops, macs, params)
    assert get_model_profile(nn.Linear(4, 2), input_shape=(3, 4), print_profile=False) == ("48", "24 MACs", "10")


def test_an_engines_linear_layers_count_like_torchs():
    """On CPU an engine makes them multiply by other functions."""
    plain = get_model_profile(Model(), args=[TOKENS], as_string=False, print_profile=False)
    model = Model()
    speed_up_linear_layers(model)
    assert get_model_profile(model, args=[TOKENS], as_string=False, print_profile=False) == plain


class Experts(nn.Module):
    """Like transformers' experts: the rows of each expert are contiguous, all in one product. 6 rows of 16 numbers, 3 experts to 32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 16, 32, dtype=torch.bfloat16))

    def forward(self, rows):
        return F.grouped_mm(rows, self.weight, offs=torch.tensor([2, 2, 6], dtype=torch.int32))


def test_products_of_experts_count():
    """torch's own counter has no formula for them."""
    rows = torch.zeros(6, 16, dtype=torch.bfloat16)
    flops, macs, _ = get_model_profile(Experts(), args=[rows], as_string=False, print_profile=False)
    assert (flops, macs) == (2 * 6 * 16 * 32, 6 * 16 * 32)


def test_what_it_is_called_with_must_be_said():
    with pytest.raises(ValueError, match="give one of them"):
        get_model_profile(nn.Linear(4, 2))
    with pytest.raises(ValueError, match="forward or generate"):
        get_model_profile(nn.Linear(4, 2), input_shape=(1, 4), mode="train")


def test_nothing_is_left_behind_and_a_forward_that_raises_is_survived():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(3, 3))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 4))
    model[0](torch.ones(1, 4))
    profiler.stop_profile()
    model[0](torch.ones(1, 4))
    assert profiler.get_total_macs() == 2 * 16 and profiler.get_total_flops() == 64  # the second layer never multiplied
    assert profiler.get_total_duration() > 0
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    profiler.end_profile()
    assert profiler.get_total_flops() == 0 and not profiler.started


def test_the_profile_is_a_summary_and_a_row_per_module(tmp_path, capsys):
    path = tmp_path / "new" / "profile.txt"
    get_model_profile(Model(), args=[TOKENS], output_file=str(path))
    assert capsys.readouterr().out == ""
    text = path.read_text()
    assert "fwd MACs: 1.85 MMACs" in text and "params: 29.31 K" in text
    assert text.count("blocks.0.up ") == 1
    get_model_profile(Model(), args=[TOKENS], module_depth=1)
    out = capsys.readouterr().out
    assert "Model" in out and "blocks.0.up" not in out


@pytest.mark.parametrize(("value", "text"), [(1536, "1.54 K"), (0, "0 "), (2.5e12, "2.50 T"), (12, "12 ")])
def test_numbers_as_texts(value, text):
    assert number_to_string(value) == text


def staged(process, *, path: str, stages: int) -> int:
    """Three steps of a pipeline of four linear layers 8 x 8, the second profiled; recomputation is not counted."""
    profiler = {"enabled": True, "profile_step": 1, "output_file": path}
    model = meshes.Stages(num_stages=stages)
    settings = meshes.config("pp", stage=1, flops_profiler=profiler, pipeline={"activation_checkpoint_interval": 1})
    settings["train_batch_size"] *= process.world_size // stages
    engine = deepspeed.initialize(model=model, config=settings)[0]
    x, y = meshes.data()
    rows = [(x[n : n + 1], y[n : n + 1]) for n in range(meshes.ROWS)]
    for _ in range(3):
        engine.train_batch(iter(rows))
    left = sum(len(module._forward_hooks) for module in model.modules())
    engine.destroy()
    return left


def test_a_pipelines_stages_are_profiled_and_added_up(ranks, tmp_path):
    path = tmp_path / "profile.txt"
    assert ranks(4).run(staged, path=str(path), stages=2) == [0, 0, 0, 0]
    lines = path.read_text().splitlines()
    assert lines[0] == "FLOPs profile of step 2: one micro-batch, 2 pipeline stages"
    assert "params: 288" in [line.strip() for line in lines] and "fwd MACs: 256 MACs" in lines
    assert [line for line in lines if line.startswith("Stage ")] == ["Stage 0:", "Stage 1:"]


def test_a_pipeline_of_one_stage_is_profiled_as_a_model(ranks, tmp_path):
    path = tmp_path / "profile.txt"
    ranks(1).run(staged, path=str(path), stages=1)
    assert "fwd MACs: 256 MACs" in path.read_text().splitlines()
