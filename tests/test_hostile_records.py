"""A record is data: no reader imports or calls anything that a record names. Every record here would leave a witness, and so would Hydra."""

import contextlib
import json
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra

from tests.checkpoint.test_untrusted import Pickled
from tests.commands import run_command
from tests.config.test_config import CPU
from tests.rl.align.chats import save_tokenizer, train_tokenizer
from ztk.checkpoint.__main__ import main as checkpoint_command
from ztk.checkpoint.adapters import read_adapter
from ztk.cli import sweeper
from ztk.cli.jobs import Outcome
from ztk.cli.session import Session, run
from ztk.config import check_resumed, compose, config_with, load, save
from ztk.experiments.evaluation_engine import open_frozen
from ztk.report import history
from ztk.report.__main__ import main as report_command
from ztk.serve.models import open_model
from ztk.serve.packing import opened_unread

SECRET = "4f1d7c"
TRAIN = ("model=nano", "train.steps=1", "launch.ranks=1", "train.quick=true", "logger=disabled", "data=synthetic")
ATTACK = """
import os
os.mkdir(os.environ["ZTK_WITNESS"])


def score(*given, **more):
    return [0.0]


class Net(dict):
    pass


def main(config):
    pass
"""
TEMPLATE = "{{ cycler.__init__.__globals__.os.mkdir(cycler.__init__.__globals__.os.environ['ZTK_WITNESS']) }}"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("trained")
    done = run_command(*TRAIN, f"hydra.run.dir={folder}/run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def hostile(trained, tmp_path, monkeypatch):
    """A copy of the run, in a folder from which `attack` can be imported. `ZTK_WITNESS` is the folder that any of its code makes."""
    (tmp_path / "attack.py").write_text(ATTACK)
    monkeypatch.setenv("ZTK_WITNESS", str(tmp_path / "witness"))
    monkeypatch.setenv("ZTK_SECRET", SECRET)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # a command of this process adds to it
    monkeypatch.setattr(sweeper, "plan_jobs", lambda configs, *, hardware: {})  # another process, of the same words
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    sys.modules.pop("attack", None)
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def words(**given: str) -> Callable[[Path], None]:
    """Adds words to the recorded command line; `__` is a dot."""

    def write(folder: Path) -> None:
        file = folder / "overrides.json"
        named = {
            key.replace("__", ".").replace("hydra.callbacks", "+hydra.callbacks"): value for key, value in given.items()
        }
        file.write_text(json.dumps(json.loads(file.read_text()) | named))

    return write


def record(**given) -> Callable[[Path], None]:
    """Replaces sections of config.yaml."""

    def write(folder: Path) -> None:
        file = folder / "config.yaml"
        file.write_text(yaml.safe_dump(yaml.safe_load(file.read_text()) | given))

    return write


def text(line: str) -> Callable[[Path], None]:
    """Adds a line of YAML to config.yaml."""

    def write(folder: Path) -> None:
        file = folder / "config.yaml"
        file.write_text(file.read_text() + line.replace("WITNESS", str(folder.parent / "witness")) + "\n")

    return write


def _bomb(*, merges: bool) -> str:
    """Ten lines of YAML with 10^9 values in them."""
    line = "{{<<: [{}]}}" if merges else "[{}]"
    rows = ["a0: &a0 {x: 1}", *(f"a{n}: &a{n} {line.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, 10))]
    return "user:\n" + "\n".join(f"  {row}" for row in rows)


@pytest.mark.parametrize(
    "bomb", [_bomb(merges=False), _bomb(merges=True), "user: &a {a: *a}", f"user: {'[' * 5000}{']' * 5000}"]
)
def test_a_record_that_would_fill_the_memory_is_refused(bomb, tmp_path):
    (tmp_path / "config.yaml").write_text(f"{bomb}\n")
    (tmp_path / "summary.json").write_text("{}")
    for read in (load, history.load):
        with pytest.raises(ValueError, match="is no record of a run") as raised:
            read(tmp_path / "config.yaml" if read is load else tmp_path)
        assert len(str(raised.value)) < 1000


def _tokenizer(folder: Path) -> None:
    path = save_tokenizer(train_tokenizer(), path=folder / "tokenizer", template=TEMPLATE)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["attack.Net", "attack.Net"]}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(folder.parent / "attack.py", path)
    data = yaml.safe_load((folder / "config.yaml").read_text())["data"]
    record(data=data | {"tokenizer": str(path), "chat_template": "tokenizer"})(folder)


def _model_folder(folder: Path) -> None:
    """The recorded model is a folder with classes of its own."""
    base = folder.parent / "base"
    base.mkdir()
    shutil.copy(folder.parent / "attack.py", base)
    autos = {"AutoConfig": "attack.Net", "AutoModelForCausalLM": "attack.Net"}
    (base / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": autos}))
    model = yaml.safe_load((folder / "config.yaml").read_text())["model"]
    record(model=model | {"path": str(base), "name": "hf", "init": "pretrained"})(folder)
    words(model="hf", model__path=str(base))(folder)


def _pickled_weights(folder: Path) -> None:
    [file] = folder.glob("checkpoints/step-*/rank-00000.safetensors")
    file.write_bytes(pickle.dumps(Pickled(folder.parent / "witness")))


def _manifest(folder: Path) -> None:
    """An adapter whose configuration names a module."""
    [file] = folder.glob("checkpoints/step-*/manifest.json")
    values = json.loads(file.read_text())
    mapping = {"base_model_class": "Net", "parent_library": "attack"}
    values["extra"] = {"adapters": {"default": {"peft_type": "LORA", "auto_mapping": mapping}}}
    file.write_text(json.dumps(values))
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "auto_mapping": mapping}))


def _modules(folder: Path) -> None:
    """Modules with the names of ztk's own."""
    for name in ("sitecustomize.py", "experiments/pretrain.py", "hydra_plugins/attack.py", "conf/config.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(ATTACK)


NODE = {"_target_": "attack.Net"}
RECORDS = {
    "model": words(model___target_="attack.Net"),
    "callback": words(callbacks__x___target_="attack.Net"),
    "module": words(task__module="attack"),
    "task": words(task___target_="attack.main"),
    "nested": words(optimizer___target_="torch.optim.AdamW", optimizer__lr="{_target_:attack.score}"),
    "built-in": words(data___target_="os.mkdir", data__path="${oc.env:ZTK_WITNESS}"),
    "eval": words(scheduler___target_="builtins.eval", scheduler__source="__import__('attack')"),
    "hub": words(model___target_="torch.hub.load", model__repo_or_dir=".", model__model="Net", model__source="local"),
    "reward": words(task="grpo", reward__function="attack:score"),
    "rewards": words(task="grpo", reward__functions="[attack:score,{function:attack.py:score,weight:2}]"),
    "environment": words(task="grpo", rollout__environment="attack.py:Net"),
    "schema": words(user___schema_="attack.Net"),
    "hydra": words(hydra__callbacks__x___target_="attack.Net"),
    "resolver": words(user__secret="${oc.env:ZTK_SECRET}"),
    "recorded schema": record(user={"_schema_": "attack.Net", "width": 1}),
    "recorded model": record(model=NODE),
    "recorded objects": record(
        callbacks={"x": NODE}, loss=NODE, optimizer=NODE, scheduler=NODE, data=NODE, task={"name": "pretrain"} | NODE
    ),
    "recorded module": record(task={"name": "pretrain", "module": "attack"}),
    "recorded tag": text("user: !!python/object/apply:os.mkdir [WITNESS]"),
    "recorded resolver": record(user={"secret": "${oc.env:ZTK_SECRET}", "plain": "${output_dir}"}),
    "tokenizer": _tokenizer,
    "model folder": _model_folder,
    "pickle": _pickled_weights,
    "manifest": _manifest,
    "modules": _modules,
}


def _resume(folder: Path) -> str:
    config = compose(f"checkpoint.resume={folder}", output_dir=folder.parent / "new", machine=CPU)
    check_resumed(config)
    save(config, path=folder.parent / "new.yaml")
    return (folder.parent / "new.yaml").read_text()


def _compose(*given: str, folder: Path) -> str:
    config = compose(*given, f"inference.model={folder}", output_dir=folder.parent / "new", machine=CPU)
    save(config, path=folder.parent / "new.yaml")
    return (folder.parent / "new.yaml").read_text()


def _generate(folder: Path) -> str:
    text = _compose("task=generate", folder=folder)
    open_model(str(folder)).tokenizer.decode([10])
    return text


def _serve(folder: Path) -> str:
    text = _compose("task=serve", folder=folder)
    with opened_unread(str(folder)) as opened:
        opened.tokenizer.decode([10])
    return text


def _eval(folder: Path) -> str:
    (folder.parent / "text.txt").write_text("text " * 100)
    text = _compose("task=eval", "zero=stage3", f"eval.path={folder.parent}/text.txt", folder=folder)
    open_frozen(str(folder), ema=False)
    return text


def _export(folder: Path) -> str:
    for more in ([], ["--adapter"], ["--own-names"]):
        checkpoint_command(["export", str(folder), str(folder.parent / f"out{len(more)}{more}"), *more])
    with contextlib.suppress(ImportError):
        checkpoint_command(["export", str(folder), str(folder.parent / "out.gguf"), "--format", "gguf"])
    return ""


def _verify(folder: Path) -> str:
    checkpoint_command(["verify", str(folder)])
    checkpoint_command(["show", str(folder)])
    return ""


def _report(folder: Path) -> str:
    report_command(["compare", str(folder)])
    report_command(["html", str(folder), "--to", str(folder.parent / "page.html")])
    page = folder.parent / "page.html"
    return page.read_text() if page.exists() else ""


def _warm_start(folder: Path) -> str:
    given = ("task=sft", "model=nano", "logger=disabled", f"warm_start.path={folder}")
    config = compose(*given, output_dir=folder.parent / "new", machine=CPU)
    config_with(config, path=str(folder), key="warm_start.path")
    read_adapter(str(folder))
    return ""


def _sweep(folder: Path) -> str:
    """A sweep with the words of the record, and, if these are refused, one with a job of these words."""
    given = [f"{key}={value}" for key, value in json.loads((folder / "overrides.json").read_text()).items()]
    job = {"folder": "0" * 12, "hash": "0" * 12, "overrides": given, "repeat": 0, "options": []}
    values = {"command": "", "flags": ["-m"], "grid": {}, "repeats": 1, "repeat_with": "same_seed", "commit": None}
    for number, recorded in enumerate((given, ["train.steps=1"])):
        sweep = folder.parent / f"sweep{number}"
        shutil.copytree(folder, sweep / job["folder"])
        (sweep / "sweep.json").write_text(json.dumps(values | {"jobs": [job], "words": recorded}))
        sys.argv = ["run.py", f"sweep.resume={sweep}", "sweep.list=true"]
        GlobalHydra.instance().clear()
        if run(Session()) != Outcome.refused:
            break
    return ""


READERS = {
    "resume": _resume,
    "generate": _generate,
    "serve": _serve,
    "eval": _eval,
    "export": _export,
    "verify": _verify,
    "report": _report,
    "warm_start": _warm_start,
    "sweep": _sweep,
}
REFUSED = (ValueError, ImportError, OSError)


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", RECORDS)
def test_nothing_that_a_record_names_is_imported_or_called(hostile, name, reader, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py"])
    RECORDS[name](hostile)
    shown = ""
    with contextlib.suppress(*REFUSED):
        shown = READERS[reader](hostile)
    assert not (hostile.parent / "witness").exists() and "attack" not in sys.modules
    assert SECRET not in shown
