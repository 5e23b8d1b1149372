"""Measures the memory growth of each rank while `from_pretrained` reads a model at stage 3.

    python scripts/bench_loading.py [--ranks 2] [--layers 10]

The model is a randomly initialised fp32 Llama in safetensors files. With ztk every rank reads its own slices. With transformers every rank
reads everything and rank 0 distributes. "peak" is the growth of a process's own memory during the call. "after" is the growth once the call has
returned and malloc has released its free memory. "files" is the largest number of mapped file pages in addition, which the system may drop at
any time. Every rank keeps 1/n of the model.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.bench import Peak, parser_of, release_memory, status_bytes

READERS = ("ztk", "transformers")
STAGE_3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}


def make_model(folder: Path, *, layers: int, width: int = 768) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": width, "intermediate_size": width * 8 // 3, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 8000}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder, max_shard_size="100MB")


def on_rank(folder: Path, *, reader: str) -> None:
    """Reads a small model first, which triggers the library's late imports, then the large one."""
    from transformers import AutoModelForCausalLM, PreTrainedModel
    from transformers.integrations import HfDeepSpeedConfig

    keep = HfDeepSpeedConfig(STAGE_3)
    if reader == "transformers":
        # pyrefly: ignore[missing-attribute]  # ztk's wrapper by functools.wraps
        PreTrainedModel._load_pretrained_model = staticmethod(PreTrainedModel._load_pretrained_model.__wrapped__)
    AutoModelForCausalLM.from_pretrained(folder / "small")
    gc.collect()
    before, files_before = own_bytes(), status_bytes("RssFile")
    with Peak(own_bytes) as own, Peak(lambda: status_bytes("RssFile")) as files:
        start = time.perf_counter()
        model = AutoModelForCausalLM.from_pretrained(folder / "large")
        seconds = time.perf_counter() - start
    release_memory()
    found = {
        "peak": own.value - before,
        "files": files.value - files_before,
        "after": own_bytes() - before,
        "seconds": seconds,
    }
    (folder / f"{reader}-{os.environ['RANK']}.json").write_text(json.dumps(found))
    assert keep.is_zero3() and model is not None


def own_bytes() -> int:
    """Anonymous and shared memory of this process."""
    return status_bytes("RssAnon", "RssShmem")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--read", nargs=2, help=argparse.SUPPRESS)  # on a rank: folder and reader
    given = parser.parse_args()
    if given.read:
        on_rank(Path(given.read[0]), reader=given.read[1])
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "small", layers=1, width=64)
        make_model(folder / "large", layers=given.layers)
        nbytes = sum(path.stat().st_size for path in (folder / "large").glob("*.safetensors"))
        print(f"{nbytes / 1e6:.0f} MB in files, {given.ranks} ranks; MB of each rank")
        for reader in READERS:
            runner = [sys.executable, "-m", "ztk.deepspeed", "--num_gpus", str(given.ranks)]
            subprocess.run([*runner, __file__, "--read", name, reader], check=True)
            rows = [json.loads((folder / f"{reader}-{rank}.json").read_text()) for rank in range(given.ranks)]
            shown = {key: " ".join(f"{row[key] / 1e6:.0f}" for row in rows) for key in ("peak", "after", "files")}
            seconds = max(row["seconds"] for row in rows)
            print(
                f"{reader:<14} peak {shown['peak']:<16} after {shown['after']:<16} files {shown['files']:<16} {seconds:.1f} s"
            )


if __name__ == "__main__":
    main()
