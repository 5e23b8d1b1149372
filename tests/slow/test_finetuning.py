"""One line fine-tunes a small model of transformers on a jsonl with its tokenizer: losses and the exported folder are plain transformers' own.

The line is `python run.py model=hf model.path=MODEL data.path=texts.jsonl data.tokenizer=MODEL` with a layout, on two ranks in fp32. Bounds:
1e-5 of a step's loss, 1e-4 of the largest logit of the exported folder (see tests/hf/finetuning.py).
"""

from pathlib import Path

import pytest

from tests.hf.finetuning import LAYOUTS, by_command, by_transformers, write_model, write_texts


@pytest.mark.parametrize("family", ["Llama", "Qwen2Moe", "GPT2"])
def test_a_line_trains_as_transformers_does(show, tmp_path: Path, family: str):
    texts = write_texts(tmp_path / "texts.jsonl")
    model = write_model(tmp_path / family, family=family, texts=texts)
    expected = by_transformers(model, texts=texts, work=tmp_path)
    faults = []
    for layout in LAYOUTS:
        if layout == "ep2" and not family.endswith("Moe"):
            continue  # no experts
        off = by_command(model, layout=layout, texts=texts, work=tmp_path, expected=expected)
        show(f"{family}, {layout}: losses {off.loss:.0e}, logits of the exported folder {off.logit:.0e}")
        faults += [] if off.holds else [f"{layout}: {off}"]
    assert not faults
