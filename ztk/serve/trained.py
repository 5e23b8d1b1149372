"""Loads the model of a run's checkpoint for inference: ztk's own decoder, or a transformers model with merged adapters."""

from pathlib import Path

import torch
from torch import Tensor, nn

from ztk import checkpoint
from ztk.checkpoint.export import Weights
from ztk.config import Config
from ztk.hf.causal import empty_causal, folder_causal
from ztk.nn import Decoder, DecoderConfig
from ztk.nn.lora import is_adapter, merge_adapters

_NOT_SIZES = ("name", "path", "init", "kernels")


def trained_model(config: Config, *, step: Path, ema: bool = False) -> nn.Module:
    """Returns the model of the run with `config`, fp32 on the CPU. step: the folder of its checkpoint. ema: uses the moving average of
    the weights.

    Adapters are merged: W + alpha / rank B A, in fp32, which differs from the sum of both products by rounding.

    Raises ValueError for a reward model, for `model.path` without the run's model, and for `ema` without an average.
    """
    if config.task.name == "reward":
        raise ValueError(
            f"inference.model={step}: task=reward trained a model of rewards, which writes no text; name another run"
        )
    manifest = checkpoint.read_manifest(step)
    weights = Weights(manifest, dtype=torch.float32, ema=ema, is_merged=config.model.path is None)
    try:
        state = {spec.key: torch.cat(list(weights.ranges(spec.key))).view(spec.shape) for spec in weights.specs}
    finally:
        weights.close()
    state |= {
        name: state[first] for name, first in manifest.tied.items() if first in state
    }  # tied weights are not adapters
    if config.model.path is None:
        return _decoder(config, state=state)
    if config.lora.rank > 0:
        alpha = config.lora.alpha
        assert alpha is not None, "the configuration is checked"
        adapters = {name: value for name, value in state.items() if is_adapter(name)}
        if manifest.left_out:
            model = folder_causal(config.model.path)
        else:  # the base was trained before, and is in the checkpoint
            model = empty_causal(config.model.path)
            model.load_state_dict({name: value for name, value in state.items() if name not in adapters}, assign=True)
        return merge_adapters(model, state=adapters, scale=alpha / config.lora.rank)
    model = empty_causal(config.model.path)
    model.load_state_dict(state, assign=True)
    return model


def _decoder(config: Config, *, state: dict[str, Tensor]) -> Decoder:
    model = empty_decoder(config)
    model.load_state_dict(state, assign=True)
    return model


def empty_decoder(config: Config) -> Decoder:
    """Returns the run's own decoder: parameters on the meta device, buffers with their values."""
    sizes = {name: value for name, value in vars(config.model).items() if name not in _NOT_SIZES and value is not None}
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**sizes))
    model.materialise_buffers("cpu")
    return model
