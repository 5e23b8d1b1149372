"""task=dpo with a model of transformers: the losses of plain transformers, peft and AdamW on one rank, at every stage and tier."""

import copy
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.experiments.test_alignment import digest_of, laid_out, losses_of, play, record_of, written
from tests.hf import small
from tests.parallel.topology.families import make
from ztk.checkpoint import resolve
from ztk.checkpoint.export import Weights, export_adapter
from ztk.checkpoint.manifest import read_manifest
from ztk.config import Config, ConfigError, Machine, compose, save
from ztk.core.policies.model import LoraPolicy
from ztk.core.runtime import Process
from ztk.experiments import dpo as dpo_program
from ztk.experiments.models import full_values
from ztk.hf.causal import open_causal
from ztk.nn.lora import adapters_off
from ztk.serve.models import open_model

CPU = Machine(gpus=0, cores=2)
RELATIVE = 1e-5  # sums of fp32 in another order, over four steps; see tests/hf/test_causal.py
STEPS, BETA, SFT_WEIGHT = 4, 0.5, 0.25
LEARNING = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
PAIRS = [
    (f"ab{letter}", f"{letter}{'xy'[: number % 3]}", "q" * (1 + number % 2)) for number, letter in enumerate("cdefghij")
]
PAIR_RECORDS = [{"prompt": prompt, "chosen": chosen, "rejected": rejected} for prompt, chosen, rejected in PAIRS]
COMMON = (
    *(f"train.steps={STEPS}", "train.global_batch_size=8", "train.micro_batch_size=2", "train.eval_every=0"),
    *("scheduler=constant", "scheduler.warmup_steps=0", "optimizer=adamw", "optimizer.clip_grad_norm=0"),
    *("optimizer.lr=3e-3", "optimizer.betas=[0.9,0.95]", "optimizer.eps=1e-8", "optimizer.weight_decay=0.1"),
    *(f"dpo.beta={BETA}", f"dpo.sft_weight={SFT_WEIGHT}", "warm_start.steps=0", "data.seq_len=16"),
    *("data.validation_fraction=0", "logger=disabled", "launch.device=cpu", "zero.bucket_size=5000"),
)
ADAPTERS = ("lora=adapter", "lora.rank=4")
LORA = LoraPolicy(rank=4, alpha=16.0, targets=("all-linear",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A Llama, its tokenizer, and pairs. A step takes all pairs, so that their order does not count."""
    path = small.save_model(tmp_path_factory.mktemp("model"))
    written(path / "pairs.jsonl", *PAIR_RECORDS)
    return path


def config_of(*overrides: str, folder: Path, to: Path, ranks: int = 2, task: str = "dpo") -> Config:
    to.mkdir(parents=True, exist_ok=True)
    data = (f"data.path={folder}/pairs.jsonl", f"data.tokenizer={folder}", "data=preferences")
    given = COMMON if task == "dpo" else tuple(word for word in COMMON if not word.startswith(("dpo.", "warm_start.")))
    model = (f"task={task}", "model=hf", f"model.path={folder}", f"launch.ranks={ranks}")
    return compose(*model, *data, *given, *overrides, output_dir=str(to), machine=CPU)


def logprob(model: torch.nn.Module, *, prompt: str, answer: str) -> torch.Tensor:
    """Of the answer and its end token, summed, by transformers alone and without padding."""
    encode = small.tokenizer().encode
    tokens = torch.tensor([*encode(prompt), *encode(answer), small.EOS])
    found = F.log_softmax(model(input_ids=tokens[None]).logits[0].float(), dim=-1)
    return found[torch.arange(len(tokens) - 1), tokens[1:]][len(encode(prompt)) - 1 :].sum()


def by_hand(model: torch.nn.Module, *, reference) -> list[float]:
    """reference(prompt=, answer=): without gradients."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    norms = {"params": [parameter for parameter in trained if parameter.dim() == 1], "weight_decay": 0.0}  # as ztk does
    matrices = {"params": [parameter for parameter in trained if parameter.dim() > 1]}
    optimizer = torch.optim.AdamW([matrices, norms], **LEARNING)
    count = sum(len(chosen) + 1 for _, chosen, _ in PAIRS)
    losses = []
    for _ in range(STEPS):
        loss = torch.zeros(())
        for prompt, chosen, rejected in PAIRS:
            own = [logprob(model, prompt=prompt, answer=answer) for answer in (chosen, rejected)]
            frozen = [reference(prompt=prompt, answer=answer) for answer in (chosen, rejected)]
            margin = (own[0] - frozen[0]) - (own[1] - frozen[1])
            loss = loss - F.logsigmoid(BETA * margin) / len(PAIRS) - SFT_WEIGHT * own[0] / count
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def plain(folder: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def of_peft(folder: Path) -> torch.nn.Module:
    """peft's model with ztk's first values of the adapters."""
    from peft import LoraConfig, get_peft_model

    model, values = open_causal(str(folder), init="pretrained", seed=config_seed(folder), lora=LORA)
    described = model.peft_config["default"].to_dict()
    given = {name: described[name] for name in ("r", "lora_alpha", "lora_dropout", "target_modules", "fan_in_fan_out")}
    found = get_peft_model(plain(folder), LoraConfig(**given, task_type="CAUSAL_LM"))
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_" in name:
                own = name.removeprefix("base_model.model.")
                parameter.copy_(values(name=own, start=0, stop=parameter.numel()).view(parameter.shape))
    return found


def config_seed(folder: Path) -> int:
    return compose(output_dir=str(folder), machine=CPU).train.seed


# The same numbers


def test_losses_equal_plain_transformers(ranks, folder, tmp_path):
    model = plain(folder)
    frozen = copy.deepcopy(model)
    expected = by_hand(model, reference=torch.no_grad()(lambda **pair: logprob(frozen, **pair)))
    ranks(1).run(play, configs=[config_of(folder=folder, to=tmp_path / "run", ranks=1)])
    assert losses_of(tmp_path / "run") == pytest.approx(expected, rel=RELATIVE)
    assert expected[-1] < 0.7 * expected[0]


@pytest.mark.parametrize("task", ["dpo", "reward"])
def test_divided_experts_have_the_losses_of_one_rank(task, ranks, tmp_path):
    path = tmp_path / "experts"
    make("Qwen2Moe", vocab_size=small.VOCABULARY).save_pretrained(path)
    small.tokenizer().save_pretrained(path)
    written(path / "pairs.jsonl", *PAIR_RECORDS)
    for topology, count in (("dp", 1), ("ep2", 2)):
        given = {"folder": path, "to": tmp_path / topology, "ranks": count, "task": task}
        ranks(count).run(play, configs=[config_of(f"topology={topology}", **given)])
    assert losses_of(tmp_path / "ep2") == pytest.approx(losses_of(tmp_path / "dp"), rel=RELATIVE)


def test_losses_with_adapters_equal_peft(ranks, folder, tmp_path):
    model = of_peft(folder)

    @torch.no_grad()
    def reference(**pair: str) -> torch.Tensor:
        with model.disable_adapter():
            return logprob(model, **pair)

    expected = by_hand(model, reference=reference)
    options = (*ADAPTERS, "dpo.reference=lora_off")
    ranks(1).run(play, configs=[config_of(*options, folder=folder, to=tmp_path / "run", ranks=1)])
    assert losses_of(tmp_path / "run") == pytest.approx(expected, rel=RELATIVE)
    assert expected[-1] < expected[0]


@pytest.mark.parametrize("kind", ["full", "adapters"])
def test_losses_have_the_same_bits_at_every_stage_and_tier(ranks, folder, tmp_path, kind):
    """With adapters, of every reference too: a new adapter adds nothing, so the first policy has the bits of its base."""
    layouts = [(0, "none"), (0, "cpu"), (3, "cpu")]
    references = ("frozen", "lora_off", "precomputed") if kind == "adapters" else ("frozen",)
    options = (
        "train.micro_batch_size=4",
        *(ADAPTERS if kind == "adapters" else ()),
    )  # stages 2 and 3 reduce every micro-batch
    first = config_of(*options, folder=folder, to=tmp_path / "first")
    configs = []
    for stage, tier in layouts:
        for reference in references:
            config = laid_out(copy.deepcopy(first), stage, tier)
            config.dpo.reference = type(config.dpo.reference)(reference)
            config.output_dir = str(tmp_path / f"{stage}{tier}{reference}")
            Path(config.output_dir).mkdir()
            configs.append(config)
    ranks(2).run(play, configs=configs)
    expected = record_of(Path(configs[0].output_dir))
    assert len({row["loss"] for row in expected}) == STEPS, "nothing is trained"
    for config in configs[1:]:
        assert record_of(Path(config.output_dir)) == expected, config.output_dir


# The base below adapters


def base_bits(process: Process, *, config: Config) -> tuple[str, str, int]:
    """Digests of the policy's frozen parameters before the run and after it, and how many engines were built."""
    seen, engines = [], []
    build = dpo_program.build

    def watched(config: Config, **kwargs):
        engine = build(config, **kwargs)
        engines.append(engine)
        seen.append(bits_of(engine))
        close = engine.close
        engine.close = lambda **kwargs: (seen.append(bits_of(engine)), close(**kwargs))
        return engine

    dpo_program.build = watched
    try:
        play(process, configs=[config])
    finally:
        dpo_program.build = build
    before, after = seen
    return before, after, len(engines)


def bits_of(engine) -> str:
    return digest_of({name: value for name, value in full_values(engine).items() if "lora_" not in name})


def test_the_base_keeps_its_bits(ranks, folder, tmp_path):
    config = laid_out(config_of(*ADAPTERS, "dpo.reference=lora_off", folder=folder, to=tmp_path / "run"), 3, "cpu")
    expected = digest_of({name: value.detach() for name, value in plain(folder).named_parameters()})
    assert ranks(2).run(base_bits, config=config) == [(expected, expected, 1)] * 2


def test_adapters_off_is_the_base_and_has_no_gradients(folder):
    model, values = open_causal(str(folder), init="pretrained", seed=1, lora=LORA)
    tokens = torch.arange(2, 10)[None]
    for name, parameter in list(model.named_parameters()):
        value = values(name=name, start=0, stop=parameter.numel()).view(parameter.shape)
        owner, _, leaf = name.rpartition(".")
        drawn = torch.randn(value.shape) if "lora_B" in name else value
        setattr(model.get_submodule(owner), leaf, torch.nn.Parameter(drawn, requires_grad=parameter.requires_grad))
    base = plain(folder)(input_ids=tokens).logits
    with adapters_off(model):
        off = model(tokens)
    assert not off.requires_grad
    assert torch.equal(off, base)
    again = model(tokens)
    assert again.requires_grad
    assert not torch.allclose(again, base, atol=1e-2)
    with pytest.raises(ValueError, match="use lora=adapter"), adapters_off(plain(folder)):
        pass


# Checkpoints


@pytest.mark.parametrize("reference", ["frozen", "lora_off"])
def test_a_resumed_run_with_adapters_equals_one_that_was_not_interrupted(ranks, folder, tmp_path, reference):
    from peft import PeftModel

    options = (*ADAPTERS, f"dpo.reference={reference}", "checkpoint=periodic", "checkpoint.every=2", "zero=stage3")
    full = config_of(*options, folder=folder, to=tmp_path / "full")
    resumed = copy.deepcopy(full)
    resumed.output_dir = str(tmp_path / "resumed")
    Path(resumed.output_dir).mkdir()
    resumed.checkpoint.resume = str(tmp_path / "full" / "checkpoints" / "step-000002")
    ranks(2).run(play, configs=[full, resumed])
    assert record_of(tmp_path / "resumed") == record_of(tmp_path / "full")[2:]
    saved = read_manifest(tmp_path / "full" / "checkpoints" / "step-000002").parameters
    assert saved and all("lora_" in info.name for info in saved)
    assert not (tmp_path / "full" / "reference").exists()
    export_adapter(tmp_path / "full", to=tmp_path / "adapter")
    trained = PeftModel.from_pretrained(plain(folder), tmp_path / "adapter")
    prompt, chosen, _ = PAIRS[0]
    with torch.no_grad():
        assert logprob(trained, prompt=prompt, answer=chosen) > logprob(plain(folder), prompt=prompt, answer=chosen)


@pytest.mark.parametrize(
    "trained, adapters",
    [((), ()), (ADAPTERS, ADAPTERS), ((), ADAPTERS)],
    ids=["full", "adapters", "full, then adapters"],
)
def test_fine_tuned_parameters_start_both_models(ranks, folder, tmp_path, trained, adapters):
    """The first margin is 0: the reference is the policy after task=sft with its adapters. New adapters next to a trained base are saved with
    it, because `model.path` has another base."""
    sft = config_of(
        *trained, "checkpoint=periodic", "checkpoint.every=4", folder=folder, to=tmp_path / "sft", task="sft"
    )
    options = (*adapters, "train.steps=1", f"warm_start.path={tmp_path / 'sft'}")
    ranks(2).run(play, configs=[sft])
    dpo = config_of(*options, folder=folder, to=tmp_path / "dpo")
    ranks(2).run(play, configs=[dpo])
    (row,) = record_of(tmp_path / "dpo")
    assert row["margin"] == 0
    with torch.no_grad():
        base = plain(folder)
        before = sum(float(logprob(base, prompt=prompt, answer=chosen)) for prompt, chosen, _ in PAIRS)
    count = sum(len(chosen) + 1 for _, chosen, _ in PAIRS)
    assert row["loss"] - math.log(2) < SFT_WEIGHT * -before / count - 0.01  # it has learnt the chosen answers
    if adapters and not trained:
        config_of(*options, "dpo.reference=lora_off", folder=folder, to=tmp_path / "off")  # the base is the policy
        save(dpo, path=tmp_path / "dpo" / "config.yaml")
        answering, learnt = open_model(str(tmp_path / "dpo")).module, base_of(tmp_path / "sft")
        changed = {name for name, value in answering.named_parameters() if not torch.equal(value, learnt[name])}
        assert 0 < len(changed) < len(learnt)  # adapters of linear layers, merged
        assert all((value - learnt[name]).abs().max() < 0.1 for name, value in answering.named_parameters())
        assert all(
            "lora_" in name or torch.equal(value, learnt[name]) for name, value in base_of(tmp_path / "dpo").items()
        )


def base_of(folder: Path) -> dict[str, torch.Tensor]:
    """The values of a run's newest checkpoint."""
    weights = Weights(read_manifest(resolve(folder)), dtype=torch.float32, is_merged=False)
    found = {spec.key: torch.cat(list(weights.ranges(spec.key))).view(spec.shape) for spec in weights.specs}
    weights.close()
    return found


# Refusals


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (("dpo.reference=lora_off",), "dpo.reference=lora_off: .* use lora=adapter, or dpo.reference=frozen"),
        (("topology=sp2",), "topology.sequence: task=dpo gives models of transformers full sequences"),
        (("data.path=null", "data.tokenizer=bytes"), "text is read as bytes"),
        ((*ADAPTERS, "warm_start.steps=3"), "warm_start.steps=3: would train the adapters"),
    ],
)
def test_what_does_not_run_is_refused(folder, tmp_path, overrides, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        config_of(*(word.format(folder=folder) for word in overrides), folder=folder, to=tmp_path)
