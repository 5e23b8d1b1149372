"""Whether the texts of a forward are packed, one after another without padding, in all tasks that align a model."""

import torch

from experiments.reference import BaseModel
from ztk.config import Config
from ztk.rl.rollout import can_pack, pack_exactly
from ztk.train.engine import Engine


def pack_exactly_on_all_ranks(*engines: Engine) -> bool:
    """As `pack_exactly` of their modules, where it is possible on every rank, whose processors may differ. A collective call."""
    process = engines[0].process
    own = torch.tensor([float(pack_exactly(*(one.module for one in engines), device=process.device))])
    return bool(process.comm.gather_scalars(own.to(process.device), label="packs").all())


def packs_examples(config: Config, *, policy: Engine, reference: Engine | BaseModel | None = None) -> bool:
    """Whether `task=sft`, `reward` and `dpo` pack their texts: on a CPU where that changes no bit of a text, elsewhere wherever the model
    can. A divided model needs rows of one length. A collective call."""
    degrees = config.topology
    if max(degrees.pipeline, degrees.tensor, degrees.sequence) > 1:
        return False
    engines = [engine for engine in (policy, reference) if isinstance(engine, Engine)]
    is_exact = pack_exactly_on_all_ranks(*engines)
    return is_exact or (policy.process.device.type != "cpu" and all(can_pack(engine.module) for engine in engines))
