"""Which files hold documents in a field, and the numbers of `data` that may be chosen."""

from pathlib import PurePath

from ztk.core.policies.ranges import Range

COMPRESSED = (".gz", ".zst")
LINES = (".jsonl", ".ndjson")
COLUMNS = (".parquet", ".arrow")
SMALLEST_VOCABULARY = 257  # a trained tokenizer has the bytes and the end token
RANGES = {"vocab_size": Range(low=SMALLEST_VOCABULARY, high=1 << 20)}


def is_structured(path: PurePath) -> bool:
    """Whether a file holds documents in a field, or is compressed: not the text itself."""
    return path.suffix.lower() in (*COMPRESSED, *LINES, *COLUMNS)
