"""Divides a dimension into parts of nearly equal size."""


def part_range(size: int, *, part: int, parts: int, grain: int = 1) -> range:
    """The range of part number `part` when `size` elements are cut into `parts` ranges of complete grains. Larger ranges come first.

    Raises ValueError if `size` is not a multiple of `grain`, or if a part would be empty.
    """
    units, rest = divmod(size, grain)
    if rest or units < parts:
        raise ValueError(f"{size} elements in grains of {grain} cannot be cut into {parts} parts")
    base, larger = divmod(units, parts)
    start = part * base + min(part, larger)
    return range(start * grain, (start + base + (part < larger)) * grain)
