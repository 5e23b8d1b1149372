"""Adapters on ztk's decoder: one base for all layouts, whose bits stay equal, which checkpoints and exports contain."""

import copy
from pathlib import Path

import pytest
import torch

from tests.experiments import test_alignment as pairs
from tests.rl.rollout.runs import composed, config_of, play, rows_of
from ztk import checkpoint
from ztk.checkpoint.export import Weights, export_adapter, export_safetensors, export_state_dict
from ztk.config import ConfigError, Machine, compose, save
from ztk.experiments.evaluation_engine import open_frozen
from ztk.inference import Generator, SamplingParams
from ztk.nn.lora import adapters_off, is_adapter
from ztk.serve.models import open_model

CPU = Machine(gpus=0, cores=2)
ADAPTERS = ("lora=adapter", "lora.rank=4")
SAVES = ("checkpoint=periodic", "checkpoint.every=1", "checkpoint.keep=9")
TOKENS = torch.arange(40, 52).view(1, 12)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Of a checkpoint: its own names and values."""
    weights = Weights(checkpoint.read_manifest(checkpoint.resolve(folder)), dtype=torch.float32)
    found = {spec.key: torch.cat(list(weights.ranges(spec.key))).view(spec.shape) for spec in weights.specs}
    weights.close()
    return found


def base_of(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in found.items() if not is_adapter(name)}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


# Rollouts


@pytest.fixture(scope="module")
def grpo(ranks, tmp_path_factory) -> Path:
    """The folder of a run at stage 0 on two ranks, with a checkpoint of every step."""
    folder = tmp_path_factory.mktemp("grpo")
    config = config_of("grpo", *ADAPTERS, *SAVES, folder=folder, ranks=2)
    ranks(2).run(play, config=config)
    save(config, path=folder / "config.yaml")
    return folder


def test_a_run_of_ztks_decoder_is_an_adapter_by_request(grpo):
    base, merged = (Generator(open_model(str(folder)).module) for folder in (grpo / "reference", grpo))
    generator = Generator(open_model(str(grpo / "reference")).module, adapters={"grpo": checkpoint.read_adapter(grpo)})
    answers = generator.generate([[40, 41]] * 2, sampling=SamplingParams(max_tokens=6, seed=1), adapters=["grpo", None])
    for own, [answer] in zip((merged, base), answers, strict=True):
        [[wanted]] = own.generate([[40, 41]], sampling=SamplingParams(max_tokens=6, seed=1))
        assert answer.tokens == wanted.tokens and torch.equal(answer.logprobs, wanted.logprobs)


@pytest.mark.parametrize(
    ("overrides", "changes"),
    [
        (("kl.reference=lora_off",), {}),
        ((), {"zero__stage": 3}),
        (("recompute=full",), {"zero__stage": 3, "offload__optimizer": "cpu", "offload__parameters": "cpu"}),
    ],
    ids=["lora_off", "stage3", "stage3 cpu recompute"],
)
def test_grpo_has_the_same_bits_in_every_layout_and_by_either_reference(ranks, grpo, tmp_path, overrides, changes):
    config = config_of("grpo", *ADAPTERS, *overrides, folder=tmp_path, ranks=2, **changes)
    ranks(2).run(play, config=config)
    rows = rows_of(tmp_path)
    assert rows == rows_of(grpo)
    assert all(row["rollout_outside"] == 0 for row in rows) and abs(rows[0]["kl"]) < 1e-4 < abs(rows[-1]["kl"])


def test_the_base_keeps_its_bits_and_is_in_every_checkpoint(grpo):
    first, last = (weights_of(grpo / "checkpoints" / f"step-{step:06d}") for step in (1, 4))
    assert_same(base_of(last), base_of(first))
    assert_same(base_of(last), weights_of(grpo / "reference"))
    adapters = [name for name in last if is_adapter(name)]
    assert len(adapters) == 2 * 7 * 2 and all(last[name].any() for name in adapters)
    assert not any(torch.equal(first[name], last[name]) for name in adapters)


@pytest.mark.parametrize("task", ["grpo", "ppo"])
def test_a_resumed_run_equals_one_that_was_not_interrupted(ranks, grpo, tmp_path, task):
    """In the middle of a rollout."""
    full = grpo
    config = config_of(task, *ADAPTERS, *SAVES, folder=tmp_path / "full", ranks=2, zero__stage=3)
    if task == "ppo":  # the critic has adapters, and its output layer trains with them
        full = tmp_path / "full"
        ranks(2).run(play, config=config)
        first, last = (weights_of(full / "critic" / f"step-{step:06d}") for step in (1, 4))
        moved = {name for name in last if not torch.equal(first[name], last[name])}
        assert moved == {name for name in last if is_adapter(name) or name == "head.weight"}
    resumed = copy.deepcopy(config)
    resumed.output_dir, resumed.checkpoint.resume = str(tmp_path / "resumed"), str(full / "checkpoints" / "step-000003")
    Path(resumed.output_dir).mkdir()
    ranks(2).run(play, config=resumed)
    assert rows_of(tmp_path / "resumed") == rows_of(full)[3:]


# Programs that open a run


def test_what_opens_a_run_has_the_policy(grpo, tmp_path):
    """With the base unmerged as in training, merged, and merged under the names of Llama."""
    from transformers import LlamaForCausalLM

    beside, values = open_frozen(str(grpo), ema=False)
    beside = beside.to_empty(device="cpu")
    beside.materialise_buffers("cpu")
    saved = weights_of(grpo)
    with torch.no_grad():
        for name, parameter in beside.named_parameters():
            parameter.copy_(values(name=name, start=0, stop=parameter.numel()).view(parameter.shape))
            assert torch.equal(parameter, saved["embedding.weight" if name == "head.weight" else name])  # tied
    merged = open_model(str(grpo)).module
    export_safetensors(grpo, to=tmp_path / "llama")
    llama = LlamaForCausalLM.from_pretrained(tmp_path / "llama")
    with torch.no_grad():
        expected, found, exported = beside(TOKENS), merged(TOKENS), llama(input_ids=TOKENS).logits
        with adapters_off(beside):
            base = beside(TOKENS)
    # rounded weights, and sums of 64 terms at most in another order, in each of 7 products of 2 layers
    bound = 7 * 2 * 64 * 2**-24 * float(expected.abs().max())
    assert torch.allclose(found, expected, rtol=0, atol=bound)
    assert torch.allclose(exported, found, rtol=0, atol=bound)
    assert float((expected - base).abs().max()) > 10 * bound  # the adapters learnt more than that


def test_other_exports_describe_their_contents(grpo, tmp_path):
    export_state_dict(grpo, to=tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same({name: value for name, value in state.items() if name in weights_of(grpo)}, weights_of(grpo))
    with pytest.raises(checkpoint.CheckpointError, match="export it without --adapter, merged"):
        export_adapter(grpo, to=tmp_path / "adapter")


# Runs that begin with another


@pytest.fixture(scope="module")
def sft(ranks, tmp_path_factory) -> Path:
    """The folder of a run without adapters."""
    folder = tmp_path_factory.mktemp("sft")
    config = pairs.config_of("sft", *SAVES, folder=folder, ranks=1)
    ranks(1).run(pairs.play, configs=[config])
    return folder


@pytest.mark.parametrize(
    ("task", "words"),
    [("sft", ("zero=stage3", "offload=cpu")), ("sft", ("topology=tp2", "zero=stage1")), ("reward", ("zero=stage3",))],
    ids=["sft stage3 cpu", "sft tp2", "reward stage3"],
)
def test_adapters_on_the_model_of_another_run(ranks, sft, tmp_path, task, words):
    options = (*ADAPTERS, *SAVES, f"warm_start.path={sft}")
    first = pairs.config_of(task, *options, folder=tmp_path / "first", ranks=1)
    second = pairs.config_of(task, *options, *words, folder=tmp_path / "second", ranks=2)
    ranks(1).run(pairs.play, configs=[first])
    ranks(2).run(pairs.play, configs=[second])
    losses = pairs.losses_of(tmp_path / "first")
    assert pairs.losses_of(tmp_path / "second") == pytest.approx(losses, rel=1e-5) and losses[-1] != losses[0]
    body = {name: value for name, value in weights_of(sft).items() if task == "sft" or not name.startswith("head.")}
    for folder in ("first", "second"):
        found = weights_of(tmp_path / folder)
        assert_same({name: found[name] for name in body}, body)


def test_dpo_by_any_reference_and_from_adapters(ranks, sft, tmp_path):
    """A run without adapters becomes the base. A run with adapters continues, and its adapters are part of the reference."""
    begins, losses = (*ADAPTERS, *SAVES, "warm_start.steps=0", f"warm_start.path={sft}"), {}
    for reference in ("frozen", "lora_off", "precomputed"):
        config = pairs.config_of("dpo", *begins, f"dpo.reference={reference}", folder=tmp_path / reference, ranks=1)
        ranks(1).run(pairs.play, configs=[config])
        losses[reference] = pairs.losses_of(tmp_path / reference)
    assert losses["frozen"] == losses["lora_off"] == losses["precomputed"]
    goes_on = (*ADAPTERS, *SAVES, "warm_start.steps=0", f"warm_start.path={tmp_path / 'frozen'}")
    config = pairs.config_of("dpo", *goes_on, folder=tmp_path / "second", ranks=1)
    ranks(1).run(pairs.play, configs=[config])
    started, policy = weights_of(tmp_path / "second" / "reference"), weights_of(tmp_path / "frozen")
    assert_same(started, policy)
    assert_same(base_of(weights_of(tmp_path / "second")), base_of(policy))
    with pytest.raises(ConfigError, match="dpo.reference=lora_off: the policy starts with the adapters of"):
        pairs.config_of("dpo", *goes_on, "dpo.reference=lora_off", folder=tmp_path / "third", ranks=1)
    with pytest.raises(
        ConfigError, match=r"lora.alpha=4: the adapters of warm_start.path=.* alpha / rank = 4, .* use lora.alpha=16"
    ):
        pairs.config_of("dpo", *goes_on, "lora.alpha=4", folder=tmp_path / "third", ranks=1)
    rewards = (*ADAPTERS, "lora.alpha=4", f"reward.path={tmp_path / 'frozen'}", "warm_start.steps=10")
    with pytest.raises(ConfigError, match=r"lora.alpha=4: the adapters of reward.path=.* use lora.alpha=16"):
        composed("ppo", *rewards, ranks=1)


def test_a_base_of_other_sizes_is_refused(ranks, sft, tmp_path):
    options = (*ADAPTERS, f"warm_start.path={sft}", "model.layers=3")
    config = pairs.config_of("sft", *options, folder=tmp_path, ranks=1)
    with pytest.raises(Exception, match=r"it lacks blocks\.2\.|is of another model: blocks\.2\."):
        ranks(1).run(pairs.play, configs=[config])


# Refusals


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            (),
            "lora.rank=8: task=pretrain has no trained decoder .* use task=sft warm_start.path=RUN, .* or lora=none",
        ),
        (("task=plan",), "lora.rank=8: task=plan has no trained decoder"),
        (("task=sft",), "lora.rank=8: adapters on random frozen weights learn little; use warm_start.path=RUN"),
        (("task=grpo", "warm_start.steps=0"), "lora.rank=8: adapters on random frozen weights learn little"),
        (("task=grpo", "model=tiny_moe", "rollout.identity=off"), "lora.rank=8: experts .* use model=nano"),
        (("task=sft", "topology=pp2"), "topology.pipeline=2: adapters .* use topology.pipeline=1, or lora=none"),
        (("task=sft", "topology=cp2"), "topology.context=2: adapters"),
        (("task=grpo", "lora.targets=[query,head]"), "lora.targets=head: layers .* are query, key"),
        (("task=grpo", "lora.targets=[]"), r"lora.targets=\[\]: must be all-linear or names"),
        (("task=grpo", "lora.dropout=0.1", "rollout.identity=exact"), "lora.dropout=0.1: .* or off, or lora.dropout=0"),
    ],
)
def test_what_does_not_run_is_refused(tmp_path, words, says):
    with pytest.raises(ConfigError, match=f"(?s){says}"):
        compose("lora=adapter", *words, output_dir=tmp_path, machine=CPU)
