"""Random recipes in random layouts of `run.py`, interruptions included, give the numbers of one rank at stage 0.

A recipe contains the choices that decide the numbers: model, data, optimizer, schedule, averages, adapters, losses. A layout contains the
choices that must not: ranks, stages, tiers, recomputation, parallelism, micro-batches, an interruption that continues in another layout. A
pair is two runs of `python run.py` in fp32 on up to two ranks, or a layout that the command refuses. 60 pairs take about ten minutes.
"""

import json
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import transformers

from tests.commands import run_command
from tests.hf.finetuning import write_model, write_texts

SEQUENCES, STEPS = 8, 4
# fp32 sums in another order change a loss by a few 2e-7, and each update carries the change on. Optimizers that divide by a gradient's size
# (AdamW, LAMB, Lion's sign) change a weight by a part of the learning rate if its gradient is almost 0.
BOUND = 2e-5
BOUNDS = {
    "grad_norm": 20 * BOUND,
    "lr": 1e-12,
    "tokens": 1e-12,
}  # a norm is more sensitive to the weights than a loss
FAMILIES = ("Llama", "GPT2", "Qwen2Moe", "Gemma2", "Bloom", "Mixtral")
MOE = ("tiny_moe", "Qwen2Moe", "Mixtral")
FIXED = (
    "precision=fp32",
    "launch.device=cpu",
    "logger=disabled",
    f"train.steps={STEPS}",
    "train.eval_every=2",
    "train.eval_batches=2",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Two command lines with equal numbers. second: command line that continues the layout's first `stop` steps in another layout."""

    model: str
    recipe: tuple[str, ...]
    layout: tuple[str, ...]
    second: tuple[str, ...] | None


def draw(seed: int, *, models: dict[str, Path], texts: Path) -> Pair:
    """The pair of a seed."""
    rng = random.Random(seed)
    model = rng.choice(("nano", "tiny_moe", *FAMILIES))
    recipe = [f"model={model}"] if model not in models else ["model=hf", f"model.path={models[model]}"]
    if model not in models:
        recipe += ["model.vocab_size=256"]
    else:
        init = rng.choice(["pretrained", "random"])
        recipe += [
            f"data.tokenizer={models[model]}",
            f"model.init={init}",
            f"model.kernels={rng.choice(['true', 'false'])}",
        ]
        if init == "pretrained" and rng.random() < 0.5:
            recipe += ["lora=adapter", f"lora.rank={rng.choice([1, 4])}"]
    apart = rng.random() < 0.4 and model != "Bloom"  # Bloom cannot separate documents
    length = (
        {"GPT2": 32, "nano": 128, "tiny_moe": 600}.get(model, 96) if apart else rng.choice([15, 24, 32])
    )  # some texts end within this length
    recipe += ["data=files", f"data.path={texts}", f"data.seq_len={length}", *["data.packing=documents"] * apart]
    optimizer = rng.choice(["adamw", "adamw", "adam", "sgd", "lion", "lamb", "muon"])
    recipe += [f"optimizer={optimizer}"]
    recipe += {"muon": ["optimizer.ns_dtype=fp32"], "sgd": rng.choice([[], ["optimizer.nesterov=true"]])}.get(
        optimizer, []
    )
    recipe += rng.choice([[], [f"optimizer.clip_grad_norm={rng.choice([0, 0.05])}"]])
    recipe += [f"scheduler={rng.choice(['constant', 'cosine', 'linear', 'wsd', 'one_cycle'])}"]
    recipe += rng.choice([[], ["ema.decay=0.8", f"ema.every={rng.choice([1, 2])}", "train.evaluate=ema"]])
    recipe += rng.choice([[], ["train.z_loss=0.01"]])
    recipe += [f"train.seed={rng.choice([0, 7])}", f"train.global_batch_size={SEQUENCES}"]
    layout = draw_layout(rng, model=model)
    second = None
    if rng.random() < 0.35:
        second = draw_layout(rng, model=model)
    return Pair(model=model, recipe=tuple(recipe), layout=tuple(layout), second=second and tuple(second))


def draw_layout(rng: random.Random, *, model: str) -> list[str]:
    """Overrides of a layout of one or two ranks."""
    kinds = ["dp", "dp", "tp2", "pp2", "sp2", "cp2"] + (["ep2", "ep2"] if model in MOE else [])
    kind = rng.choice(kinds)
    ranks = 2 if kind != "dp" else rng.choice([1, 2])
    stage = rng.choice([0, 1, 2, 3])
    words = [
        f"topology={kind}",
        f"launch.ranks={ranks}",
        f"zero=stage{stage}",
        f"offload={rng.choice(['none', 'none', 'cpu', 'nvme'])}",
    ]
    words += [f"recompute={rng.choice(['none', 'none', 'full', 'every2', 'selective'])}"]
    words += rng.choice([[], [], [f"zero.bucket_size={rng.choice([1000, 40000])}"]])
    if stage == 3:
        words += rng.choice([[], ["zero.prefetch_bucket_size=0"], ["zero.param_persistence_threshold=100"]])
    if stage in (1, 2):
        words += rng.choice([[], ["zero.overlap_gather=false"]])
    if kind == "tp2" and model not in FAMILIES:
        words += rng.choice([[], ["topology.sequence_parallel=true"]])
    if kind == "pp2":
        words += rng.choice([[], [f"topology.schedule={rng.choice(['gpipe', 'zero_bubble', 'interleaved'])}"]])
    copies = ranks if kind in ("dp", "ep2") else 1
    # The balance loss is over a micro-batch of all replicas. One micro-batch per step makes it independent of the layout.
    size = SEQUENCES // copies if model in MOE else rng.choice([1, 2, 3, 4])
    return [*words, f"train.micro_batch_size={size}"]


def plain_layout(model: str) -> tuple[str, ...]:
    """One rank at stage 0."""
    size = SEQUENCES
    return (
        "topology=dp",
        "launch.ranks=1",
        "zero=stage0",
        "offload=none",
        "recompute=none",
        f"train.micro_batch_size={size}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The outcome of one command. refused: the error if it does not start. numbers: (step, name) -> value."""

    numbers: dict[tuple[int, str], float]
    refused: str = ""
    failed: str = ""


def execute(words: tuple[str, ...], *, folder: Path, cache: Path) -> Outcome:
    """Runs one command line to its end."""
    place = folder.parent / f"{folder.name}-cwd"
    place.mkdir(exist_ok=True)
    done = run_command(*FIXED, *words, f"hydra.run.dir={folder}", cwd=place, environment={"XDG_CACHE_HOME": str(cache)})
    rows = folder / "metrics.jsonl"
    if done.returncode:
        told = (done.stderr + done.stdout).strip()
        if "Traceback" not in told and not rows.exists():
            return Outcome(numbers={}, refused=" ".join(told.split())[-400:])
        return Outcome(numbers={}, failed=told[-1500:])
    found = {}
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        for name in ("loss", "validation_loss", "grad_norm", "lr", "tokens"):
            if row.get(name) is not None:
                found[row["step"], name] = row[name]
    return Outcome(numbers=found)


def of_layout(pair: Pair, *, work: Path, cache: Path) -> Outcome:
    """The pair's second run: in one layout, or its first steps in one layout and the others in another."""
    words = (*pair.recipe, *pair.layout)
    if pair.second is None:
        return execute(words, folder=work / "layout", cache=cache)
    first = execute((*words, "checkpoint.every=2"), folder=work / "layout", cache=cache)
    if first.refused or first.failed:
        return first
    resumed = f"checkpoint.resume={work / 'layout' / 'checkpoints' / 'step-000002'}"
    again = execute((*pair.recipe, *pair.second, resumed), folder=work / "again", cache=cache)
    if again.refused or again.failed:
        return again
    if early := [at for at in again.numbers if at[0] <= 2]:
        return Outcome(numbers={}, failed=f"the resumed run has {early}")
    return Outcome(numbers={at: value for at, value in first.numbers.items() if at[0] <= 2} | again.numbers)


def compare(pair: Pair, *, work: Path, cache: Path) -> tuple[str, str]:
    """(kind, message) of a pair; kind is equal, refused, differs or failed."""
    plain = execute((*pair.recipe, *plain_layout(pair.model)), folder=work / "plain", cache=cache)
    found = plain if plain.refused or plain.failed else of_layout(pair, work=work, cache=cache)
    if found.refused or found.failed:
        kind = "failed" if found.failed else "refused"
        return kind, f"{'the recipe: ' if found is plain else ''}{found.failed or found.refused}"
    if set(found.numbers) != set(plain.numbers):
        return "differs", f"rows: {sorted(set(found.numbers) ^ set(plain.numbers))}"
    off = {at: abs(value - found.numbers[at]) / max(abs(value), 1e-3) for at, value in plain.numbers.items()}
    worst = max(off, key=lambda at: off[at] / BOUNDS.get(at[1], BOUND))
    told = (
        f"{off[worst]:.0e} in {worst[1]} of step {worst[0]}: {plain.numbers[worst]:.7g} and {found.numbers[worst]:.7g}"
    )
    return ("equal" if off[worst] <= BOUNDS.get(worst[1], BOUND) else "differs"), told


def test_a_layout_has_the_numbers_of_one_rank(tmp_path, show, amount):
    transformers.utils.logging.disable_progress_bar()
    texts, counts, faults = write_texts(tmp_path / "texts.jsonl"), Counter(), []
    models = {family: tmp_path / family for family in FAMILIES}
    for seed in range(amount(60)):
        pair, work = draw(seed, models=models, texts=texts), tmp_path / str(seed)
        if pair.model in models and not models[pair.model].exists():
            write_model(models[pair.model], family=pair.model, texts=texts)
        work.mkdir()
        kind, told = compare(pair, work=work, cache=tmp_path / "cache")
        counts[kind] += 1
        if kind in ("differs", "failed"):
            lines = (pair.recipe, pair.layout, pair.second or ())
            faults.append("\n".join([f"{seed} {kind}: {told}", *(f"    {' '.join(line)}" for line in lines)]))
        shutil.rmtree(work)
    show(", ".join(f"{count} pairs {kind}" for kind, count in counts.items()))
    assert not faults, "\n".join(faults)
