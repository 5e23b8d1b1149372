"""MFU and HFU of runs: operations by formulas and by tracing, peaks of devices, and the keys of a run's record."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.commands import run_command
from tests.parallel.topology.families import make
from tests.planner.test_fits import HARDWARE
from ztk import report
from ztk.config import compose
from ztk.core.policies.hardware import write_measured
from ztk.core.policies.peaks import peak_rate
from ztk.core.policies.recompute import RecomputePolicy
from ztk.experiments import pretrain, work
from ztk.planner import count_operations

RUN = ("data=synthetic", "data.seq_len=32", "train.steps=3", "launch.ranks=2", "launch.device=cpu", "logger=disabled")


def build(config):
    return pretrain.build_model(config)[0]


def counted(*words, tmp_path):
    config = compose(*words, *RUN, output_dir=str(tmp_path))
    found = count_operations(
        lambda: build(config),
        batch=work.planned_batch(config, build=build),
        recompute=pretrain.policies.recompute_policy(config),
    )
    return config, found, config.train.micro_batch_size * config.data.seq_len


@pytest.mark.parametrize("model", ["tiny", "tiny_moe"])
def test_the_formula_equals_a_trace(model, tmp_path):
    config, found, tokens = counted(f"model={model}", tmp_path=tmp_path)
    shape = pretrain.policies.decoder_config(config)
    assert found.model == shape.flops_per_token(32) * tokens
    attention = 12 * shape.layers * shape.dim * 32 * tokens
    assert found.hardware == found.model + attention // 6


def test_recomputed_blocks_count_in_hfu_alone(tmp_path):
    _, plain, _ = counted("model=tiny", tmp_path=tmp_path)
    _, full, _ = counted("model=tiny", "recompute=full", tmp_path=tmp_path)
    _, half, _ = counted("model=tiny", "recompute=every2", tmp_path=tmp_path)
    _, kept, _ = counted("model=tiny", "recompute=selective", tmp_path=tmp_path)
    assert {one.model for one in (full, half, kept)} == {plain.model}
    assert kept.hardware == plain.hardware < half.hardware < full.hardware
    assert full.hardware - plain.hardware == 2 * (half.hardware - plain.hardware)


def test_plan_and_run_count_alike(tmp_path):
    from ztk.experiments.plan import make_plan

    for words in (("model=tiny",), ("model=tiny", "recompute=full", "train.accumulation_steps=2")):
        config = compose(*words, *RUN, output_dir=str(tmp_path))
        made = make_plan(config, hardware=HARDWARE)
        model = work.model_flops(config, build=build)
        assert made.model_flops == model
        assert work.step_flops(config, build=build) == (model, made.classes[0].flops * 2)


@pytest.mark.parametrize("again", ["none", "full"])
def test_models_of_transformers_are_counted_as_traced(again, tmp_path):
    make("Llama", vocab_size=256, max_position_embeddings=64).save_pretrained(tmp_path / "model")
    words = ("model=hf", f"model.path={tmp_path / 'model'}", "model.init=random", f"recompute={again}")
    config, found, tokens = counted(*words, tmp_path=tmp_path)
    steps = config.train.global_batch_size * 32 // tokens
    model, hardware = work.step_flops(config, build=build)
    assert model == pytest.approx(found.model * steps, rel=1e-3)  # its tables of rotary positions are a small product
    assert hardware == pytest.approx(found.hardware * steps, rel=1e-3)


@pytest.mark.parametrize("batch", [(), ("train.global_batch_size=10",), ("train.global_batch_size=6",)])
def test_own_models_are_traced_once_and_leave_the_generators_alone(batch, tmp_path):
    """A model that reads values has no MFU, and a warning gives the reason."""
    config = compose("model=tiny", *batch, *RUN, output_dir=str(tmp_path))
    own = replace(config, own={"model": {"_target_": "nothing"}})

    built = []

    def drawn(_):
        torch.manual_seed(1)
        built.append(Takes(build(config)))
        return built[-1]

    state = torch.random.get_rng_state()
    assert work.step_flops(own, build=drawn) == work.step_flops(config, build=build)
    assert len(built) == 2  # one has the batch's form, the other is traced
    assert torch.equal(torch.random.get_rng_state(), state)
    with pytest.warns(UserWarning, match="no MFU and HFU: counting failed with .*Error: "):
        assert work.step_flops(own, build=lambda _: Reads()) == (0, None)


class Takes(nn.Module):
    """An own model has the batch as its only argument."""

    takes_batches = True

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        return self.model(*batch)


class Reads(nn.Module):
    """Its shapes depend on values."""

    def forward(self, tokens, targets=None):
        return tokens[tokens > 0].float().sum()


def test_a_model_that_reads_values_is_refused_by_the_count():
    batch = (torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match="reads values"):
        count_operations(Reads, batch=batch)
    with pytest.raises(ValueError, match="no scalar"):
        count_operations(lambda: Outputs(), batch=(torch.zeros(2, 4),), recompute=RecomputePolicy())


class Outputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x)


def test_gpus_have_the_peaks_of_their_data_sheets(tmp_path):
    named = {
        "h100": "NVIDIA H100 80GB HBM3",
        "h200": "NVIDIA H200",
        "a100_80": "NVIDIA A100-SXM4-80GB",
        "b200": "NVIDIA B200",
    }
    for option, device in named.items():
        config = compose("task=plan", "model=tiny", f"hardware={option}", output_dir=str(tmp_path))
        assert peak_rate(device, dtype="bfloat16") == pytest.approx(config.hardware.bf16_rate, rel=1e-3), option
        assert peak_rate(device, dtype="float32") == pytest.approx(config.hardware.fp32_rate, rel=1e-3), option
    assert peak_rate("NVIDIA H100 PCIe", dtype="bfloat16") < peak_rate("NVIDIA H100 80GB HBM3", dtype="bfloat16")
    assert peak_rate("NVIDIA A10", dtype="float16") < peak_rate("NVIDIA A100-PCIE-40GB", dtype="float16")
    assert peak_rate("Tesla V100-SXM2-16GB", dtype="bfloat16") is None, "it has no such products"
    assert peak_rate("NVIDIA H100 80GB HBM3 MIG 1g.10gb", dtype="bfloat16") is None
    assert peak_rate("Tomorrow's GPU", dtype="bfloat16") is None


def test_a_run_reports_mfu_where_this_cpu_was_measured(tmp_path):
    measured = {"hardware": hardware_values(bf16_rate=1e9), "sources": {}}
    write_measured(measured, file=tmp_path / "cache" / "ztk" / "hardware.json")
    words = ("model=nano", "recompute=full", *RUN)
    digests = []
    for name, cache in (("known", tmp_path / "cache"), ("unknown", tmp_path / "nothing")):
        done = run_command(
            *words, f"hydra.run.dir={tmp_path / name}", cwd=tmp_path, environment={"XDG_CACHE_HOME": str(cache)}
        )
        assert done.returncode == 0, done.stdout + done.stderr
        rows = list(report.read_rows(tmp_path / name))
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        digests.append(summary["loss_digest"])
        assert all(row["tokens_per_second_per_gpu"] == row["tokens_per_second"] / 2 for row in rows)
        assert summary["tokens_per_second_per_gpu"] == summary["tokens_per_second"] / 2
        if name == "unknown":
            assert "mfu" not in rows[0] and "mfu" not in summary and "MFU" not in done.stdout
            continue
        rate = 1e9 * 4 / 2  # four ranks measured together, two train
        assert summary["peak_flops_per_second"] == rate and "this CPU" in summary["peak_flops_source"]
        config = compose(*words, output_dir=str(tmp_path))
        tokens = config.train.global_batch_size * config.data.seq_len
        flops = pretrain.policies.decoder_config(config).flops_per_token(32) * tokens
        assert summary["model_flops"] == flops
        for row in rows:
            assert row["mfu"] == pytest.approx(flops / 2 / row["step_seconds"] / rate)
            assert row["hfu"] / row["mfu"] == pytest.approx(summary["hardware_flops"] / flops)
        assert summary["mfu"] == pytest.approx(flops / 2 / summary["step_seconds_median"] / rate)
        assert summary["hardware_flops"] > 1.2 * flops
        assert f"MFU {summary['mfu']:.1%}" in done.stdout and "/rank)" in done.stdout
    assert digests[0] == digests[1]


def hardware_values(**changed):
    names = ("name", "capacity_bytes", "reserve_bytes", "bf16_rate", "fp16_rate", "fp32_rate")
    return {name: getattr(HARDWARE, name) for name in names} | {"ranks_per_node": 4} | changed
