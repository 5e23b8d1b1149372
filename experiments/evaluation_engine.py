"""Runs the model of `task=eval` with the training engine, in any layout, ZeRO stage and tier. It never trains.

Every rank reads only its own ranges of the weights. All parameters are frozen, so there are neither gradients nor optimizer states.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ztk import checkpoint
from ztk.checkpoint.values import CheckpointValues
from ztk.config import Config
from ztk.config.evaluating import multiple_of, usual_window
from ztk.core.policies.model import ModelInit
from ztk.core.policies.runs import is_hugging_face
from ztk.core.runtime import Process
from ztk.core.runtime.part import InitialValues
from ztk.experiments import policies
from ztk.experiments.pretrain import build_model
from ztk.experiments.ranks import started
from ztk.hf.causal import open_causal
from ztk.parallel.apply import parallelize
from ztk.serve.models import Opened, recorded_run, run_config, with_tokenizer
from ztk.train.engine import Engine
from ztk.train.engine.scoring import EngineScorer


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The model with its tokenizer and its scorer. is_first: whether this rank writes."""

    opened: Opened
    scorer: EngineScorer
    is_first: bool


@contextmanager
def scoring(config: Config) -> Iterator[Scored]:
    """Yields `open_scored` on a rank started for the purpose. Raises as `open_scored`."""
    with started(config) as process:
        scored, engine = open_scored(config, process=process)
        yield scored
        engine.close()


def open_scored(config: Config, *, process: Process) -> tuple[Scored, Engine]:
    """Opens the model of `inference.model` on this rank, and the engine, which the caller must close.

    Every rank must make the same calls.

    Raises:
        ValueError: the folder has no such model, or it does not fit the layout.
        CheckpointError: a damaged checkpoint, or inference.ema=true without an average.
    """
    path = config.inference.model
    assert path is not None, "the configuration is checked"
    model, values = open_frozen(path, ema=bool(config.inference.ema))
    opened = with_tokenizer(Path(path), module=model)
    engine = parallelize(
        model,
        process=process,
        optimizer=replace(policies.optimizer_policy(config), lr=0.0),
        precision=policies.precision_policy(config),
        zero=policies.zero_policy(config),
        offload=policies.offload_policy(config),
        tensor=policies.tensor_policy(config),
        pipeline=policies.pipeline_policy(config),
        accumulation_steps=config.train.accumulation_steps,
        initial_values=values,
    )
    if isinstance(values, CheckpointValues):
        values.close()
    scorer = EngineScorer(
        engine,
        max_len=usual_window(config),
        vocabulary=config.model.vocab_size,
        multiple=multiple_of(config.topology),
    )
    return Scored(opened=opened, scorer=scorer, is_first=process.rank == 0), engine


def open_frozen(path: str, *, ema: bool) -> tuple[nn.Module, InitialValues]:
    """Opens the model of a run folder, a checkpoint or a transformers folder.

    Returns it, with parameters on the meta device, and its weights by name and range.

    A run's adapters are not merged: W x + alpha / rank B A x. ema: uses the moving average of the weights.

    Raises:
        ValueError: a folder without such a model, or a reward model.
        CheckpointError: a damaged checkpoint, or no average.
    """
    folder = Path(path)
    values: InitialValues
    if (folder / "config.json").is_file():
        model, values = open_causal(path, init=ModelInit.pretrained.value, seed=0)
    else:
        step, recorded = recorded_run(folder)
        run = run_config(recorded)
        run.own = {}  # its loss and optimizer are not used
        if is_hugging_face(run.model):
            run.model.init = ModelInit.pretrained if run.lora.rank else ModelInit.random
            run.model.kernels = False
        model, base = build_model(run)
        values = CheckpointValues(step, ema=ema, base=base if checkpoint.leaves_out_base(step) else None)
        values.fill_buffers(model)
    own: Any = getattr(model, "config", None)
    if getattr(own, "output_router_logits", False):
        own.output_router_logits = False  # the router's loss is for training only
    return model.requires_grad_(False), values
