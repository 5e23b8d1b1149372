"""Decides whether the texts of a forward are packed without padding, in all alignment tasks."""

import logging

import torch

from experiments.reference import BaseModel
from ztk.config import Config
from ztk.core.policies.runs import is_hugging_face
from ztk.hf.attention_interface import use_attention
from ztk.rl.rollout import can_pack, pack_exactly
from ztk.train.engine import Engine

logger = logging.getLogger(__name__)


def pack_exactly_on_all_ranks(*engines: Engine) -> bool:
    """Like `pack_exactly` of their modules, if every rank supports it; their processors may differ. A collective call."""
    process = engines[0].process
    own = torch.tensor([float(pack_exactly(*(one.module for one in engines), device=process.device))])
    return bool(process.comm.gather_scalars(own.to(process.device), label="packs").all())


def packs_examples(config: Config, *, policy: Engine, reference: Engine | BaseModel | None = None) -> bool:
    """Returns whether `task=sft`, `reward` and `dpo` pack their texts. A collective call.

    On a CPU, packing must not change any bit of a native decoder's result; elsewhere the model must support it, as tested families of
    transformers do. A model whose layers are cut needs rows of one length. Experts need packed texts, because the losses of their routers
    would count padding.
    """
    degrees = config.topology
    if max(degrees.pipeline, degrees.tensor, degrees.sequence) > 1:
        return False
    engines = [engine for engine in (policy, reference) if isinstance(engine, Engine)]
    if pack_exactly_on_all_ranks(*engines):
        return True
    rounds = policy.process.device.type != "cpu" or config.model.experts is not None or is_hugging_face(config.model)
    return rounds and can_pack_all(*engines)


def can_pack_all(*engines: Engine) -> bool:
    """Returns whether all modules support packed texts. Warns if one does not, because padding costs time.

    Models of transformers then attend within each text by ztk's kernel, where they use torch's attention.
    """
    padded = {type(engine.module).__name__ for engine in engines if not can_pack(engine.module)}
    if padded and engines[0].process.rank == 0:
        logger.warning("texts are padded: %s is not known to keep packed texts apart", ", ".join(sorted(padded)))
    for engine in () if padded else engines:
        use_attention(engine.module)
    return not padded
