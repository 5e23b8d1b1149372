"""NVIDIA's code as text, of many kernels at once: nvdisasm takes 0.3 s to start and a hundredth of that for a kernel."""

import bisect
import itertools
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import triton

NVDISASM = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
# Instructions that end with an address of the code, in a file of several kernels one that counts from the first.
_WITH_TARGET = re.compile(r"((?:@!?U?P\w+ )?(?:BRA|BSSY|CALL|JMP|RET|WARPSYNC\.COLLECTIVE)\b.* )(0x[0-9a-f]+)")


def code_of(cubin: bytes) -> bytes:
    """The instructions of its kernel. Raises ValueError for a cubin of another number of kernels than one."""
    # An ELF file of 64 bits: a table of sections, one of which has their names; a kernel's is `.text.NAME`.
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    number, of_names = struct.unpack_from("<HH", cubin, 0x3C)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * index) for index in range(number)]
    names = sections[of_names][4]
    found = [(offset, size) for name, *_, offset, size in sections if cubin.startswith(b".text.", names + name)]
    if len(found) != 1:
        raise ValueError(f"a cubin of {len(found)} kernels, which is to have one")
    ((offset, size),) = found
    return cubin[offset : offset + size]


def disassemble(codes: Sequence[bytes], *, arch: str) -> list[str]:
    """Lines `/*ADDRESS*/ INSTRUCTION ;` of each code, with the addresses and targets of `cuobjdump -sass`: from the code's start.

    codes: as of `code_of`, for the target `arch`.
    """
    if not codes:
        return []
    starts = [0, *itertools.accumulate(map(len, codes))][:-1]
    own = "" if arch == "sm_80" else "a"  # with the instructions that this architecture alone has
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(b"".join(codes))
        file.flush()
        command = [NVDISASM, "--binary", f"SM{arch[3:]}{own}", "--no-dataflow", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines: list[list[str]] = [[] for _ in codes]
    for digits, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*?)\s*;", printed):
        address = int(digits, 16)
        index = bisect.bisect_right(starts, address) - 1
        start = starts[index]
        if branch := _WITH_TARGET.fullmatch(text):
            text = f"{branch[1]}{int(branch[2], 16) - start:#x}"
        lines[index].append(f"/*{address - start:04x}*/ {text} ;")
    return ["\n".join(of_code) for of_code in lines]
