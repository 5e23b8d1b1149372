"""The reward model of `reward.path`, trained by `task=reward`: a separate engine that never steps."""

import torch
from torch import Tensor

from experiments.alignment import load_weights
from experiments.models import build, packs_texts
from ztk.config import Config
from ztk.core.runtime import Process
from ztk.parallel.pipeline import MicroBatch
from ztk.rl.rollout import Samples, lay_out
from ztk.train.engine import Engine


def open_reward_model(config: Config, *, process: Process) -> Engine | None:
    """Opens the model of `reward.path` under the run's strategy. A collective call. Returns None if there is no reward model.

    Raises CheckpointError for a checkpoint of another model, such as one without an output layer of one value.
    """
    if config.reward.path is None:
        return None
    engine = build(config, process=process, is_trained=False, is_critic=True, strategy=config.reward)
    load_weights(config, engine=engine, path=config.reward.path)
    return engine


def learned_rewards(engine: Engine, *, samples: Samples, micro_batch: int) -> Tensor:
    """Returns the value at the last token of every answer, as in Bradley-Terry's loss: float64 [S]. A collective call.

    Raises FloatingPointError for a value that is not finite.
    """
    found = end_values(engine, tokens=samples.tokens, lengths=samples.lengths, micro_batch=micro_batch)
    if not found.isfinite().all():
        row = int((~found.isfinite()).nonzero()[0])
        raise FloatingPointError(
            f"sample {int(samples.numbers[row])}: the value of the model of reward.path is not finite"
        )
    return found


def end_values(engine: Engine, *, tokens: Tensor, lengths: Tensor, micro_batch: int) -> Tensor:
    """Returns the value at the last token of texts, float64 [S] on the CPU. tokens: int64 [S, T]. lengths: of the texts, int64 [S].

    A collective call.
    """
    packs = packs_texts(engine)

    def forward_of(rows: slice) -> MicroBatch:
        own = lengths[rows]
        layout = lay_out(tokens[rows], lengths=own, packs=packs, device=engine.process.device)
        return layout.micro_batch(lambda model: layout.forward(model).flatten().index_select(0, layout.at(own - 1)))

    with engine.evaluating():
        parts = engine.compute(
            forward_of(slice(first, first + micro_batch)) for first in range(0, len(tokens), micro_batch)
        )
    return torch.cat([part.cpu() for part in parts]).double()
