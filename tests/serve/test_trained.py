"""Models of runs opened for answers: ztk's decoder, transformers' models, adapters."""

import json
import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.hf.test_causal import saved
from ztk import checkpoint
from ztk.checkpoint import CheckpointError
from ztk.checkpoint.export import export_adapter, export_safetensors
from ztk.checkpoint.gguf.writing import export_gguf
from ztk.config import Machine, compose, save
from ztk.core.runtime import Process
from ztk.experiments import policies
from ztk.hf.causal import open_causal
from ztk.inference import Generator, SamplingParams
from ztk.report import plot
from ztk.serve.models import open_model
from ztk.serve.packing import opened_unread

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
    (Path(base) / "generation_config.json").write_text(json.dumps({"max_new_tokens": 7, "do_sample": False}))
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
    _check_merged_exports(folder, merged=merged, family=family, to=tmp_path)
    base_model = transformers.AutoModelForCausalLM.from_pretrained(base)
    beside = Generator(base_model, adapters={"own": checkpoint.read_adapter(folder)})
    [[found], [plain]] = beside.generate([[1, 2, 3]] * 2, sampling=GREEDY, adapters=["own", None])
    [[wanted]] = Generator(opened.module).generate([[1, 2, 3]], sampling=GREEDY)
    assert found.tokens == wanted.tokens and torch.equal(found.logprobs, wanted.logprobs)
    assert not torch.equal(plain.logprobs, wanted.logprobs)


def _check_merged_exports(folder, *, merged, family: str, to) -> None:
    """The base, which the checkpoint leaves out, is read from the folder that the run has recorded."""
    assert checkpoint.leaves_out_base(folder)
    export_safetensors(folder, to=to / "merged")
    exported, info = transformers.AutoModelForCausalLM.from_pretrained(to / "merged", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    torch.testing.assert_close(logits(exported), logits(merged), rtol=1e-5, atol=1e-5)
    found = json.loads((to / "merged" / "generation_config.json").read_text())
    assert found["max_new_tokens"] == 7 and "adapters" not in json.loads((to / "merged" / "config.json").read_text())
    if family == "Llama":
        export_gguf(folder, to=to / "merged.gguf", kind="F32")
        read = transformers.AutoModelForCausalLM.from_pretrained(to, gguf_file="merged.gguf")
        torch.testing.assert_close(logits(read), logits(merged), rtol=1e-5, atol=1e-5)


def in_one_file(tmp_path) -> Path:
    """A folder of a Llama with one safetensors file."""
    model = transformers.AutoModelForCausalLM.from_pretrained(saved(tmp_path, family="Llama"))
    model.save_pretrained(tmp_path / "single")
    return tmp_path / "single"


def test_a_merged_export_needs_the_base_of_the_run(run, tmp_path):
    base = in_one_file(tmp_path)
    folder = run(*HF, f"model.path={base}", "lora=adapter", "lora.rank=2")
    weights = load_file(base / "model.safetensors")
    save_file({name: value for name, value in weights.items() if "norm" not in name}, base / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"the base .* lacks model\..*norm.* it is another model, or use --adapter"
    ):
        export_safetensors(folder, to=tmp_path / "exported")
    (base / "model.safetensors").unlink()
    for export in (export_safetensors, export_gguf):
        with pytest.raises(CheckpointError, match="is no folder with safetensors files: copy the base there"):
            export(folder, to=tmp_path / "exported")
    with pytest.raises(CheckpointError, match="lacks .* frozen ones .* export it merged"):
        export_safetensors(folder, to=tmp_path / "exported", own_names=True)
    assert not (tmp_path / "exported").exists()


def _served(base: Path) -> None:
    with opened_unread(str(base)):
        pass


def _trained(base: Path) -> None:
    open_causal(str(base), init="pretrained", seed=0)


READERS = (lambda base: open_model(str(base)), _served, _trained)


def test_an_embedding_of_other_rows_than_the_configuration_is_refused(tmp_path):
    base = in_one_file(tmp_path)
    weights = load_file(base / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    save_file(
        weights | {"model.embed_tokens.weight": torch.cat([embedding, embedding[:8]])},
        base / "model.safetensors",
        metadata={"format": "pt"},
    )
    rows = len(embedding)
    for read, key in zip(READERS, ("inference.model", "inference.model", "model.path"), strict=True):
        with pytest.raises(
            ValueError,
            match=rf"{key}=.*embed_tokens.weight has the shape \[{rows + 8}, .* and \[{rows}, .* vocab_size",
        ):
            read(base)


@pytest.mark.parametrize("value", ["kernels-community/flash-attn", {"": "someone/attention"}])
@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "experts_implementation"])
def test_code_of_the_hub_in_a_configuration_is_refused(key, value, tmp_path):
    base = in_one_file(tmp_path)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {key: value}))
    for read in READERS:
        with pytest.raises(ValueError, match=f"its config.json has {key}=.*/.*, code on the Hugging Face hub"):
            read(base)


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
