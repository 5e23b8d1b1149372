"""Reads compiled kernels: the instructions of disassembled NVIDIA code and AMD assembly, and the number of programs that fit on an SM."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

MATRIX_INSTRUCTION = {
    "sm_80": r"\b[HIB]MMA\.",
    "sm_90": r"\b[HQI]GMMA\.",
    "sm_100": r"\bUTC\w*MMA",
    "gfx942": r"\bv_mfma_",
}
SASS_WIDTHS = {"256": 32, "128": 16, "64": 8, "U16": 2, "S16": 2, "U8": 1, "S8": 1}
VECTOR = 8  # bytes: narrower loads in a loop fetch numbers per row, not elements

# Of one SM, CUDA programming guide, table of technical specifications: compute capabilities 8.0, 9.0 and 10.0
SHARED_BYTES = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
RESERVED_SHARED_BYTES = 1 << 10  # of every program
PARTITIONS, REGISTERS, WARPS, PROGRAMS = 4, 65536, 64, 32
REGISTER_UNIT = 256  # registers that a warp is given at a time


# Accesses to memory that other kernels may write, and jumps. Parameters and shared memory belong to the program.
_PTX_EARLY = (
    r"(ld(?!\.param|\.shared)|ldu|st(?!\.shared)|red|atom|cp|prefetchu?|multimem|mbarrier|tensormap|discard|applypriority|"
    r"call|bra|brx|ret|exit|trap)\b"
)
_SASS_EARLY = r"(LD|LDG|LDGSTS|ST|STG|RED|REDG|ATOM|ATOMG|UBLK\w+|UTMA\w+|CCTL\w*|CALL|BRA|BRX|JMP|RET|EXIT)\b"


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """An innermost loop that loads from global memory."""

    instructions: int
    vector_bytes: int  # that a thread loads in one round, by loads of 8 bytes and more
    async_copies: int  # from global to shared memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """The instruction counts of one compiled kernel."""

    registers: int
    stack_bytes: int
    spills: int  # spill stores and loads
    shared_bytes: int
    load_bytes: tuple[int, ...]  # width of each global load in the program text
    store_bytes: tuple[int, ...]
    barriers: int
    matrix_instructions: int
    instructions: int
    tensor_loads: int = 0  # of blocks, by descriptors
    loops: tuple[Loop, ...] = ()


def programs_per_processor(*, registers: int, shared_bytes: int, num_warps: int, arch: str) -> int:
    """Programs that one SM holds at once, as NVIDIA's occupancy calculator counts them."""
    per_warp = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    warps = min(WARPS, REGISTERS // PARTITIONS // per_warp * PARTITIONS)
    shared = SHARED_BYTES[arch] // (shared_bytes + RESERVED_SHARED_BYTES)
    return min(PROGRAMS, warps // num_warps, shared)


def before_the_wait(*, ptx: str, sass: str) -> str:
    """The first forbidden instruction before the wait of a kernel that starts before the previous one has ended; empty without one.

    Neither the compiler's PTX nor the assembler's code may touch memory that others write, end, or branch past an unconditional
    `griddepcontrol.wait` ([Note: Programmatic dependent launch] in `launch.dependent`).
    """
    body = ptx[ptx.index(".entry") :]
    lines = [re.sub(r"//.*", "", line).strip() for line in body[body.index("{") :].splitlines()]
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\w+\s+)?[A-Z][^;]*);", sass)
    assembled = [(int(address, 16), text.strip()) for address, text in found]
    end = next((address for address, text in assembled if text == "ACQBULK"), 0)
    trap = {address for address, text in assembled if text.startswith("BPT.TRAP")}
    inside = [text for _, text in assembled if not _is_allocation(text, before=end, trap=trap)]
    return _early("PTX", lines, wait="griddepcontrol.wait", early=_PTX_EARLY) or _early(
        "SASS", inside, wait="ACQBULK", early=_SASS_EARLY
    )


def _early(name: str, instructions: Iterable[str], *, wait: str, early: str) -> str:
    for text in instructions:
        if text.startswith(wait):
            return ""
        if wait in text or re.match(rf"(?:@!?%?\w+\s+)?{early}", text):
            return f"{name}: `{' '.join(text.split())}` before {wait}"
    return f"{name}: no {wait}"


def _is_allocation(text: str, *, before: int, trap: set[int]) -> bool:
    """A branch to an address up to `before`, or the call of a trap: one warp allocates tensor memory, and ends the kernel if it cannot."""
    target = re.match(r"(?:@!?U?P\w+\s+)?(BRA|CALL\.REL)\b.*?(0x[0-9a-f]+)$", text)
    if target is None:
        return False
    address = int(target.group(2), 16)
    return address <= before if target.group(1) == "BRA" else address in trap


def dissect_sass(sass: str, *, arch: str, registers: int, stack_bytes: int, shared_bytes: int) -> Anatomy:
    """Count a disassembled NVIDIA kernel."""
    found = re.findall(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", sass)
    lines = [(int(address, 16), text) for address, text in found if not text.startswith("NOP")]
    instructions = [text for _, text in lines]
    tma_loads = sum(i.startswith("UTMALDG") for i in instructions)
    tma_stores = sum(i.startswith("UTMASTG") for i in instructions)
    return Anatomy(
        registers=registers,
        stack_bytes=stack_bytes,
        spills=sum(bool(re.match(r"(STL|LDL)\b", i)) for i in instructions),
        shared_bytes=shared_bytes,
        load_bytes=_loads(instructions) + (128,) * tma_loads,
        store_bytes=tuple(_width(i) for i in instructions if re.match(r"STG\.", i)) + (128,) * tma_stores,
        barriers=sum(bool(re.match(r"BAR\.(SYNC|RED|ARV)", i)) for i in instructions),
        matrix_instructions=len(re.findall(MATRIX_INSTRUCTION[arch], "\n".join(instructions))),
        instructions=len(instructions),
        tensor_loads=tma_loads,
        loops=_loops(lines),
    )


def _loops(lines: list[tuple[int, str]]) -> tuple[Loop, ...]:
    """The innermost loops: code between a backward branch and its target, without another loop inside."""
    spans = []
    for address, text in lines:
        branch = re.match(r"BRA\b.*?(0x[0-9a-f]+)\s*$", text.strip())
        if branch and int(branch.group(1), 16) < address:
            spans.append((int(branch.group(1), 16), address))
    loops = []
    for first, last in spans:
        if any(first <= a and b <= last and (a, b) != (first, last) for a, b in spans):
            continue
        body = [text for address, text in lines if first <= address <= last]
        if loads := _loads(body):
            vectors = sum(width for width in loads if width >= VECTOR)
            copies = sum(bool(re.match(r"LDGSTS|UTMALDG", text)) for text in body)
            loops.append(Loop(instructions=len(body), vector_bytes=vectors, async_copies=copies))
    return tuple(loops)


def _loads(instructions: list[str]) -> tuple[int, ...]:
    return tuple(_width(i) for i in instructions if re.match(r"(LDG|LDGSTS)\.", i))


def _width(instruction: str) -> int:
    """Bytes of a global access from its opcode: LDG.E.128 is 16, LDG.E is 4, LDG.E.U16 is 2."""
    return next((SASS_WIDTHS[part] for part in instruction.split(maxsplit=1)[0].split(".") if part in SASS_WIDTHS), 4)


def dissect_amdgcn(text: str, *, shared_bytes: int) -> Anatomy:
    """Count an AMD kernel from its assembly and metadata."""

    def metadata(key: str) -> int:
        found = re.search(rf"\.{key}:\s+(\d+)", text)
        return int(found.group(1)) if found else 0

    widths = {"dwordx4": 16, "dwordx3": 12, "dwordx2": 8, "dword": 4, "ushort": 2, "short": 2, "ubyte": 1, "byte": 1}

    def accesses(kind: str) -> tuple[int, ...]:
        found = re.findall(rf"^\s+(?:global|buffer|flat)_{kind}_(\w+)", text, flags=re.MULTILINE)
        return tuple(next((w for name, w in widths.items() if f.startswith(name)), 2) for f in found)

    return Anatomy(
        registers=metadata("vgpr_count"),
        stack_bytes=metadata("private_segment_fixed_size"),
        spills=metadata("vgpr_spill_count"),
        shared_bytes=shared_bytes,
        load_bytes=accesses("load"),
        store_bytes=accesses("store"),
        barriers=len(re.findall(r"^\s+s_barrier", text, flags=re.MULTILINE)),
        matrix_instructions=len(re.findall(MATRIX_INSTRUCTION["gfx942"], text)),
        instructions=len(re.findall(r"^\s+(?:v|s|global|buffer|flat|ds|scratch)_\w+", text, flags=re.MULTILINE)),
    )
