"""The items of the GPU checks, with small models on a CPU, so that a GPU is not the first machine to run their code."""

import pytest
import torch

from scripts import gpu_item, gpu_training, results


def test_items_of_several_ranks(ranks):
    """Bytes counted as formulas say, and one digest per place of the optimizer."""
    counted = ranks(2).run(gpu_training.volume)[0]
    assert gpu_training.volume_faults(counted) == []
    halved = {"counted": {stage: value / 2 for stage, value in counted["counted"].items()}}
    assert len(gpu_training.volume_faults(halved)) == 4
    answer = ranks(2).run(gpu_training.identity, precision="bf16")[0]
    assert gpu_training.identity_faults(answer) == [] and len(answer["digests"]) == 6
    for layout, place in (("2 none", "device"), ("3 cpu", "host")):
        other = answer | {"digests": answer["digests"] | {layout: "another"}}
        assert gpu_training.identity_faults(other) == [f"2 different digests with the optimizer on the {place}"]
    (far,) = gpu_training.identity_faults(answer | {"host_difference": 0.5})
    assert "differ by 5.0e-01" in far


@pytest.mark.parametrize("contender", ["ztk3+cpu", "fsdp2", "ddp"])
def test_items_of_one_rank(ranks, contender):
    """A CPU has neither an allocator that counts nor a trace of a GPU."""
    (speed,) = ranks(1).run(gpu_training.speed, contender=contender)
    assert speed["tokens_per_second"] > 0 and speed["mfu"] is None and speed["peak_bytes"] is None
    (overlap,) = ranks(1).run(gpu_training.overlap, contender=contender)
    assert overlap["step"] > 0 and overlap["hidden"] is None
    assert (overlap["host"] > 0) == (contender == "ztk3+cpu")
    (memory,) = ranks(1).run(gpu_training.memory, stage="3", tier="cpu")
    assert memory["agrees"] and memory["allocator"] is None


def test_the_workspace_of_products_is_no_memory_of_the_model(monkeypatch):
    """torch's allocator counts it: 32 MiB on Hopper, where the check leaves a model 5 MB."""
    held = {"tensors": 1000, "workspace": 32 << 20}
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: held.pop("workspace"), raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: sum(held.values()))
    assert gpu_training.allocated_bytes() == 1000


def test_the_step_of_stage_3_has_a_limit_from_its_longest_part():
    """The limit is 10 % above the longest of computing and copying. Stage 2 and several ranks are only shown, and a dry run has no ratio."""
    row = {"ranks": 1, "step": 0.12, "compute": 0.1, "to_device": 0.05, "from_device": 0.02, "wire": 0.0, "host": 0.0}
    for name, ratio, count in (("ztk3", 1.2, 1), ("ztk3", 1.1, 0), ("ztk3", None, 0), ("ztk2", 1.2, 0)):
        found = gpu_training.overlap_faults(row | {"contender": f"{name}+cpu", "of_longest": ratio})
        assert len(found) == count
        assert all(text in failure for failure in found for text in ("1.20", "1.1", "step 120.0", "compute 100.0"))
    assert gpu_training.overlap_faults(row | {"contender": "ztk3+cpu", "of_longest": 1.2, "ranks": 2}) == []


def test_the_main_job_must_beat_the_bigrams():
    """A dry run of a few steps is not judged."""
    row = {"steps": 200, "validation_loss": 2.5, "bigram_entropy": 2.4}
    assert gpu_item.job_faults(row) == ["held-out loss 2.5000, the byte-bigram entropy is 2.4000"]
    assert gpu_item.job_faults(row | {"steps": 2}) == gpu_item.job_faults(row | {"validation_loss": 2.3}) == []


def test_a_failed_check_is_a_failed_step(monkeypatch, capsys):
    """The answer is printed before."""
    monkeypatch.setattr(gpu_item, "job", lambda device: {"steps": 200, "validation_loss": 2.5, "bigram_entropy": 2.4})
    monkeypatch.setattr(gpu_item.sys, "argv", ["gpu_item.py", "job", "--device", "cpu"])
    assert gpu_item.main() == 1
    printed = capsys.readouterr()
    assert '"steps": 200' in printed.out and "held-out loss" in printed.err


def test_one_folder_per_gpu(tmp_path):
    assert results.folder_of("NVIDIA H200").name == "nvidia-h200"
    assert results.folder_of("NVIDIA RTX PRO 6000 (MIG 1g/24gb)").name == "nvidia-rtx-pro-6000-mig-1g-24gb"
    assert results.commit_of(tmp_path) == "unknown"  # a copy without .git
    of_a_cpu = {"published_runs.py"}
    scripts = results.Path(results.__file__).parent.glob("*.py")
    assert {path.name for path in scripts if '"results"' in path.read_text()} == {"results.py"} | of_a_cpu
