"""The items of the checks on GPUs, with small models on a CPU: what runs first on a GPU is not its code."""

import pytest
import torch

from scripts import check_gpus, gpu_item, gpus_rank


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
