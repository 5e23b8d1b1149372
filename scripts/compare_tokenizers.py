"""Compares bytes with a byte-level BPE on the standard library's sources: bits per byte of the same model at equal FLOPs.

    python scripts/compare_tokenizers.py --work FOLDER              8 minutes on one core
    python scripts/compare_tokenizers.py --work FOLDER --steps 400  longer

Both arms read the same jsonl with a document per file and hold out the same documents; the tokenizer is trained on the others. Batches have the
same number of tokens, so a byte model reads fewer bytes per step. Its head is smaller, and it runs as many more steps as `task=plan` needs for
the same FLOPs or more. A finished run in FOLDER is not repeated. Writes FOLDER/compare_tokenizers.jsonl, a line per arm. Exit code 1 unless
the BPE has fewer bits per byte.
"""

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import ztk
from ztk.data.sources import standard_library

ARMS = {"bpe": ("data.tokenizer=train", "data.vocab_size=4096"), "bytes": ("data.tokenizer=bytes",)}
COMMON = (
    "precision=fp32",
    "launch.ranks=1",
    "launch.device=cpu",
    "logger=disabled",
    "train.eval_every=100000",
    "train.eval_batches=4",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for corpus and runs")
    parser.add_argument("--steps", type=int, default=120, help="steps of the model with the BPE")
    parser.add_argument("--sequences", type=int, default=8, help="sequences of 256 tokens per step")
    parser.add_argument("--model", default="10m", help="an option of the group model")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="arms to run now")
    options = parser.parse_args()
    corpus = write_corpus(options.work / "corpus.jsonl")
    sizes = (f"model={options.model}", "data.seq_len=256", f"train.micro_batch_size={options.sequences}")
    plans = {name: plan(name, sizes=sizes) for name in ARMS}
    steps = {"bpe": options.steps, "bytes": math.ceil(options.steps * plans["bpe"]["flops"] / plans["bytes"]["flops"])}
    rows = []
    for name in options.arms:
        folder = options.work / f"{name}-{options.model}-{steps[name]}x{options.sequences}"
        words = (*COMMON, *sizes, *ARMS[name], f"data.path={corpus}", f"train.steps={steps[name]}")
        summary = folder / "summary.json"
        if not summary.is_file() or json.loads(summary.read_text())["status"] != "done":
            ztk.run(*words, folder=folder)
        rows.append(row(name, summary=json.loads(summary.read_text()), plan=plans[name], steps=steps[name]))
    print_rows(rows)
    with (options.work / "compare_tokenizers.jsonl").open("w") as file:
        file.writelines(json.dumps(each) + "\n" for each in rows)
    found = {each["arm"]: each["bits_per_byte"] for each in rows}
    return 1 if len(found) == len(ARMS) and found["bpe"] >= found["bytes"] else 0


def write_corpus(path: Path) -> Path:
    """Writes a line {"text": ...} per source file of the standard library, once."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".part")
        with unfinished.open("w") as file:
            for source in standard_library():
                text = source.path.read_bytes().decode("utf-8", errors="ignore")
                if text.strip():
                    file.write(json.dumps({"text": text}) + "\n")
        unfinished.rename(path)
    return path


def plan(name: str, *, sizes: tuple[str, ...]) -> dict[str, Any]:
    """The plan of one step of an arm."""
    vocabulary = {"bpe": 4096, "bytes": 256}[name]
    words = (f"model.vocab_size={vocabulary}", "data=synthetic", "precision=fp32", "launch.ranks=1")
    return ztk.plan_run(*sizes, *words).as_dict()


def row(name: str, *, summary: dict[str, Any], plan: dict[str, Any], steps: int) -> dict[str, Any]:
    nats, bits = summary["validation_loss"], summary["validation_bits_per_byte"]
    return {
        "arm": name,
        "parameters": plan["parameters"],
        "steps": steps,
        "flops": steps * plan["flops"],
        "bytes_per_token": nats / math.log(2) / bits,
        "loss": nats,
        "bits_per_byte": bits,
        "seconds": steps * summary["step_seconds_median"],
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    print("| tokens | parameters | steps | FLOPs | bytes per token | nats per token | bits per byte | seconds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for each in rows:
        print(
            f"| {each['arm']} | {each['parameters']:,} | {each['steps']} | {each['flops']:.3g} | {each['bytes_per_token']:.2f} | "
            f"{each['loss']:.3f} | {each['bits_per_byte']:.3f} | {each['seconds']:.0f} |"
        )


if __name__ == "__main__":
    sys.exit(main())
