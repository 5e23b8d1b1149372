"""A byte-level BPE needs fewer bits per byte than bytes: the same model on the standard library's sources, at equal FLOPs.

Both arms read the same jsonl with a document per file and hold out the same documents; the tokenizer is trained on the others. Batches have the
same number of tokens, so a byte model reads fewer bytes per step. Its head is smaller, and it runs as many more steps as its plan needs for the
same FLOPs or more. 8 minutes on one core.
"""

import json
import math

import ztk
from ztk.data.sources import standard_library

STEPS = 120  # of the model with the BPE
ARMS = {"bpe": ("data.tokenizer=train", "data.vocab_size=4096"), "bytes": ("data.tokenizer=bytes",)}
SIZES = ("model=10m", "data.seq_len=256", "train.micro_batch_size=8", "precision=fp32", "launch.ranks=1")
COMMON = (*SIZES, "launch.device=cpu", "logger=disabled", "train.eval_every=100000", "train.eval_batches=4")


def test_a_bpe_has_fewer_bits_per_byte_than_bytes(tmp_path, show):
    corpus, found = tmp_path / "corpus.jsonl", {}
    with corpus.open("w") as file:
        for source in standard_library():
            text = source.path.read_bytes().decode("utf-8", errors="ignore")
            if text.strip():
                file.write(json.dumps({"text": text}) + "\n")
    vocabularies = {"bpe": 4096, "bytes": 256}
    flops = {
        name: ztk.plan_run(*SIZES, f"model.vocab_size={size}", "data=synthetic").as_dict()["flops"]
        for name, size in vocabularies.items()
    }
    for name, words in ARMS.items():
        steps = math.ceil(STEPS * flops["bpe"] / flops[name])
        ztk.run(*COMMON, *words, f"data.path={corpus}", f"train.steps={steps}", folder=tmp_path / name)
        summary = json.loads((tmp_path / name / "summary.json").read_text())
        nats, found[name] = summary["validation_loss"], summary["validation_bits_per_byte"]
        show(
            f"{name}: {summary['parameters']:,} parameters, {steps} steps, {steps * flops[name]:.3g} FLOPs, "
            f"{nats / math.log(2) / found[name]:.2f} bytes and {nats:.3f} nats per token, {found[name]:.3f} bits per byte, "
            f"{steps * summary['step_seconds_median']:.0f} s"
        )
    assert found["bpe"] < found["bytes"]
