"""Sizes of grids and tiles on the host.

Triton's `cdiv` and `next_power_of_2` also accept constexprs, which makes a call 2 microseconds slower.
"""

from ztk.kernels.launch.machine import Architecture, Machine

REGISTERS = 65536  # of a processor


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up, of a >= 0 and b > 0."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not below n >= 1."""
    return 1 << (n - 1).bit_length()


def resident_programs(target: Machine, *, num_warps: int, registers: int) -> int:
    """Number of programs that are resident on the machine at once. A grid of this size runs in one wave.

    registers: maximum per thread. The ahead-of-time budgets check it (`AotCase.resident`), see `register_limit`.
    """
    return target.processors * _fitting(registers, num_warps=num_warps, target=target)


def register_limit(registers: int, *, num_warps: int, target: Machine) -> dict[str, int]:
    """The launch option that makes as many programs fit as `resident_programs` assumes, for any version of the compiler:
    Triton 3.6 uses 98 and 105 registers where 3.9 uses 80 and 64. Empty if only one program fits anyway, and on AMD, which has no such
    option.
    """
    if target.architecture is Architecture.cdna or _fitting(registers, num_warps=num_warps, target=target) == 1:
        return {}
    return {"maxnreg": registers}


def _fitting(registers: int, *, num_warps: int, target: Machine) -> int:
    """Programs that one processor holds at once."""
    return max(1, REGISTERS // (registers * num_warps * target.warp_size))
