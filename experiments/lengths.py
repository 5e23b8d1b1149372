"""Prints the lengths of texts before the first step."""

from collections.abc import Sequence

BINS, BAR = 8, 32  # rows of a histogram, letters of its longest bar


def histogram(lengths: Sequence[int]) -> str:
    """Describes lengths in tokens of at least one text: the median, and a bar per range of lengths.

    The range with the most texts has the longest bar. Every range with a text has at least one letter.
    """
    ordered = sorted(lengths)
    first, last = ordered[0], ordered[-1]
    width = -(-(last - first + 1) // BINS)
    starts = range(first, last + 1, width)
    counts = [sum(start <= length < start + width for length in ordered) for start in starts]
    names = [f"{start}" if width == 1 else f"{start}-{start + width - 1}" for start in starts]
    longest = max(map(len, names))
    rows = [
        f"  {name:>{longest}} {'#' * -(-BAR * count // max(counts)):<{BAR}} {count}"
        for name, count in zip(names, counts, strict=True)
    ]
    return "\n".join([f"{first} to {last} tokens, median {ordered[len(ordered) // 2]}", *rows])
