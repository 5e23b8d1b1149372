"""Models of runs opened for answers: ztk's decoder, transformers' models, adapters."""

import shutil
from importlib import import_module

import pytest
import torch
import transformers
from safetensors.torch import load_file

from experiments import policies
from tests.hf.test_causal import saved
from ztk import checkpoint
from ztk.checkpoint.export import export_adapter, export_safetensors
from ztk.config import Machine, compose, save
from ztk.core.runtime import Process
from ztk.inference import Generator, SamplingParams
from ztk.report import plot
from ztk.serve.models import open_model

STEPS = (
    "train.steps=2",
    "train.global_batch_size=2",
    "train.micro_batch_size=2",
    "checkpoint.every=2",
    "optimizer.lr=0.05",
)
QUICK = (
    *STEPS,
    "logger=disabled",
    "precision=fp32",
    "launch.ranks=1",
    "launch.device=cpu",
    "scheduler.warmup_steps=0",
)
HF = ("model=hf", "data=synthetic", "data.seq_len=8")
CHAT = (
    "task=sft",
    "model.layers=1",
    "model.dim=16",
    "model.heads=2",
    "model.kv_heads=2",
    "model.hidden_dim=16",
    "data.stop=3",
)
TOKENS = torch.arange(1, 9).view(1, 8)
GREEDY = SamplingParams(max_tokens=4, temperature=0)


def play(process: Process, *, config) -> None:
    plot.plot_run = lambda folder: None
    import_module(config.task.module).run(config, process=process.arrange(policies.topology(config)))


@pytest.fixture
def run(ranks, tmp_path):
    """`run(*overrides)`: the folder of a run that ended."""

    def trained(*overrides: str):
        folder = tmp_path / "run"
        folder.mkdir()
        config = compose(*QUICK, *overrides, output_dir=str(folder), machine=Machine(gpus=0, cores=2))
        save(config, path=folder / "config.yaml")
        ranks(1).run(play, config=config)
        return folder

    return trained


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def test_a_run_of_a_model_of_transformers_has_its_trained_weights(run, tmp_path):
    base = saved(tmp_path, family="GPT2")
    folder = run(*HF, f"model.path={base}")
    opened = open_model(str(folder))
    export_safetensors(folder, to=tmp_path / "exported")
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    first = transformers.AutoModelForCausalLM.from_pretrained(base)
    assert torch.equal(logits(opened.module), logits(exported)) and opened.ends == ()
    assert not torch.allclose(logits(exported), logits(first), rtol=1e-2)


def test_the_average_of_a_run_with_adapters_in_place_of_its_weights(run, tmp_path):
    base = saved(tmp_path, family="GPT2")
    words = ("lora=adapter", "lora.targets=[c_attn,c_proj]", "lora.rank=2", "lora.alpha=6", "lora.dropout=0")
    folder = run(*HF, f"model.path={base}", *words, "ema.decay=0.5")
    for name, ema in (("weights", False), ("average", True)):
        export_adapter(folder, to=tmp_path / name, ema=ema)
    weights, average = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("weights", "average"))
    own, plain = (open_model(str(folder), ema=ema).module for ema in (True, False))
    assert not torch.equal(logits(own), logits(plain))
    for name in (name for name in weights if "lora_B" in name):
        # zero at first; after steps 1 and 2 the average is (B1 / 2 + B2) / 2, and Adam's first steps go the same way
        assert 0 < average[name].norm() < weights[name].norm()
    with pytest.raises(ValueError, match=r"inference\.ema=true"):
        open_model(str(base), ema=True)


@pytest.mark.parametrize(("family", "targets"), [("Llama", "all-linear"), ("GPT2", "[c_attn,c_proj]")])
def test_adapters_are_merged(run, tmp_path, family, targets):
    from peft import PeftModel

    base = saved(tmp_path, family=family)
    folder = run(*HF, f"model.path={base}", "lora=adapter", f"lora.targets={targets}", "lora.rank=2", "lora.alpha=6")
    opened = open_model(str(folder))
    export_adapter(folder, to=tmp_path / "adapter")
    first = transformers.AutoModelForCausalLM.from_pretrained(base)
    before = logits(first)
    merged = PeftModel.from_pretrained(first, tmp_path / "adapter").merge_and_unload()
    found = dict(opened.module.named_parameters())
    for name, value in merged.named_parameters():
        # two roundings of the product, one of the sum
        torch.testing.assert_close(
            found[name], value, rtol=3 * 2**-24, atol=4 * 2**-24 * float(value.detach().abs().max())
        )
    assert not torch.allclose(logits(merged), before, rtol=1e-2)
    base_model = transformers.AutoModelForCausalLM.from_pretrained(base)
    beside = Generator(base_model, adapters={"own": checkpoint.read_adapter(folder)})
    [[found], [plain]] = beside.generate([[1, 2, 3]] * 2, sampling=GREEDY, adapters=["own", None])
    [[wanted]] = Generator(opened.module).generate([[1, 2, 3]], sampling=GREEDY)
    assert found.tokens == wanted.tokens and torch.equal(found.logprobs, wanted.logprobs)
    assert not torch.equal(plain.logprobs, wanted.logprobs)


def test_a_run_that_learnt_chats_answers_them_and_ends(run, tmp_path):
    opened = open_model(str(run(*CHAT)))
    assert opened.ends == (3,)
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert bytes(opened.tokenizer.chat(messages)) == b"<|user|>\na\n<|assistant|>\nb\x03<|user|>\nc\n<|assistant|>\n"
    with pytest.raises(ValueError, match="message 1: .* with a role of system, user, assistant"):
        opened.tokenizer.chat([{"role": "robot", "content": "a"}])


def test_a_model_of_rewards_is_refused(run):
    folder = run("task=reward", *CHAT[1:])
    with pytest.raises(ValueError, match="task=reward trained a model of rewards, which writes no text"):
        open_model(str(folder))


def test_the_base_of_a_run_must_still_be_there(run, tmp_path):
    base = saved(tmp_path, family="GPT2")
    folder = run(*HF, f"model.path={base}")
    shutil.rmtree(base)
    with pytest.raises(ValueError, match="model.path=.*: no configuration that transformers can read"):
        open_model(str(folder))
