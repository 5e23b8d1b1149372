"""`task=eval` with the training engine: when it is used, on which model, and its rules."""

from collections.abc import Iterator
from pathlib import Path

from ztk.config.keys import read
from ztk.config.other_models import model_of_folder
from ztk.config.record import load
from ztk.config.topology import cut_degrees
from ztk.core.policies.config import Config
from ztk.core.policies.data import DataName
from ztk.core.policies.evaluation import EvalEngine
from ztk.core.policies.inference import WeightFormat
from ztk.core.policies.key import written
from ztk.core.policies.machine import Machine
from ztk.core.policies.model import ModelConfig
from ztk.core.policies.pipeline import ScheduleName
from ztk.core.policies.precision import DType, PrecisionConfig
from ztk.core.policies.records import run_record
from ztk.core.policies.runs import by_training, is_own
from ztk.core.policies.tier import Tier
from ztk.core.policies.topology import TopologyConfig

USUAL_WINDOW = 2048  # most tokens per sequence if eval.seq_len is not set
_SECTIONS = ("zero", "topology")
_KEYS = ("precision", "precision.dtype")
_NO_GRADIENTS = ("zero.quantized_gradients", "topology.max_local_gradients", "offload.optimizer")


def choose_engine(config: Config, *, machine: Machine) -> None:
    """Settles `eval.engine`, unless the user set it.

    The training engine is used if the user chose a stage, a precision, or a layout that the inference engine does not support.
    """
    if config.task.name != "eval" or config.eval.engine is not None:
        return
    ranks = machine.started_ranks or config.launch.ranks or config.topology.tensor
    needs = cut_degrees(config.topology).keys() - {"tensor"}
    chosen = any(key.partition(".")[0] in ("zero", "precision") for key in config.given)
    more = ranks > max(1, config.topology.tensor) or (config.topology.data or 1) > 1
    config.eval.engine = EvalEngine.training if needs or chosen or more else EvalEngine.inference


def take_evaluated(config: Config) -> list[str]:
    """Sets `model` to the model of `inference.model`, so that the layout rules apply to it, if the training engine evaluates.

    The precision becomes fp32, unless the user chose one. Returns one line per fault.
    """
    if not by_training(config) or config.inference.model is None:
        return []
    folder = Path(config.inference.model).expanduser()
    if not folder.is_dir():
        return []  # reported by its declaration
    try:
        config.model = _model_of(folder)
    except (ImportError, ValueError) as error:
        return [str(error)]
    if not any(key == "precision" or key.startswith("precision.") for key in config.given):
        config.precision = PrecisionConfig(dtype=DType.fp32)
    config.data.name, config.data.tokenizer = (
        DataName.synthetic,
        None,
    )  # the texts come from eval.path and eval.choices
    config.data.seq_len = usual_window(config)
    config.train.accumulation_steps = config.topology.pipeline  # enough micro-batches to fill a pipeline
    return []


def usual_window(config: Config) -> int:
    """Returns the largest number of tokens in a micro-batch.

    This is `eval.seq_len` or `USUAL_WINDOW`, rounded to a multiple for the ranks of a sequence and limited by the model.
    """
    multiple = multiple_of(config.topology)
    wanted = -(-(config.eval.seq_len or USUAL_WINDOW) // multiple) * multiple
    return max(multiple, min(wanted, config.model.max_seq_len // multiple * multiple))


def multiple_of(topology: TopologyConfig) -> int:
    """Returns the number that must divide sequence lengths, so that ranks can share a sequence."""
    chunks = 2 if topology.context > 1 else 1
    return chunks * topology.sequence_ranks * (topology.tensor if topology.sequence_parallel else 1)


def is_of_training(key: str) -> bool:
    """Returns whether a training key or group also affects a forward-only model."""
    return key in _KEYS or key.partition(".")[0] in _SECTIONS


def evaluating_faults(config: Config) -> Iterator[str]:
    """Yields one line, with its fix, per choice without effect on a forward-only model."""
    for key in sorted(config.given.intersection(_NO_GRADIENTS)):
        yield f"{key}={written(read(config, key=key))} has no effect with task=eval, which computes no gradient: leave it out"
    weights = config.inference.weights
    if weights not in (None, WeightFormat.stored):
        yield (
            f"weights={written(weights)} is a format of the inference engine, and eval.engine=training computes with precision=; leave it out, "
            "or leave out zero=, precision= and all of topology= but topology.tensor"
        )
    tier, stage = config.offload.optimizer, config.zero.stage
    if tier is not Tier.none and stage != 3:
        yield (
            f"offload={tier.value} with zero=stage{stage}: without gradients there are parameters alone, which leave the device where they are "
            f"sharded; use zero=stage3, or offload=none"
        )
    schedule = config.topology.schedule
    if "topology.schedule" in config.given and schedule is not ScheduleName.interleaved:
        yield f"topology.schedule={written(schedule)} orders backwards, and task=eval has none: leave it out"


def _model_of(folder: Path) -> ModelConfig:
    """Returns the model in a run folder, a checkpoint or a transformers folder. Raises ValueError if there is none."""
    from ztk.inference.packed import MANIFEST  # imported late: it imports torch

    if (folder / MANIFEST).is_file():
        raise ValueError(
            f"inference.model={folder}: has packed weights, which the inference engine alone reads; name the model itself, or leave out zero=, "
            "precision= and all of topology= but topology.tensor"
        )
    if (folder / "config.json").is_file():
        return model_of_folder(folder, kernels=False, key="inference.model")
    run = _record_of(folder)
    if run.task.name == "reward":
        raise ValueError(
            f"inference.model={folder}: task=reward trained a model of rewards, which writes no text; name another run"
        )
    if is_own(run, section="model"):
        raise ValueError(
            f"inference.model={folder}: its model is {run.model.name} (model._target_), and reading a record runs no code; build the model in "
            "a script and fill it with ztk.checkpoint.load"
        )
    return run.model


def _record_of(folder: Path) -> Config:
    """Returns the recorded configuration of a run, found by its folder or one of its checkpoints. Raises ValueError if there is none."""
    record = run_record(folder)
    if record is None:
        raise ValueError(
            f"inference.model={folder}: is neither a run folder, nor a checkpoint below one, nor a folder with a config.json; name one of them"
        )
    return load(record)
