"""Pipeline stages of a transformers decoder: the embedding, the elements of its list of layers, and the norm with head and loss.

A stage runs the model's own forward with its own part of the list of layers. Modules before and after the layers do nothing if they
belong to another stage. Masks, positions and rotary embeddings are thus computed on every stage by the model's code.
"""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ztk.hf.documents import arguments_of, known_documents
from ztk.hf.sequences import TESTED as IN_PARTS
from ztk.hf.sequences import own_places
from ztk.kernels import cross_entropy
from ztk.nn.loss import IGNORED
from ztk.nn.staged import argument
from ztk.parallel.pipeline.layers import BuiltLayers, Carry, MicroBatch

# The decoder's children other than its list of layers, by purpose. Models with other children are refused.
_TOKENS = ("embed_tokens", "wte", "embed_in", "word_embeddings")
_POSITIONS = ("wpe", "embed_positions")
_BEFORE = ("word_embeddings_layernorm", "emb_dropout", "drop", "embed_dropout")
_AFTER = ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f")
_LISTS = ("layers", "h", "blocks")


class CausalLayers(BuiltLayers):
    """See `LayeredModel`. A tied embedding also exists on the head's stage, under the embedding's name."""

    def __init__(self, model: Any) -> None:
        """Raises ValueError if the model's forward may be more than embedding, layers and norm."""
        self.module = model
        head, self._full_forward = model.get_output_embeddings(), model.forward.original
        names = {module: name for name, module in model.named_modules()}
        self._decoder = _decoder_of(model)
        prefix = names[self._decoder]
        children = dict(self._decoder.named_children())
        self._list = next(name for name in _LISTS if name in children)
        self._blocks = list(self._decoder.get_submodule(self._list))
        found = {kind: [name for name in kinds if name in children] for kind, kinds in _KINDS.items()}
        self._before, self._positions, self._after = found["before"], found["positions"], found["after"]
        self._tokens = found["tokens"][0]
        first = [f"{prefix}.{name}" for name in (self._tokens, *self._positions, *self._before)]
        last = [*(f"{prefix}.{name}" for name in self._after), names[head]]
        if head.weight is children[self._tokens].weight:
            last.append(first[0])
        blocks = [f"{prefix}.{self._list}.{number}" for number in range(len(self._blocks))]
        self.layers = [
            self.layer(name, modules=modules, run=self._runner(name))
            for name, modules in (
                ("embedding", tuple(first)),
                *((name, (name,)) for name in blocks),
                ("head", tuple(last)),
            )
        ]
        self._check_parameters()

    def keep(self, own: Collection[int]) -> None:
        super().keep(own)
        self._blocks = [block if index + 1 in own else None for index, block in enumerate(self._blocks)]

    def run_layers(self, indices: range, *, carry: Carry, batch: MicroBatch) -> Carry:
        """Runs layers `indices` on a micro-batch `(tokens, targets)`. Returns hidden states, or the last layer's loss or logits."""
        has_first, has_last = indices.start == 0, indices.stop == len(self.layers)
        given = {"input_ids": argument(batch, index=0, name="tokens")} if has_first else {"inputs_embeds": carry}
        documents, own = argument(batch, index=2, name="documents"), own_places(self.module)
        [x] = given.values()
        device = None if x is None else x.device
        given |= arguments_of(documents, config=self.module.config, own=own, device=device)
        stage = self._shadowed(self._blocks_of(indices), has_first=has_first, has_last=has_last)
        with stage, known_documents(documents, config=self.module.config):
            if not has_last:
                return self._decoder(**given, use_cache=False)[0]
            logits = self._full_forward(**given, use_cache=False).logits
        targets = argument(batch, index=1, name="targets")
        if targets is None:
            return logits
        return causal_loss(self.module, logits=logits, targets=targets)

    def _blocks_of(self, indices: range) -> list:
        """Returns the stage's blocks. If the model looks up layer types by number, identities take the places of other stages' blocks."""
        own = range(max(0, indices.start - 1), indices.stop - 1)
        if getattr(self.module.config, "layer_types", None) is None:
            return self._blocks[own.start : own.stop]
        return [block if number in own else _same for number, block in enumerate(self._blocks)]

    @contextlib.contextmanager
    def _shadowed(self, blocks: list, *, has_first: bool, has_last: bool) -> Iterator[None]:
        """Replaces the decoder's blocks. Instance attributes hide the modules, whose names stay."""
        hidden: dict[str, Any] = {self._list: blocks}
        if not has_first:
            hidden |= dict.fromkeys(self._before, _same) | dict.fromkeys(self._positions, _no_positions)
        if not has_last:
            hidden |= dict.fromkeys(self._after, _same)
        self._decoder.__dict__.update(hidden)
        try:
            yield
        finally:
            for name in hidden:
                del self._decoder.__dict__[name]

    def _runner(self, name: str) -> Callable[[Carry, MicroBatch], Carry]:
        def run(carry: Carry, batch: MicroBatch) -> Carry:
            index = next(index for index, layer in enumerate(self.layers) if layer.name == name)
            return self.run_layers(range(index, index + 1), carry=carry, batch=batch)

        return run

    def _check_parameters(self) -> None:
        known = {
            p for layer in self.layers for path in layer.modules for p in self.module.get_submodule(path).parameters()
        }
        for name, parameter in self.module.named_parameters():
            if parameter not in known:
                raise ValueError(
                    f"topology.pipeline: {type(self.module).__name__} has {name} outside of its embedding, layers and norm, and it is not "
                    "known which stage needs it; use topology.pipeline=1"
                )


_KINDS = {"tokens": _TOKENS, "positions": _POSITIONS, "before": _BEFORE, "after": _AFTER}
# Families tested to compute stages like the full model.
TESTED = (*IN_PARTS, "gptj", "codegen", "gpt_neo", "bloom", "falcon", "mpt")


def stages_fault(config: Any) -> str | None:
    """Returns why a model of this configuration cannot be cut into stages, or None if it can."""
    if config.model_type not in TESTED:
        return (
            f"topology.pipeline: models of type {config.model_type} are not cut into stages, only {', '.join(sorted(TESTED))}; use "
            "topology.pipeline=1"
        )
    if getattr(config, "output_router_logits", False):
        return (
            "topology.pipeline: the router's loss needs the logits of all layers, which lie on several stages; set output_router_logits to "
            "false in config.json, or use topology.pipeline=1"
        )
    return None


def causal_loss(model: Any, *, logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean cross entropy of logits [B, T, V] and targets [B, T], an fp32 scalar. Targets of -100 are ignored.

    In training mode, adds the mean of logsumexp(logits)^2 with the model's weight `z_loss`, as `ztk.nn.loss.LanguageLoss` does.
    """
    z_loss = getattr(model, "z_loss", 0.0) if model.training else 0.0
    return cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, z_loss=z_loss)


def _decoder_of(model: Any) -> nn.Module:
    """Returns the module whose children are the embedding and the list of layers."""
    if (fault := stages_fault(model.config)) is not None:
        raise ValueError(fault)
    tokens = model.get_input_embeddings()
    return next(module for module in model.modules() if any(child is tokens for child in module.children()))


def _same(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return x


def _no_positions(positions: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.zeros(1, device=positions.device)
