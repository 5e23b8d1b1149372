"""What the documents write and DeepSpeed 0.19.8 does not take, or takes without a word: accepted, or refused with an exact fix."""

import re
from pathlib import Path

import pytest

from tests.documents.harness import BLOCKS, config_of
from ztk.deepspeed.config import DeepSpeedConfigError, parse_config

FILLED = {"train_batch_size": 8}
FIXES = {"002_9_2.json": {"moe_expert_parallel_size": "MoE(..., ep_size=)", "moe:": "MoE(..., num_experts=, ep_size=)"}}


def test_7_1_flat_tensor_parallel():
    """`tp_size`, `mpu: null` and `tp_grain_size` without the section between: for four ranks; on two the fix is named."""
    config = config_of("002_7_1.json", **FILLED)
    assert parse_config(config, world_size=4).tensor.degree == 4
    with pytest.raises(DeepSpeedConfigError, match="2 ranks cannot be divided by 4"):
        parse_config(config, world_size=2)


@pytest.mark.parametrize("block", FIXES)
def test_every_fault_has_its_fix(block):
    with pytest.raises(DeepSpeedConfigError) as caught:
        parse_config(config_of(block, **FILLED), world_size=2)
    assert len(caught.value.faults) == len(FIXES[block])
    for key, fix in FIXES[block].items():
        assert any(fault.startswith(key) and fix in fault for fault in caught.value.faults), caught.value.faults


def test_the_table_names_tests_that_exist_and_every_block_is_used():
    """docs/examples.md."""
    here = Path(__file__).parent
    page = (here.parents[1] / "docs" / "examples.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| 0")]
    assert len(rows) > 20
    sources = {path.stem: path.read_text() for path in here.glob("test_*.py")}
    for file, test in re.findall(r"`(test_\w+)::(test_\w+)`", page):
        assert f"def {test}(" in sources[file], f"{file}::{test}"
    for path in re.findall(r"`(tests/[\w/]+)`", page):
        assert (here.parents[1] / f"{path}.py").exists() or (here.parents[1] / path).exists(), path
    everything = "".join(sources.values())
    assert not [block.name for block in BLOCKS.iterdir() if block.name not in everything]


def test_tensor_parallel_sizes_stand_flat_as_the_documents_have_them():
    """DeepSpeed only knows them inside "tp"; `tests/deepspeed/test_tensor_parallel.py` trains by them."""
    settings = parse_config(config_of("002_7_1.json", **FILLED), world_size=8)
    assert settings.tensor.degree == 4 and any("tp_grain_size" in note for note in settings.notes)
