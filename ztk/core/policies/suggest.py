"""Suggestions of similar names at the end of an error message."""

from collections.abc import Sequence


def did_you_mean(found: Sequence[str]) -> str:
    """`; did you mean a, b or c?`, or nothing."""
    if not found:
        return ""
    *others, last = found
    return f"; did you mean {', '.join(others)} or {last}?" if others else f"; did you mean {last}?"
