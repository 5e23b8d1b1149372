"""File formats that hold documents in a field."""

from pathlib import PurePath

COMPRESSED = (".gz", ".zst")
LINES = (".jsonl", ".ndjson")
COLUMNS = (".parquet", ".arrow")
SMALLEST_VOCABULARY = 257  # a trained tokenizer has the bytes and the end token


def is_structured(path: PurePath) -> bool:
    """Whether a file holds documents in a field, or is compressed: not the text itself."""
    return path.suffix.lower() in (*COMPRESSED, *LINES, *COLUMNS)
