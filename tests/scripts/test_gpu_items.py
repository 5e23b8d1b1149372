"""The items of the GPU checks, with small models on a CPU, so that a GPU is not the first machine to run their code."""

import json

import pytest
import torch

from scripts import check_gpu, check_gpus, gpu_item, gpus_rank, results
from scripts.time_limit import GRACE_SECONDS


def test_items_of_several_ranks(ranks):
    """Bytes counted as formulas say, and one digest per place of the optimizer."""
    counted = ranks(2).run(gpus_rank.volume)[0]
    assert check_gpus.volume_failures({"volume": counted}) == []
    halved = {"counted": {stage: value / 2 for stage, value in counted["counted"].items()}}
    assert len(check_gpus.volume_failures({"volume": halved})) == 4
    digests = ranks(2).run(gpus_rank.identity, precision="bf16")[0]["digests"]
    assert check_gpus.identity_failures({"identity bf16": {"digests": digests}}) == []
    other = digests | {"2 none": "another"}
    assert len(check_gpus.identity_failures({"identity bf16": {"digests": other}})) == 1


@pytest.mark.parametrize("contender", ["ztk3+cpu", "fsdp2", "ddp"])
def test_items_of_one_rank(ranks, contender):
    """A CPU has neither an allocator that counts nor a trace of a GPU."""
    (speed,) = ranks(1).run(gpu_item.speed, contender=contender)
    assert speed["tokens_per_second"] > 0 and speed["mfu"] is None and speed["peak_bytes"] is None
    (overlap,) = ranks(1).run(gpu_item.overlap, contender=contender)
    assert overlap["step"] > 0 and overlap["hidden"] is None
    (memory,) = ranks(1).run(gpu_item.memory, stage=3, tier="cpu")
    assert memory["agrees"] and memory["allocator"] is None


def test_the_workspace_of_products_is_no_memory_of_the_model(monkeypatch):
    """torch's allocator counts it: 32 MiB on Hopper, where the check leaves a model 5 MB."""
    held = {"tensors": 1000, "workspace": 32 << 20}
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: held.pop("workspace"), raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: sum(held.values()))
    assert gpu_item.allocated_bytes() == 1000


def test_the_step_of_stage_3_has_a_limit_from_its_longest_part():
    """The limit is 10 % above the longest of computing and copying. Stage 2 is only shown, and a dry run has no ratio."""
    row = {"step": 0.12, "compute": 0.1, "to_device": 0.05, "from_device": 0.02, "wire": 0.0}
    for item, ratio, count in (("ztk3", 1.2, 1), ("ztk3", 1.1, 0), ("ztk3", None, 0), ("ztk2", 1.2, 0)):
        found = check_gpu.FAILURES["overlap"]({f"overlap {item}+cpu": row | {"of_longest": ratio}})
        assert len(found) == count
        assert all(text in failure for failure in found for text in ("1.20", "1.1", "step 120.0", "compute 100.0"))


def test_the_benchmark_of_kernels_has_time_to_write():
    """A hanging process is killed GRACE_SECONDS after its minutes, within the time that is left."""
    command = check_gpu.command_of("kernels", folder="", left=300.0, dry=False)
    minutes = float(command[command.index("--minutes") + 1])
    assert 200 < 60 * minutes <= 300 - GRACE_SECONDS - 15
    late = check_gpu.run("kernels", deadline=check_gpu.time.monotonic() + 60, dry=False)
    assert late == {"error": "no time left, raise --seconds"}


def test_one_folder_per_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    check_gpu.write({"gpu": "NVIDIA H200"})
    assert json.loads((tmp_path / "nvidia-h200" / "check_gpu.json").read_text()) == {"gpu": "NVIDIA H200"}
    assert results.folder_of("NVIDIA RTX PRO 6000 (MIG 1g/24gb)").name == "nvidia-rtx-pro-6000-mig-1g-24gb"
    assert results.commit_of(tmp_path) == "unknown"  # a copy without .git
    of_a_cpu = {"engine_chart.py", "published_runs.py"}
    scripts = results.Path(results.__file__).parent.glob("*.py")
    assert {path.name for path in scripts if '"results"' in path.read_text()} == {"results.py"} | of_a_cpu
