"""One line fine-tunes a small transformers model on a jsonl with its tokenizer, compared with plain transformers.

`tests/slow/test_finetuning.py` prints it.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.commands import run_command
from tests.parallel.topology.families import make
from ztk.checkpoint.export import export_safetensors
from ztk.data import ReadPolicy, Share, SubwordTokenizer, TextPolicy, open_tokens
from ztk.data.sources import standard_library

VOCABULARY, LENGTH, SEQUENCES, STEPS = 300, 32, 4, 4
LEARNING = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
LAYOUTS = {
    "stage 3, nvme": ("zero=stage3", "offload=nvme", "launch.ranks=2", "train.micro_batch_size=2"),
    "tp2": ("topology=tp2", "zero=stage1", "train.micro_batch_size=4"),
    "pp2": ("topology=pp2", "zero=stage1", "train.micro_batch_size=2"),
    "sp2": ("topology=sp2", "zero=stage2", "train.micro_batch_size=4"),
    "ep2": ("topology=ep2", "zero=stage3", "train.micro_batch_size=2"),
}
LOSS = 1e-5  # as in tests/hf/test_causal.py
# AdamW divides by the root of a gradient's square: where a gradient is near 0, a rounding of it moves a weight by a part of the learning rate.
LOGIT = 1e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Results of plain transformers and torch's AdamW: a loss per step, and logits [1, T, V] afterwards, fp32."""

    losses: list[float]
    logits: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Off:
    """The largest difference of a step's loss, relative to it, and of a logit of the exported folder, relative to the largest logit."""

    loss: float
    logit: float

    @property
    def holds(self) -> bool:
        return self.loss <= LOSS and self.logit <= LOGIT


def write_texts(path: Path) -> Path:
    """A line per file of the standard library, of some."""
    files = [source for source in standard_library() if 500 < source.size < 5_000][:40]
    lines = [json.dumps({"text": source.path.read_text(encoding="utf-8", errors="ignore")}) for source in files]
    path.write_text("\n".join(lines) + "\n")
    return path


def write_model(folder: Path, *, family: str, texts: Path) -> Path:
    """A transformers folder with a small model and its own tokenizer."""
    make(family, vocab_size=VOCABULARY).save_pretrained(folder)
    read = (json.loads(line)["text"] for line in texts.read_text().splitlines())
    SubwordTokenizer.train(read, vocab_size=VOCABULARY, folder=folder / "made")
    for file in (folder / "made").iterdir():
        file.rename(folder / file.name)
    (folder / "made").rmdir()
    return folder


def by_transformers(model: Path, *, texts: Path, work: Path) -> Expected:
    """On the sequences of the command. work: has the tokens' cache."""
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(model).train()
    matrices, vectors = [p for p in trained.parameters() if p.ndim > 1], [p for p in trained.parameters() if p.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]  # as transformers' Trainer
    optimizer = torch.optim.AdamW(groups, **LEARNING)
    policy = TextPolicy(
        paths=(str(texts),), tokenizer=str(model), read=ReadPolicy(share=0.05), cache_dir=str(work / "cache")
    )
    stream = open_tokens(policy).stream(seq_len=LENGTH, share=Share(micro_batch=SEQUENCES), seed=0)
    losses = []
    for _ in range(STEPS):
        batch = stream.next_batch()
        logits = trained(input_ids=batch.tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return Expected(losses=losses, logits=logits_of(trained))


def logits_of(model: torch.nn.Module) -> Tensor:
    """Of one sequence, fp32 [1, T, V]."""
    with torch.no_grad():
        return model.eval()(input_ids=torch.arange(LENGTH)[None] * 7 % VOCABULARY).logits


def by_command(model: Path, *, layout: str, texts: Path, work: Path, expected: Expected) -> Off:
    """Runs the line with a layout, and exports its checkpoint. An AssertionError if the command fails."""
    from transformers import AutoModelForCausalLM

    run = work / f"{model.name}-{layout}".replace(", ", "-").replace(" ", "-")
    done = run_command(
        *("model=hf", f"model.path={model}", f"data.path={texts}", f"data.tokenizer={model}", *LAYOUTS[layout]),
        *(f"data.seq_len={LENGTH}", f"train.global_batch_size={SEQUENCES}", f"train.steps={STEPS}"),
        *("precision=fp32", "launch.device=cpu", "logger=disabled", "scheduler=constant", "scheduler.warmup_steps=0"),
        *(f"optimizer.lr={LEARNING['lr']}", "train.eval_every=100", "train.eval_batches=1"),
        *(f"checkpoint.every={STEPS}", f"hydra.run.dir={run}"),
        cwd=work,
        environment={"XDG_CACHE_HOME": str(work / "cache")},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    losses = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    export_safetensors(run, to=run / "exported")
    found, logits = logits_of(AutoModelForCausalLM.from_pretrained(run / "exported")), expected.logits
    return Off(
        loss=max(abs(one / other - 1) for one, other in zip(losses, expected.losses, strict=True)),
        logit=float((found - logits).abs().max() / logits.abs().max()),
    )
