"""Configurations in the documents that DeepSpeed 0.19.8 refuses or silently ignores: accepted, or refused with an exact fix."""

import re
from pathlib import Path

import pytest

from tests.documents.harness import BLOCKS, config_of
from ztk.deepspeed.config import DeepSpeedConfigError, parse_config

FILLED = {"train_batch_size": 8}


def test_7_1_flat_tensor_parallel():
    """`tp_size`, `mpu: null` and `tp_grain_size` without the section between: for four ranks; on two the fix is named."""
    config = config_of("002_7_1.json", **FILLED)
    assert parse_config(config, world_size=4).tensor.degree == 4
    with pytest.raises(DeepSpeedConfigError, match="2 ranks cannot be divided by 4"):
        parse_config(config, world_size=2)


def test_9_2_moe():
    """`moe` and `moe_expert_parallel_size`, for four ranks; on two the fix is named. See `tests/parallel/moe/test_deepspeed_moe.py`."""
    config = config_of("002_9_2.json", **FILLED)
    assert parse_config(config, world_size=4).experts.size == 4
    with pytest.raises(DeepSpeedConfigError, match="moe.ep_size=4: 2 data-parallel ranks .*; start a multiple of 4"):
        parse_config(config, world_size=2)


def test_003_on_one_line(tmp_path):
    """As the page shows it: the first comment swallows the rest of the JSON, braces included."""
    path = tmp_path / "ds_config.json"
    path.write_text(" ".join((BLOCKS / "003_ds_config.json").read_text().split()))
    with pytest.raises(DeepSpeedConfigError, match="line 1: the comment .* runs to the end of its line"):
        parse_config(path, world_size=2)


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
    """DeepSpeed accepts them only inside "tp"; `tests/deepspeed/test_tensor_parallel.py` trains by them."""
    settings = parse_config(config_of("002_7_1.json", **FILLED), world_size=8)
    assert settings.tensor.degree == 4 and any("tp_grain_size" in note for note in settings.notes)
