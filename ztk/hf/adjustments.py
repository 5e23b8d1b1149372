"""Adjustments of Hugging Face's libraries, for sharded parameters (stage 3) and for ranks without a GPU. `ztk.hf.watch` lists them."""

import functools
import importlib
import os
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ztk.zero.parameters.released import is_released


def use_gloo(state: ModuleType) -> None:
    """Uses gloo on launched ranks for which accelerate would choose no backend. state: the module accelerate.state.

    With DeepSpeed and no accelerator, accelerate assumes a single process: every rank would train on all data without communication.
    """
    original = state.PartialState._prepare_backend

    @functools.wraps(original)
    def _prepare_backend(self, *args, **kwargs):
        backend, kind = original(self, *args, **kwargs)
        started = _is_rank() and int(os.environ.get("WORLD_SIZE", 1)) > 1
        deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
        return ("gloo" if backend is None and started and deepspeed else backend), kind

    state.PartialState._prepare_backend = _prepare_backend


def allow_bf16(training_args: ModuleType) -> None:
    """Accepts `TrainingArguments(bf16=True)` on CPU ranks. training_args: the module transformers.training_args.

    transformers requires a GPU with bf16, or use_cpu=True, which would disable DeepSpeed. ztk also computes in bf16 on CPUs.
    """
    original = training_args.is_torch_bf16_gpu_available

    @functools.wraps(original)
    def is_torch_bf16_gpu_available() -> bool:
        return (_is_rank() and not torch.cuda.is_available()) or original()

    # pyrefly: ignore[missing-attribute]  # replaces a function of the module
    training_args.is_torch_bf16_gpu_available = is_torch_bf16_gpu_available


def _is_rank() -> bool:
    return int(os.environ.get("LOCAL_RANK", -1)) != -1


def keep_size(modeling_utils: ModuleType) -> None:
    """Keeps a layer that `resize_token_embeddings` would resize to its own size. modeling_utils: the module transformers.modeling_utils.

    At stage 3, transformers creates new embeddings in this case, draws their values, and overwrites them with the old ones. The draws
    advance torch's generator, so later random values, such as the value head of DeepSpeed-Chat's reward model, would differ from stage 0.
    """
    model = modeling_utils.PreTrainedModel
    embeddings, head = model._get_resized_embeddings, model._get_resized_lm_head

    @functools.wraps(embeddings)
    def _get_resized_embeddings(
        self: Any,
        old_embeddings: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        *rest,
        **options,
    ):
        count = old_embeddings.weight.shape[0]
        wanted = count if new_num_tokens is None else new_num_tokens
        if isinstance(pad_to_multiple_of, int):
            wanted = -(-wanted // pad_to_multiple_of) * pad_to_multiple_of
        if wanted != count:
            return embeddings(self, old_embeddings, new_num_tokens, pad_to_multiple_of, *rest, **options)
        old_embeddings.num_embeddings = count
        return old_embeddings

    @functools.wraps(head)
    def _get_resized_lm_head(
        self: Any, old_lm_head: Any, new_num_tokens: int | None = None, transposed: bool = False, *rest, **options
    ):
        count = old_lm_head.weight.shape[1 if transposed else 0]
        if new_num_tokens is not None and new_num_tokens != count:
            return head(self, old_lm_head, new_num_tokens, transposed, *rest, **options)
        old_lm_head.out_features = count
        return old_lm_head

    model._get_resized_embeddings, model._get_resized_lm_head = _get_resized_embeddings, _get_resized_lm_head


def copy_gathered(other: ModuleType) -> None:
    """Makes peft's `modules_to_save` contain the layer's values. A collective call when a copy is made. other: the module peft.utils.other.

    These layers train in addition to adapters and are copies, such as the head of a reward model. peft gathers a layer before the copy
    only if its parameters are empty, as DeepSpeed's sharded parameters are. ztk's keep their shape and read as NaN.
    """
    wrapper = other.ModulesToSaveWrapper
    original = wrapper.update

    @functools.wraps(original)
    def update(self: Any, *given, **options):
        parameters = list(self.original_module.parameters())
        gathered = importlib.import_module("deepspeed").zero.GatheredParameters
        with gathered(parameters, enabled=any(map(is_released, parameters))):
            return original(self, *given, **options)

    wrapper.update = update


def keep_hooks(utils: ModuleType) -> None:
    """Makes TRL's generation leave the engine's hooks alone. utils: the module trl.models.utils.

    TRL removes DeepSpeed's hooks by private names of DeepSpeed's optimizer, generates with gathered parameters, and adds the hooks again.
    ztk has no such hooks: parameters inside `GatheredParameters` stay gathered for any number of forwards.
    """

    def nothing_to_do(model: object) -> None:
        """Does nothing. model: the engine."""

    # pyrefly: ignore[missing-attribute]  # replaces functions of the module
    utils.remove_hooks = utils.add_hooks = nothing_to_do


def gather_head(utils: ModuleType) -> None:
    """Lets TRL's loss over the head's weight gather only parameters. utils: the module trl.trainer.utils.

    TRL gathers the weight in the forward and again in the backward, where ztk's autograd returns the gathered values, not a parameter.
    """
    original = utils.maybe_gather_lm_head_ctx

    @functools.wraps(original)
    def maybe_gather_lm_head_ctx(*params):
        return original(*(parameter for parameter in params if isinstance(parameter, nn.Parameter)))

    # pyrefly: ignore[missing-attribute]  # replaces a function of the module
    utils.maybe_gather_lm_head_ctx = maybe_gather_lm_head_ctx
