r"""Compiles the launches of all ops' test and benchmark shapes, and of the models of `scripts/gpu_item.py` in training and in the inference
engine, into a Triton cache that a GPU machine reads.

    TRITON_INTERPRET=0 python -m tests.kernels.aot.cache FOLDER --at /tmp/ztk_triton --target sm_90 [--libtriton SHA256] [--ops swiglu]

[Note: Key of Triton's cache]
Triton 3.6 looks a program up by a hash of (triton/runtime/cache.py, `get_cache_key`):

- Triton itself: its version, its Python files and libtriton.so (`triton_key`);
- the kernel: its text and line, the text of functions that it calls, types and divisibility of arguments, constexprs (`ASTSource.hash`);
- the target: architecture, and the output of `ptxas --version` of the ptxas in Triton's wheel (`CUDABackend.hash`);
- all options, with the hash of libdevice, which lies in the wheel, too (`CUDAOptions.hash`);
- variables that change the compiler, such as DISABLE_LLVM_OPT.

No part comes from a driver or a GPU. Only libtriton.so differs between the wheels of one version for two versions of Python: `--libtriton`
has the hash of the other machine's.

Arguments are specialised by Triton's own binder (`JITFunction.run` with warmup), with an active driver that only names its target. Entries
have absolute paths of their files, so the folder must lie at `--at` there.
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import cache as triton_cache
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from scripts.gpu_item import DECODED, LLAMA
from scripts.gpu_training import LARGE, MEDIUM, SMALL
from tests.kernels.aot.engine import run_engine
from tests.kernels.aot.record import noting, run_model, run_op
from tests.kernels.aot.sweep import shapes
from ztk.kernels import ALL_OPS
from ztk.kernels.launch.library import interpreting
from ztk.kernels.launch.machine import MACHINES

LIBTRITON = Path(triton.__file__).parent / "_C" / "libtriton.so"
RUN = JITFunction.run  # Triton's own, which `noting` replaces
_HALVES = (torch.bfloat16,)
# Models of scripts/gpu_training.py: dtypes, batch, and length. The 1B model has another batch on an H200.
MODELS = (
    (SMALL, (torch.float32, torch.bfloat16, torch.float16), 8, 256),
    (MEDIUM, _HALVES, 4, 256),
    (LARGE, _HALVES, 4, 2048),
    (LARGE, _HALVES, 8, 2048),
)
# Models of its items `answers` and `decode`: dtype, tokens of a sequence, and sequences.
ENGINES = (
    (MEDIUM, torch.float32, MEDIUM.max_seq_len, 6),
    (LLAMA, torch.bfloat16, max(DECODED.values()), max(DECODED)),
)


class TargetDriver:
    """A driver of Triton for a GPU that is not here. It compiles and cannot launch."""

    def __init__(self, target: str) -> None:
        self._target = GPUTarget("cuda", int(target.removeprefix("sm_")), MACHINES[target].warp_size)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def compiling(folder: Path, *, target: str, libtriton: str | None = None) -> Iterator[list[bool]]:
    """Triton compiles for `target` into `folder`, with the keys of a Triton with this libtriton (default: the installed one).

    Yields a list that grows by an element per program: whether the folder had it.
    """
    key, found = triton_cache.triton_key(), []
    if libtriton is not None:
        key = key.replace(hashlib.sha256(LIBTRITON.read_bytes()).hexdigest(), libtriton)

    def listen(*, cache_hit: bool, **_: Any) -> None:
        found.append(cache_hit)

    with (
        mock.patch.object(triton_cache, "triton_key", lambda: key),
        mock.patch.object(driver, "_active", TargetDriver(target)),
        mock.patch.object(knobs.cache, "dir", str(folder)),
        mock.patch.object(knobs.compilation, "store_binary_only", True),
        mock.patch.object(knobs.compilation, "listener", listen),
    ):
        yield found


def work(ops: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yields ops whose names contain `ops`, and all models if it is empty."""
    for number, case in shapes():
        spec = ALL_OPS[number]
        if ops in spec.name:
            yield f"{spec.name} {case.shape} {case.dtype}", partial(run_op, spec, case=case)
    for config, dtypes, batch, seq_len in () if ops else MODELS:
        for dtype in dtypes:
            name = f"decoder of width {config.dim}, {batch} x {seq_len}, {dtype}"
            yield name, partial(run_model, config, dtype=dtype, batch=batch, seq_len=seq_len)
    for config, dtype, longest, sequences in () if ops else ENGINES:
        name = f"inference of width {config.dim}, {dtype}"
        yield name, partial(run_engine, config, dtype=dtype, longest=longest, sequences=sequences)


def fill(folder: Path, target: str, libtriton: str | None, ops: str, part: int, parts: int) -> dict[str, Any]:
    """Compiles the launches of every `parts`-th piece of work from `part` on. Returns counts and faults."""
    faults = []

    def note(kernel, grid, *args, **named):
        RUN(kernel, *args, grid=grid, warmup=True, **named)

    with compiling(folder, target=target, libtriton=libtriton) as found, noting(note, target=target):
        for name, run in list(work(ops))[part::parts]:
            try:
                run()
            except Exception as error:  # noqa: BLE001  # of the compiler
                faults.append(f"{name}: {type(error).__name__}: {error}"[:300])
    return {"found": sum(found), "compiled": len(found) - sum(found), "faults": faults}


def move(folder: Path, *, at: Path) -> None:
    """Makes the folder readable at another path: the paths of a program's files become those there."""
    for path in folder.glob("*/__grp__*"):
        document = json.loads(path.read_text())
        own = {name: str(at / path.parent.name / Path(file).name) for name, file in document["child_paths"].items()}
        path.write_text(json.dumps({"child_paths": own}))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--at", type=Path, required=True, help="where the folder will lie on the GPU machine")
    parser.add_argument("--target", default="sm_90", choices=[name for name in MACHINES if name.startswith("sm_")])
    parser.add_argument("--libtriton", help="SHA-256 of the other machine's libtriton.so")
    parser.add_argument("--ops", default="", help="only ops whose name contains this")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    if interpreting():
        parser.error("TRITON_INTERPRET=1 replaces the compiler; run without it")
    common = (options.folder.resolve(), options.target, options.libtriton, options.ops)
    jobs = [(*common, part, options.processes) for part in range(options.processes)]
    with ProcessPoolExecutor(options.processes) as pool:
        rows = list(pool.map(fill, *zip(*jobs, strict=True)))
    move(options.folder, at=options.at)
    programs = len(list(options.folder.glob("*/__grp__*")))
    print(
        json.dumps(
            {"triton": triton.__version__, "programs": programs, "faults": [f for row in rows for f in row["faults"]]}
        )
    )
    return int(any(row["faults"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
