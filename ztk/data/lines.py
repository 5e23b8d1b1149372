"""Parses lines of JSON files."""

import json
from typing import Any


def parse_line(line: bytes) -> Any:
    """Returns the JSON value of one line. Split files only at line feeds: other line ends, such as U+2028, may occur in a JSON string.

    Raises:
        ValueError: the line is not UTF-8, not JSON, nested too deeply, or has half of a surrogate pair, which is not valid UTF-8.
    """
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"is not UTF-8 (byte 0x{line[error.start]:02x}: {error.reason}); convert the file, as by iconv -t UTF-8"
        ) from None
    try:
        value = json.loads(text)
        if "\\u" in text:  # only an escape can produce half of a pair
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except UnicodeEncodeError as error:
        raise ValueError(f"is not UTF-8 ({error.reason}: half of a surrogate pair)") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    return value
