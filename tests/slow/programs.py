"""Training programs of other projects, unchanged, under `python -m ztk.deepspeed` on two CPU ranks of this machine."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 300
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",  # without the fp16 instructions of some processors, whose sums have other bits
}


def run_program(
    *words: str, cwd: Path, path: tuple[Path, ...], environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Runs `python -m ztk.deepspeed --num_gpus 2 WORDS` in `cwd`. Returns the exit code and all output.

    path: folders to import from; a `sitecustomize.py` in one of them runs at the start of each process.
    environment: variables in addition to this process's own.
    """
    found = {"PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT)))}
    ran = subprocess.run(
        [sys.executable, "-m", "ztk.deepspeed", "--num_gpus", "2", *words],
        cwd=cwd,
        env=os.environ | ENVIRONMENT | found | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        errors="replace",
        timeout=TIMEOUT_SECONDS,
    )
    return ran.returncode, ran.stdout


def digest_of(folder: Path) -> str:
    """The digest of all values in a program's saved weight files: folders, names, dtypes and bits. Of tied values the first name counts,
    because DeepSpeed-Chat saves only that one at stage 3."""
    import torch
    from safetensors.torch import load_file

    digest = hashlib.sha256()
    for file in sorted([*folder.rglob("*.bin"), *folder.rglob("*.safetensors")]):
        is_pickled, names = file.suffix == ".bin", {}
        values = torch.load(file, map_location="cpu", weights_only=True) if is_pickled else load_file(file)
        for name, value in values.items():
            names.setdefault(value.data_ptr(), name)
        for name in sorted(names.values()):
            value = values[name]
            digest.update(f"{file.parent.relative_to(folder)} {name} {value.dtype} {list(value.shape)}".encode())
            digest.update(value.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:8]
