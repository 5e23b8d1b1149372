"""Cutting a dimension into parts that need not be equal."""


def part_range(size: int, *, part: int, parts: int, grain: int = 1) -> range:
    """The `part`-th of `parts` ranges of `size` elements, in whole grains, the larger ones first.

    Raises ValueError if `size` is no multiple of `grain`, or if a part would be empty.
    """
    units, rest = divmod(size, grain)
    if rest or units < parts:
        raise ValueError(f"{size} elements in grains of {grain} cannot be cut into {parts} parts")
    base, larger = divmod(units, parts)
    start = part * base + min(part, larger)
    return range(start * grain, (start + base + (part < larger)) * grain)
