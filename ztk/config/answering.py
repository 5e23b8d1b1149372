"""Rules of `task=generate`, `task=serve` and `task=eval`, which do not train.

The inference engine supports tensor parallelism only. `evaluating.py` has the rules for `task=eval` with the training engine.
"""

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ztk.config.evaluating import evaluating_faults, is_of_training
from ztk.config.keys import read
from ztk.config.other_models import gives_rewards
from ztk.config.topology import cut_degrees
from ztk.core.policies.config import Config
from ztk.core.policies.inference import device_faults
from ztk.core.policies.key import written
from ztk.core.policies.launch import DeviceName
from ztk.core.policies.machine import Machine
from ztk.core.policies.runs import ANSWERING, by_training, device_of
from ztk.core.policies.train import LoggerMode

_SECTIONS = (
    *("task", "inference", "sampling", "serve", "eval", "weights"),
    *("kernels", "launch", "experiment", "sweep", "hydra", "offload"),
)
_CUT = ("topology", "topology.tensor")  # for more than one rank
_TRAINING_TIERS = ("offload.optimizer", "offload.parameters", "offload.pin_memory")

_SERVER = ("starlette", "uvicorn", "prometheus_client")  # packages of the server
_OF_TEXT = ("inference.", "sampling.", "offload.", "topology.", "serve.weights_path", "serve.tool_parser")


def answering_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields one line per fault, with its fix."""
    if config.task.name not in ANSWERING:
        return
    task = f"task={config.task.name}"
    does = "scores texts" if config.task.name == "eval" else "answers prompts"
    is_cut, trains = config.topology.tensor > 1, by_training(config)
    for key in sorted(config.given):
        section = key.partition(".")[0]
        if section == "logger" and config.logger.mode is LoggerMode.disabled:
            continue  # as it is anyway
        if section not in _SECTIONS and not (is_cut and key in _CUT) and not (trains and is_of_training(key)):
            value = f"={written(read(config, key=key))}" if "." in key else ""
            yield f"{key}{value} has no effect with {task}, which {does} and trains nothing: leave it out"
    if config.task.name == "eval" and config.eval.path is None and config.eval.choices is None:
        yield "task=eval: nothing is to be scored; name held-out text with eval.path=FILE, or questions with eval.choices=FILE.jsonl"
    if trains:
        yield from evaluating_faults(config)
        return
    if config.task.name == "serve" and (missing := [name for name in _SERVER if find_spec(name) is None]):
        yield f'task=serve: needs {" and ".join(missing)}: pip install "ztk[serve]"'
    ranks = machine.started_ranks or config.launch.ranks or config.topology.tensor
    if ranks != max(1, config.topology.tensor):
        yield (
            f"launch.ranks={ranks}: {task} runs on topology.tensor={config.topology.tensor} ranks; leave it out, or use "
            f"topology.tensor={ranks}, which cuts each layer over them"
        )
    for degree, value in cut_degrees(config.topology).items():
        if is_cut and degree != "tensor":
            yield f"topology.{degree}={value}: {task} cuts layers between ranks, and nothing else; use topology.tensor alone"
    if _is_packed(config):
        yield from _packed_faults(config)
    yield from _device_faults(config, machine=machine)
    yield from _offload_faults(config, task=task)
    yield from _own_module_faults(config, machine=machine)
    if config.task.name == "serve" and gives_rewards(config.inference.model):
        yield from _score_faults(config)


def _score_faults(config: Config) -> Iterator[str]:
    """Options of models that write text, which a reward model does not have."""
    for key in sorted(config.given):
        if key.startswith(_OF_TEXT) and key != "inference.model":
            yield (
                f"{key}={written(read(config, key=key))} has no effect with inference.model={config.inference.model}, a reward model: leave it "
                "out"
            )


def _device_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """More ranks than GPUs are refused where a GPU would stay idle, unless the CPU was chosen."""
    device, ranks = config.launch.device, config.topology.tensor
    if device is not DeviceName.cpu and ranks > machine.gpus > 0:
        yield (
            f"topology.tensor={ranks} with {machine.gpus} GPU{'s' * (machine.gpus > 1)}: each rank needs its own; add launch.device=cpu, "
            f"or leave topology.tensor={ranks} out"
        )
        return
    yield from device_faults(config.inference, device=device_of(config, machine=machine), tier=config.offload.optimizer)


def _offload_faults(config: Config, *, task: str) -> Iterator[str]:
    for key in sorted(config.given.intersection(_TRAINING_TIERS)):
        yield (
            f"{key}={written(read(config, key=key))} has no effect with {task}, which offloads weights alone: use offload=nvme, or leave it out"
        )


def _own_module_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Faults of a transformers model outside the families that the engine implements itself."""
    if config.topology.tensor == 1 or device_of(config, machine=machine) == "cpu":
        return
    file = Path(config.inference.model or "", "config.json").expanduser()
    if config.inference.model is None or not file.is_file():
        return
    from ztk.inference.describe import FAMILIES  # imported late: it imports torch

    kind = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    if kind is None or kind in FAMILIES:
        return
    yield (
        f"inference.model={config.inference.model} (model_type={kind}) runs its own modules, which ranks share on the CPU alone: use "
        f"launch.device=cpu, or leave topology.tensor={config.topology.tensor} out"
    )


def _packed_faults(config: Config) -> Iterator[str]:
    """Yields faults of a folder with packed weights, which are final and read where they are."""
    inference, model = config.inference, f"inference.model={config.inference.model}"
    if config.topology.tensor > 1:
        yield (
            f"{model} with topology.tensor={config.topology.tensor}: packed folders have full layers; name the model that was packed, of which "
            "each rank packs its part"
        )
    if "offload.nvme_path" in config.given:
        yield (
            f"offload.nvme_path={config.offload.nvme_path} has no effect with {model}, which is packed and read where it is: leave it out"
        )
    if inference.adapters:
        names = ", ".join(map(str, inference.adapters))
        yield f"inference.adapters={{{names}}} with {model}, whose packed weights are final: name the model that was packed"
    if inference.calibration is not None:
        yield (
            f"inference.calibration={inference.calibration} with {model}, whose packed weights are final: pack the model with python -m "
            "ztk.serve pack --calibration FILE, or leave it out"
        )


def _is_packed(config: Config) -> bool:
    """Returns whether the model's folder has packed weights."""
    if config.inference.model is None:
        return False
    from ztk.inference.packed import MANIFEST  # imported late: it imports torch

    return Path(config.inference.model, MANIFEST).expanduser().is_file()
