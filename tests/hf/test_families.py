"""A handful of the cells that `tests/slow/test_families.py` prints, each a family or a strategy that no other test has."""

import pytest

from tests.hf.cells import run_cell

AGREE = [
    ("GPTNeoX", "stage 3"),
    ("Phi", "tp2"),
    ("OPT", "pp2"),
    ("Mpt", "pp2"),  # its list of layers has a name of its own
    ("GPT2", "sp2"),
    ("Gemma2", "sp2"),
    ("Mistral", "cp2"),
    ("Qwen2Moe", "cp2"),
    ("Mixtral", "ep2"),
    ("StableLm", "kernels"),
    ("Falcon", "LoRA"),  # its linear layers are a class of their own
    ("Mixtral", "LoRA"),
]
REFUSED = [
    ("Bloom", "sp2", "sequences of models of type bloom are not divided, only .*; use topology.sequence=1"),
    ("Llama", "ep2", "use topology.expert=1"),
    ("GPTBigCode", "tp2", "is more than model.kv_heads=1, and heads are not cut: use topology.tensor=1"),
]


@pytest.mark.parametrize(("family", "column"), AGREE)
def test_a_cell_agrees_with_plain_transformers(ranks, tmp_path, family, column):
    found = run_cell(ranks(2), family=family, column=column, folder=tmp_path)
    assert found.deviation is not None and found.holds, found


@pytest.mark.parametrize(("family", "column", "message"), REFUSED)
def test_a_cell_is_refused_before_ranks_start(tmp_path, family, column, message):
    found = run_cell(None, family=family, column=column, folder=tmp_path)  # no ranks
    assert found.holds
    with pytest.raises(ValueError, match=message):
        raise ValueError(found.refusal)
