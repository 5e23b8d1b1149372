"""`checkpoint`: weights out of folders, files and lists of files."""

import json

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import ztk.deepspeed as deepspeed
from tests.deepspeed.serving import small


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return small.llama(nudged=False)


def test_a_folder_of_save_pretrained_fills_a_model_on_the_meta_device(tmp_path):
    """Buffers that no file holds (rotary frequencies) included."""
    model = small.llama()
    model.save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    engine = deepspeed.init_inference(on_meta(), dtype="fp32", checkpoint=str(tmp_path / "llama"))
    assert torch.equal(small.answer(engine, small.prompts()), small.answer(model, small.prompts()))


def test_a_folder_under_base_dir_replaces_the_weights_of_a_model(tmp_path):
    model = small.gpt2()  # its head is its embedding
    model.save_pretrained(tmp_path / "gpt2")
    other = small.gpt2()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    engine = deepspeed.init_inference(other, dtype="fp32", checkpoint="gpt2", base_dir=str(tmp_path))
    assert torch.equal(small.answer(engine, small.prompts()), small.answer(model, small.prompts()))


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


def saved(folder) -> dict[str, torch.Tensor]:
    """In two files, one of each kind."""
    torch.manual_seed(5)
    state = {name: torch.randn(value.shape) for name, value in layers().state_dict().items()}
    save_file({name: value for name, value in state.items() if name.startswith("0")}, folder / "a.safetensors")
    torch.save({"module": {name: value for name, value in state.items() if name.startswith("1")}}, folder / "b.pt")
    return state


@pytest.mark.parametrize("as_file", [False, True])
@pytest.mark.parametrize("model", [layers, lambda: layers().to("meta")], ids=["cpu", "meta"])
def test_deepspeeds_list_of_files(tmp_path, as_file, model):
    state = saved(tmp_path)
    listed = {"type": "ds_model", "version": 1.0, "checkpoints": ["a.safetensors", "b.pt"]}
    (tmp_path / "list.json").write_text(json.dumps(listed))
    checkpoint = str(tmp_path / "list.json") if as_file else listed | {"base_dir": str(tmp_path)}
    engine = deepspeed.init_inference(model(), dtype="fp32", checkpoint=checkpoint)
    assert all(torch.equal(value, state[name]) for name, value in engine.module.state_dict().items())


def test_a_folder_of_save_checkpoint(tmp_path):
    """A model saved by training, with a world of one, answers."""
    torch.manual_seed(0)
    trained = layers()
    config = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=trained, config=config)
    engine.backward(engine(torch.randn(2, 4)).square().sum())
    engine.step()
    expected = {name: value.clone() for name, value in engine.module_state_dict().items()}
    engine.save_checkpoint(str(tmp_path))
    engine.destroy()
    found = deepspeed.init_inference(layers(), dtype="fp32", checkpoint=str(tmp_path)).module.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_what_does_not_fit_is_refused(tmp_path):
    saved(tmp_path)
    deep = nn.Sequential(*layers(), nn.Linear(4, 4))
    both, base = ["a.safetensors", "b.pt"], {"base_dir": str(tmp_path)}
    cases = [
        (deep, {"checkpoints": both, **base}, "2.weight is in none of the files"),
        (layers()[:1], {"checkpoints": both, **base}, "1.weight is no parameter of Sequential"),
        (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)), {"checkpoints": both, **base}, r"0.weight is \(4, 4\)"),
        (layers(), {"checkpoints": ["c.pt"], **base}, "there is no file"),
        (layers(), {"checkpoints": {"tp": both}, **base}, "give files with full ones"),
        (layers(), {"chekpoints": both}, "there is no such key"),
        (layers(), str(tmp_path / "nowhere"), "no such folder"),
        (on_meta(), str(tmp_path / "a.safetensors"), "in no file of weights"),
    ]
    for model, checkpoint, message in cases:
        with pytest.raises(ValueError, match=message):
            deepspeed.init_inference(model, dtype="fp32", checkpoint=checkpoint)
