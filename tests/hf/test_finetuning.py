"""One line that fine-tunes a model of transformers on a jsonl with its tokenizer: one row of `tests/slow/test_finetuning.py`."""

from tests.hf.finetuning import by_command, by_transformers, write_model, write_texts


def test_the_line_trains_as_plain_transformers_and_exports_its_logits(tmp_path):
    texts = write_texts(tmp_path / "texts.jsonl")
    model = write_model(tmp_path / "Qwen2Moe", family="Qwen2Moe", texts=texts)
    expected = by_transformers(model, texts=texts, work=tmp_path)
    off = by_command(model, layout="stage 3, nvme", texts=texts, work=tmp_path, expected=expected)
    assert off.holds, off
