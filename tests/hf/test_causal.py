"""Models of transformers in the main job: the losses of plain transformers and AdamW on one rank, under any strategy and topology."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.parallel.topology.families import LENGTH, VOCABULARY, make
from ztk import checkpoint
from ztk.checkpoint.export import export_safetensors
from ztk.core.policies.model import LoraPolicy
from ztk.core.policies.zero import ZeroPolicy
from ztk.core.runtime import Process, Tier, Topology
from ztk.core.runtime.seed import generator
from ztk.hf.causal import open_causal
from ztk.optim import OptimizerPolicy
from ztk.parallel.apply import parallelize
from ztk.parallel.pipeline import MicroBatch, PipelinePolicy
from ztk.parallel.recompute import RecomputePolicy
from ztk.train.engine import Engine
from ztk.zero.offload import OffloadPolicy

RELATIVE = 1e-5  # another order of summation, over four steps; see tests/parallel/topology/test_layouts.py
STEPS, MICRO_BATCHES = 4, 2
LEARNING = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Strategy:
    """Settings that must not change the losses."""

    topology: Topology = field(default_factory=Topology)
    stage: int = 0
    offload: str = "none"
    recompute: str = "none"
    init: str = "pretrained"
    schedule: str = "1f1b"
    kernels: bool = False
    z_loss: float = 0.0  # changes losses


# Models with experts: where two experts' scores differ by rounding, another one is chosen, and losses by 1e-4. These tokens have no such tie.
def words(step: int, *, number: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(3, VOCABULARY, (2, LENGTH + 1), generator=generator("words", step, number))
    return drawn[:, :-1], drawn[:, 1:]


def train(process: Process, *, folder: str, strategy: Strategy) -> list[float]:
    """Losses; all replicas read the same batches."""
    engine = trained(process, folder=folder, strategy=strategy, losses=(losses := []))
    engine.close()
    return losses


def save(process: Process, *, folder: str, strategy: Strategy, to: str) -> Tensor:
    """Logits [2, T, V] after training; a checkpoint of it in `to`."""
    engine = trained(process, folder=folder, strategy=strategy, losses=[])
    checkpoint.save(engine, folder=to)
    with engine.evaluating():
        logits = engine(words(99, number=0)[0])
    engine.close()
    return logits


def trained(
    process: Process, *, folder: str, strategy: Strategy, losses: list[float], lora: LoraPolicy | None = None
) -> Engine:
    """The engine after training; `losses` gets the loss of each step."""
    arranged = process.arrange(strategy.topology)
    model, values = open_causal(
        folder, init=strategy.init, seed=1, lora=lora, kernels=strategy.kernels, z_loss=strategy.z_loss
    )
    offload = OffloadPolicy(
        optimizer=Tier(strategy.offload),
        parameters=Tier(strategy.offload if strategy.stage == 3 else "none"),
        nvme_path=f"{folder}-nvme",
    )
    engine = parallelize(
        model,
        process=arranged,
        optimizer=OptimizerPolicy(name="adamw", clip_grad_norm=0.0, **LEARNING),
        zero=ZeroPolicy(stage=strategy.stage, bucket_size=1 << 12, param_persistence_threshold=0),
        offload=offload,
        recompute=RecomputePolicy(mode=strategy.recompute),
        pipeline=PipelinePolicy(schedule=strategy.schedule),
        accumulation_steps=MICRO_BATCHES,
        initial_values=values,
    )
    for step in range(STEPS):
        batches = (MicroBatch(args=words(step, number=number)) for number in range(MICRO_BATCHES))
        losses.append(float(engine.train_batch(batches)))
    return engine


def plain(model: torch.nn.Module, *, z_loss: float = 0.0) -> list[float]:
    """Trains `model` in the same way with torch only."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    vectors = {
        "params": [p for p in trained if p.ndim < 2],
        "weight_decay": 0.0,
    }  # not decayed, as by transformers' Trainer
    optimizer = torch.optim.AdamW([{"params": [p for p in trained if p.ndim > 1]}, vectors], **LEARNING)
    losses = []
    for step in range(STEPS):
        total = 0.0
        for number in range(MICRO_BATCHES):
            tokens, targets = words(step, number=number)
            logits = model(input_ids=tokens).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            loss = (loss + z_loss * logits.logsumexp(-1).square().mean()) / MICRO_BATCHES
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def saved(tmp_path, *, family: str) -> str:
    """A folder with small files, so that there are several."""
    folder = tmp_path / family
    make(family).save_pretrained(folder, max_shard_size="40KB")
    return str(folder)


TENSOR2, PIPELINE2, EXPERT2 = Topology(tensor=2), Topology(pipeline=2), Topology(expert=2)
CASES = {
    "Llama stage 3 nvme": ("Llama", Strategy(stage=3, offload="nvme")),
    "GPT2 stage 3 nvme": ("GPT2", Strategy(stage=3, offload="nvme")),
    "Qwen2Moe stage 3 nvme": ("Qwen2Moe", Strategy(stage=3, offload="nvme")),
    "Llama stage 1 cpu recompute": ("Llama", Strategy(stage=1, offload="cpu", recompute="full")),
    "GPT2 stage 2 recompute": ("GPT2", Strategy(stage=2, recompute="selective")),
    "Llama tp2 stage 3": ("Llama", Strategy(topology=TENSOR2, stage=3)),
    "GPT2 tp2": ("GPT2", Strategy(topology=TENSOR2)),
    "Bloom tp2": ("Bloom", Strategy(topology=TENSOR2)),
    "Qwen2Moe tp2": ("Qwen2Moe", Strategy(topology=TENSOR2)),
    "Qwen2Moe ep2 stage 3": ("Qwen2Moe", Strategy(topology=EXPERT2, stage=3)),
    "Llama pp2 zero bubble": ("Llama", Strategy(topology=PIPELINE2, schedule="zero_bubble")),
    "GPT2 pp2 recompute": ("GPT2", Strategy(topology=PIPELINE2, recompute="full")),
    "Llama kernels stage 3 recompute": ("Llama", Strategy(stage=3, recompute="full", kernels=True)),
    "Qwen3 kernels tp2": ("Qwen3", Strategy(topology=TENSOR2, kernels=True)),
    "Gemma2 kernels pp2": ("Gemma2", Strategy(topology=PIPELINE2, kernels=True)),
    "GPT2 kernels": ("GPT2", Strategy(stage=1, kernels=True)),
    "Llama z-loss tp2": ("Llama", Strategy(topology=TENSOR2, z_loss=0.1)),
    "GPT2 z-loss pp2": ("GPT2", Strategy(topology=PIPELINE2, z_loss=0.1)),
    "Qwen2Moe pp2": ("Qwen2Moe", Strategy(topology=PIPELINE2)),
}


@pytest.mark.parametrize("case", CASES)
def test_losses_equal_plain_transformers(ranks, tmp_path, case):
    family, strategy = CASES[case]
    expected = plain(make(family), z_loss=strategy.z_loss)
    for losses in ranks(2).run(train, folder=saved(tmp_path, family=family), strategy=strategy):
        assert losses == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.parametrize(
    ("family", "topology"),
    [("GPT2", TENSOR2), ("Llama", PIPELINE2), ("Qwen2Moe", EXPERT2)],
    ids=["GPT2 tp2", "Llama pp2", "Qwen2Moe ep2"],
)
def test_an_exported_checkpoint_loads_in_transformers(ranks, tmp_path, family, topology):
    """Logits are the engine's, up to the order of sums, and config.json is the folder's."""
    from transformers import AutoModelForCausalLM

    folder, saves = saved(tmp_path, family=family), str(tmp_path / "saves")
    expected = ranks(2).run(save, folder=folder, strategy=Strategy(topology=topology, stage=2), to=saves)[0]
    export_safetensors(saves, to=tmp_path / "exported")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    with torch.no_grad():
        logits = loaded(input_ids=words(99, number=0)[0]).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=RELATIVE * float(expected.abs().max()))
    written, own = (json.loads(Path(place, "config.json").read_text()) for place in (tmp_path / "exported", folder))
    assert {name: written.get(name) for name in own if "dtype" not in name} == {
        n: v for n, v in own.items() if "dtype" not in n
    }


def test_first_values_are_the_folders_and_random_ones_are_transformers(tmp_path):
    """Ranges of every parameter; drawn values have the spread that transformers draws, and depend on the seed alone."""
    for family in ("GPT2", "Qwen2Moe"):  # scaled residual projections; experts that the files have one by one
        made, folder = make(family), saved(tmp_path, family=family)
        model, values = open_causal(folder, init="pretrained", seed=1)
        drawn = [open_causal(folder, init="random", seed=seed)[1] for seed in (1, 1, 2)]
        fresh = type(made)(made.config)
        for name, _ in model.named_parameters():
            value = made.get_parameter(name).detach().flatten()
            size, middle = value.numel(), value.numel() // 3
            assert torch.equal(values(name=name, start=middle, stop=size), value[middle:]), name
            first, again, other = (source(name=name, start=0, stop=size) for source in drawn)
            expected = fresh.get_parameter(name).flatten()
            assert torch.equal(first, again)
            if size < 500:  # too few to compare their spread
                continue
            assert not torch.equal(first, other), name
            # The standard deviation of n normal numbers is right to 1 / sqrt(2 n): five of them, for both.
            assert float(first.std()) == pytest.approx(float(expected.std()), rel=2 * 5 / (2 * size) ** 0.5), name


@pytest.mark.parametrize(
    ("family", "replaced"),
    [
        (
            "Llama",
            "2 LlamaAttention -> rope, 2 LlamaMLP -> swiglu, 5 LlamaRMSNorm -> rms_norm, 2 attention of full prompts -> attention",
        ),
        ("GPT2", "5 LayerNorm -> layer_norm, 2 attention of full prompts -> attention"),
        ("Gemma2", "2 Gemma2Attention -> rope, 2 Gemma2MLP -> geglu, 2 attention of full prompts -> attention"),
        (
            "Phi3",
            "2 Phi3Attention -> rope, 2 Phi3MLP -> swiglu, 5 Phi3RMSNorm -> rms_norm, 2 attention of full prompts -> attention",
        ),
    ],
)
def test_what_kernels_replace(tmp_path, caplog, family, replaced):
    """Gemma's norms scale by 1 + weight and are left as they are."""
    open_causal(saved(tmp_path, family=family), init="pretrained", seed=1, kernels=True)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "ztk.hf.causal"]
    assert sorted(line.removeprefix("model.kernels: ").split(", ")) == sorted(replaced.split(", "))


def refused_by_ranks(process: Process, *, folder: str, strategy: Strategy) -> str:
    try:
        train(process, folder=folder, strategy=strategy)
    except ValueError as error:
        return str(error)
    return ""


def test_what_cannot_be_cut_into_stages_is_refused(ranks, tmp_path):
    folder = saved(tmp_path, family="Qwen3Moe")
    config = Path(folder, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"output_router_logits": True}))
    for text in ranks(2).run(refused_by_ranks, folder=folder, strategy=Strategy(topology=PIPELINE2)):
        assert "the router's loss needs the logits of all layers" in text


def test_folders_that_are_no_model_are_refused(tmp_path):
    folder = saved(tmp_path, family="Llama")
    index = Path(folder, "model.safetensors.index.json")
    entries = json.loads(index.read_text())
    for file in set(entries["weight_map"].values()) - {entries["weight_map"]["model.norm.weight"]}:
        Path(folder, file).unlink()
        break
    with pytest.raises(ValueError, match="there is no model-0000"):
        open_causal(folder, init="pretrained", seed=1)
    entries["weight_map"] = {name: file for name, file in entries["weight_map"].items() if Path(folder, file).exists()}
    index.write_text(json.dumps(entries))
    with pytest.raises(ValueError, match="the files lack .* weights of the model, such as model"):
        open_causal(folder, init="pretrained", seed=1)
    Path(folder, "config.json").write_text('{"model_type": "no_such"}')
    with pytest.raises(ValueError, match="no configuration that transformers can read"):
        open_causal(folder, init="random", seed=1)
