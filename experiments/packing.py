"""Decides whether the texts of a forward are packed without padding, in all alignment tasks.

A model whose layers are cut needs rows of one length.
"""

import logging

import torch

from ztk.config import Config
from ztk.core.policies.runs import is_hugging_face
from ztk.experiments.reference import BaseModel
from ztk.hf.attention_interface import use_attention
from ztk.rl.rollout import can_pack, pack_exactly, use_engine_attention
from ztk.train.engine import Engine

logger = logging.getLogger(__name__)


def packs_examples(config: Config, *, policy: Engine, reference: Engine | BaseModel | None = None) -> bool:
    """Returns whether `task=sft`, `reward`, `dpo` and `distill` pack their texts. A collective call.

    On a CPU, packing must not change any bit of a native decoder's result; elsewhere the model must support it, as tested families of
    transformers do. Experts need packed texts, because the losses of their routers would count padding.
    """
    rounds = policy.process.device.type != "cpu" or config.model.experts is not None or is_hugging_face(config.model)
    return _pack_all(policy, reference, exactly=not rounds)


def packs_rollouts(config: Config, *, policy: Engine, reference: Engine | BaseModel | None) -> bool:
    """Returns whether policy and reference of a rollout pack their texts. A collective call.

    With rollout.identity=exact, packing must not change any bit. Rows then have the engine's attention where they cannot be packed.
    """
    is_exact = config.rollout.identity == "exact"
    packs = _pack_all(policy, reference, exactly=is_exact)
    if config.rollout.engine == "generator" and is_exact and not packs:
        for engine in _engines(policy, reference):
            use_engine_attention(engine.module)
    return packs


def _pack_all(policy: Engine, reference: Engine | BaseModel | None, *, exactly: bool) -> bool:
    """Returns whether texts are packed: if this changes no bit on any rank, or, unless it must be `exactly`, if all models support it."""
    process, engines = policy.process, _engines(policy, reference)
    if not process.mesh.is_alone:
        return False
    own = torch.tensor([float(pack_exactly(*(one.module for one in engines), device=process.device))])
    if bool(process.comm.gather_scalars(own.to(process.device), label="packs").all()):  # processors may differ
        return True
    return not exactly and can_pack_all(*engines)


def _engines(policy: Engine, reference: Engine | BaseModel | None) -> list[Engine]:
    return [policy, reference] if isinstance(reference, Engine) else [policy]


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
