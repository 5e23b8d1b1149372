"""Formats numbers. Units are decimal: 1 kB is 1000 bytes."""


def format_bytes(nbytes: float) -> str:
    """1234567 -> "1.23 MB"."""
    return _scaled(nbytes, units=("B", "kB", "MB", "GB", "TB", "PB"), space=" ")


def format_count(count: float) -> str:
    """41234 -> "41.2k"."""
    return _scaled(count, units=("", "k", "M", "G", "T"), space="")


def _scaled(value: float, *, units: tuple[str, ...], space: str) -> str:
    scaled, index = float(value), 0
    while abs(scaled) >= 999.5 and index < len(units) - 1:
        scaled, index = scaled / 1000, index + 1
    digits = f"{scaled:.0f}" if index == 0 else f"{scaled:#.3g}".rstrip(".")
    return f"{digits}{space}{units[index]}"
