"""The text for which int4 weights are chosen."""

from pathlib import Path

from ztk.data.documents import Fault, read_documents
from ztk.serve.models import Tokenizer

TOKENS = 8192  # that are read
_DATA_KEYS = {
    "data.path=": "inference.calibration=",
    "use data.field=NAME": "name the field text",
    ", or use data.on_error=skip": "",
}


def calibration_tokens(path: str, *, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Returns the first `TOKENS` tokens of a text file, or of the field `text` of a jsonl or parquet file, its documents one after the other.

    Raises:
        ValueError: a line without that field, or a file that cannot be read or is empty.
    """
    tokens: list[int] = []
    for item in read_documents(Path(path).expanduser(), field="text"):
        if isinstance(item, Fault):
            raise ValueError(_in_own_keys(item.text))
        tokens += tokenizer.encode(item.text) if item.is_first else tokenizer.encode_text(item.text)
        if len(tokens) >= TOKENS:
            break
    return tuple(tokens[:TOKENS])


def _in_own_keys(fault: str) -> str:
    """Returns an error about documents with the words for this file."""
    for theirs, own in _DATA_KEYS.items():
        fault = fault.replace(theirs, own)
    return fault
