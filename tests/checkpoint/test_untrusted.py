"""Reading a checkpoint, a model's folder or a run's record never runs code that is in it."""

import ast
import base64
import builtins
import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ztk
from tests.rl.align.chats import save_tokenizer, train_tokenizer
from ztk.checkpoint import CheckpointError
from ztk.checkpoint.convert import import_checkpoint
from ztk.config import load as load_config
from ztk.config.evaluating import _record_of
from ztk.deepspeed.saved.checkpoints import _decode
from ztk.deepspeed.saved.files import TorchCheckpointEngine
from ztk.deepspeed.serving.weights import load_weights
from ztk.deepspeed.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from ztk.hf.causal import open_causal, read_config
from ztk.report.history import _configuration
from ztk.rl.align import ChatTemplate
from ztk.rl.align.templates import ChatTemplateError
from ztk.serve.models import folder_module, with_tokenizer

DEEPSPEED = Path(__file__).parent / "data" / "deepspeed" / "stage2"
REFUSED = (CheckpointError, ChatTemplateError, ValueError)
BY_OTHERS = (pickle.UnpicklingError, RuntimeError)  # torch.load behind an interface of DeepSpeed or transformers


class Pickled:
    """Makes the folder `witness` when it is unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (str(self.witness),)


class Scripted(nn.Module):
    """Writes the file `witness` when `torch.jit.load` reads it."""

    def __init__(self, witness: str) -> None:
        super().__init__()
        self.witness = witness
        self.weight = nn.Parameter(torch.zeros(2))

    @torch.jit.export
    def __getstate__(self):
        return self.weight, self.witness, self.training

    @torch.jit.export
    def __setstate__(self, state: tuple[torch.Tensor, str, bool]):
        self.weight = state[0]
        self.witness = state[1]
        self.training = state[2]
        torch.save(state[0], state[1])

    def forward(self, x):
        return x


def pickled(file: Path, *, witness: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2)}, "optimizer_state_dict": Pickled(witness)}, file)


def pickled_without_zip(file: Path, *, witness: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2)}, "x": Pickled(witness)}, file, _use_new_zipfile_serialization=False)


def plain(file: Path, *, witness: Path) -> None:
    file.write_bytes(pickle.dumps(Pickled(witness)))


def scripted(file: Path, *, witness: Path) -> None:
    torch.jit.save(torch.jit.script(Scripted(str(witness))), str(file))
    witness.unlink(missing_ok=True)


def test_the_payloads_run_without_the_checks(tmp_path):
    witness = tmp_path / "witness"
    for payload in (pickled, pickled_without_zip, scripted):
        payload(tmp_path / "file.pt", witness=witness)
        with pytest.warns(UserWarning, match="TorchScript") if payload is scripted else open(os.devnull):
            torch.load(tmp_path / "file.pt", weights_only=False)
        witness.unlink() if payload is scripted else witness.rmdir()


def _import_file(file: Path) -> None:
    import_checkpoint(file, to=file.parent / "in")


def _in_deepspeed(file: Path, *, names: str) -> Path:
    """A checkpoint of DeepSpeed whose files `names` are `file`."""
    folder = file.parent / "deepspeed"
    shutil.copytree(DEEPSPEED, folder)
    for other in (folder / "global_step3").glob(names):
        shutil.copy(file, other)
    return folder


def _import_model_states(file: Path) -> None:
    import_checkpoint(_in_deepspeed(file, names="*_model_states.pt"), to=file.parent / "in")


def _import_optim_states(file: Path) -> None:
    import_checkpoint(_in_deepspeed(file, names="*_optim_states.pt"), to=file.parent / "in")


def _zero_to_fp32(file: Path) -> None:
    get_fp32_state_dict_from_zero_checkpoint(_in_deepspeed(file, names="*_model_states.pt"))


def _import_metadata(file: Path) -> None:
    folder = file.parent / "dcp"
    folder.mkdir()
    shutil.copy(file, folder / ".metadata")
    (folder / "__0_0.distcp").write_bytes(b"")
    import_checkpoint(folder, to=file.parent / "in")


def _import_data(file: Path) -> None:
    """A folder of torch.distributed.checkpoint whose tensor is the file."""
    from torch.distributed import checkpoint as dcp

    folder = file.parent / "dcp"
    dcp.save({"model.w": torch.zeros(2)}, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, file.stat().st_size
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    shutil.copy(file, folder / "__0_0.distcp")
    import_checkpoint(folder, to=file.parent / "in")


def _init_inference(file: Path) -> None:
    load_weights(nn.Linear(2, 2), checkpoint=str(file))


def _init_inference_list(file: Path) -> None:
    load_weights(nn.Linear(2, 2), checkpoint={"checkpoints": [str(file)], "type": "Megatron"})


def _checkpoint_engine(file: Path) -> None:
    TorchCheckpointEngine().load(file)


def _client_state(file: Path) -> None:
    _decode(base64.b64encode(file.read_bytes()).decode())


def _config_of(file: Path, **more) -> Path:
    """A folder of transformers next to `file`."""
    import transformers

    folder = file.parent / "model"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.LlamaConfig(vocab_size=270, **sizes).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text()) | {"architectures": ["LlamaForCausalLM"]} | more
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def _transformers_bin(file: Path) -> None:
    folder = _config_of(file)
    shutil.copy(file, folder / "pytorch_model.bin")
    folder_module(folder)


FILE_READERS = [
    _import_file,
    _import_model_states,
    _import_optim_states,
    _zero_to_fp32,
    _import_metadata,
    _import_data,
    _init_inference,
    _init_inference_list,
    _checkpoint_engine,
    _client_state,
    _transformers_bin,
]


@pytest.mark.parametrize("payload", [pickled, pickled_without_zip, plain, scripted])
@pytest.mark.parametrize("read", FILE_READERS)
def test_no_code_of_a_file_runs(tmp_path, read: Callable, payload: Callable):
    witness = tmp_path / "witness"
    payload(tmp_path / "file.pt", witness=witness)
    with pytest.raises(BY_OTHERS if read in (_checkpoint_engine, _transformers_bin) else REFUSED) as caught:
        read(tmp_path / "file.pt")
    assert read in (_checkpoint_engine, _transformers_bin) or "weights_only" not in str(caught.value), "torch's advice"
    assert not witness.exists()


# Folders that name code of their own


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a tokenizer and a model class in its own module. The prompt for permission to run the module is answered with yes."""
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    autos = {"AutoConfig": "code.Own", "AutoModelForCausalLM": "code.Own", "AutoTokenizer": ["code.Own", "code.Own"]}
    path = _config_of(tmp_path / "file", model_type="own", auto_map=autos)
    train_tokenizer().save_pretrained(path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": autos["AutoTokenizer"]}, "tokenizer_class": "Own"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "code.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'witness')!r})\n\nclass Own:\n    pass\n")
    (path / "custom_generate").mkdir()
    (path / "custom_generate" / "generate.py").write_text((path / "code.py").read_text())
    return path


FOLDER_READERS = {
    "configuration": lambda folder: read_config(str(folder)),
    "model": folder_module,
    "tokenizer": lambda folder: with_tokenizer(folder, module=nn.Linear(2, 2)),
    "template": ChatTemplate.open,
    "training": lambda folder: open_causal(str(folder), init="random", seed=0),
}


@pytest.mark.parametrize("name", FOLDER_READERS)
def test_no_code_of_a_models_folder_runs(tmp_path, folder, name):
    with pytest.raises(REFUSED):
        FOLDER_READERS[name](folder)
    assert not (tmp_path / "witness").exists()


def test_no_code_of_a_known_models_folder_runs(tmp_path, folder):
    """transformers has a class for the configuration, and the folder names another one."""
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"model_type": "llama"}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("auto_map")
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    model, _ = open_causal(str(folder), init="random", seed=0)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not (tmp_path / "witness").exists()


def test_a_chat_template_reaches_nothing(tmp_path):
    witness = tmp_path / "witness"
    template = "{{ cycler.__init__.__globals__.os.mkdir('" + str(witness) + "') }}"
    path = save_tokenizer(train_tokenizer(), path=tmp_path / "tokenizer", template=template)
    with pytest.raises(ValueError, match="refuses the messages"):
        ChatTemplate.open(path).prompt([{"role": "user", "content": "a"}])
    assert not witness.exists()


@pytest.mark.parametrize(
    "read",
    [lambda folder: load_config(folder / "config.yaml"), _record_of, _configuration],
    ids=["run", "eval", "report"],
)
def test_no_code_of_a_runs_record_runs(tmp_path, read):
    (tmp_path / "config.yaml").write_text(f"task: !!python/object/apply:os.mkdir ['{tmp_path / 'witness'}']\n")
    with pytest.raises(Exception, match="could not determine a constructor for the tag"):
        read(tmp_path)
    assert not (tmp_path / "witness").exists()


# All readers are above


READERS_OF_CODE = {
    "ztk/checkpoint/deepspeed.py": {"torch.load"},  # by an unpickler that makes tensors and containers alone
    "ztk/core/runtime/comm/comm.py": {"pickle.loads"},  # objects that the ranks of one run send each other
}


def test_every_reader_of_pickles_and_of_named_classes_refuses_code():
    root = Path(ztk.__file__).parent
    found: dict[str, set[str]] = {}
    for path in [*root.rglob("*.py"), *root.parent.joinpath("experiments").rglob("*.py")]:
        for call in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)):
            name = ast.unparse(call.func)
            given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
            is_open = (
                (name == "torch.load" and given.get("weights_only") != "True")
                or name in ("pickle.load", "pickle.loads", "torch.jit.load", "yaml.load", "yaml.unsafe_load")
                or given.get("allow_pickle", "False") != "False"
                or (re.fullmatch(r"(.*\.)?Auto\w+\.from_\w+", name) and given.get("trust_remote_code") != "False")
            )
            if is_open:
                found.setdefault(str(path.relative_to(root.parent)), set()).add(name)
    assert found == READERS_OF_CODE
