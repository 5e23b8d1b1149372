"""Sizes of grids and tiles on the host. Triton's own functions of these names also take constexprs, which costs 2 microseconds a call."""


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up, of a >= 0 and b > 0."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()
