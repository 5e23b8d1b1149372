"""Causal models of transformers outside of the engine's families: their own modules run over the engine's cache.

[Note: Modules over the cache]
A step's rows, of any sequences, are one row of tokens to the module, with their positions. All layers except attention work on rows;
attention goes through transformers' attention interface, where `attend` takes keys and values from the cache. Masks are made by
transformers' mask interface, which returns a marker with the layer's window here, and a layer that attends with another mask is refused.
Linear layers are replaced, in a copy that shares the other weights, by products whose rows have the same bits for any number of rows, and
so are the usual activations.

Other operations of a module on its rows are unknown, so three properties are checked when it is loaded: the logits equal the module's own,
they have the same bits together with another sequence and in chunks, and no module reads other rows.
"""

import copy
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ztk.core.runtime import CommMismatch, PeerLost
from ztk.inference.base import Model
from ztk.inference.cache import Attention, Cache, Span, Step
from ztk.inference.describe import FAMILIES, Description
from ztk.inference.module_cut import Linear, ModuleCut
from ztk.inference.placement import Placement
from ztk.inference.products import Affine, Product
from ztk.inference.ranks import Ranks
from ztk.inference.weights import products_of
from ztk.kernels import activate_cpu

NAME = "ztk_cache"
_MODELS, _MASKS = "transformers.modeling_utils", "transformers.masking_utils"
_ACTIVATIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUTanh": "gelu_tanh",
}  # classes of torch and transformers -> ours
_LENGTH_ROPES = {"dynamic", "longrope"}  # angles follow the longest position of a step
_ELSEWHERE = "generate with the model's own generate()"
_computed = threading.local()  # `step`: the `_Pass` of this thread, which computes one step at a time


def is_own_family(module: nn.Module) -> bool:
    """Whether the engine has its own forward for the model."""
    kind = getattr(getattr(module, "config", None), "model_type", None)
    return kind is None or kind in FAMILIES


def refusal_of(module: Any) -> str | None:
    """Why a model cannot run over the cache, or None if no reason is known."""
    return next(_reasons(module), None)


def _reasons(module: Any) -> Iterator[str]:
    config, modeling = module.config, sys.modules.get(_MODELS)
    if modeling is None or not isinstance(module, modeling.PreTrainedModel):
        yield "it is no model of transformers"
        return
    if getattr(config, "is_encoder_decoder", False):
        yield "it has an encoder, and the engine computes decoders"
    if any(hasattr(config, name) for name in ("vision_config", "audio_config", "speech_config")):
        yield "it is multimodal, and the engine reads tokens alone; load its text model by itself"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if getattr(module, "_is_stateful", False) or kinds:
        listed = f" ({', '.join(sorted(kinds))})" if kinds else ""
        yield f"it is recurrent{listed}, and the engine keeps keys and values alone"
    if not module._can_set_attn_implementation():
        yield "it does not use transformers' attention interface"
    missing = {"position_ids", "logits_to_keep"} - inspect.signature(module.forward).parameters.keys()
    if missing:
        yield f"its forward does not take {' and '.join(sorted(missing))}"
    if module.get_output_embeddings() is None:
        yield "it has no head over its vocabulary"
    ropes = {kind for part in module.modules() for kind in _rope_kinds(part)} & _LENGTH_ROPES
    if ropes:
        yield f"rope_type={ropes.pop()}: its angles depend on the text's length"


class ModuleModel(Model):
    """A copy of a model's modules that computes rows of several sequences.

    state: the parameters by name, in their full shapes and any dtype. ranks: share the linear layers.

    Raises:
        ValueError: a model that cannot run over the cache, or that its ranks cannot divide, with the reason.
    """

    def __init__(
        self, module: Any, *, state: Mapping[str, Tensor], placement: Placement, ranks: Ranks | None = None
    ) -> None:
        reason = refusal_of(module)
        if reason is not None:
            raise _refused(module, reason=reason)
        self.description, self.placement, self.ranks = _description(module), placement, ranks
        self._products = list[Product]()
        cut = None if ranks is None else ModuleCut(module, ranks=ranks, description=self.description)
        self._module = _copy_over_products(module, state=state, placement=placement, cut=cut, placed=self._placed)
        for part in self._module.modules():
            part._buffers = {
                name: None if own is None else own.to(placement.device) for name, own in part._buffers.items()
            }
        numbered = (part for part in self._module.modules() if isinstance(getattr(part, "layer_idx", None), int))
        self._slots_of_layers = {id(part): part.layer_idx for part in numbered}  # of attention
        self._blocks = _blocks(self._module, count=self.description.layers)
        self._try_out()

    def products(self) -> list[Product]:
        return self._products

    def _placed(self, name: str, layer: Linear) -> None:
        """Called when a linear layer has its product."""
        self._products.append(layer.product)

    def own_logits(
        self,
        tokens: Tensor,
        *,
        spans: list[Span],
        cache: Cache,
        rows: list[int],
        heads: "dict[int, Heads] | None" = None,
    ) -> Tensor:
        """Returns the logits of `Model`. heads: receives each layer's heads, and attention is skipped."""
        step, device = cache.step(spans), self.placement.device
        one = _Pass(
            step=step,
            dtype=self.placement.dtype,
            layers=self._slots_of_layers,
            description=self.description,
            heads=heads,
        )
        with _computing(one):
            found = self._module(
                input_ids=tokens.unsqueeze(0).to(device),
                position_ids=step.positions.unsqueeze(0),
                attention_mask=torch.ones(
                    1, len(tokens), dtype=torch.int64, device=device
                ),  # else documents are looked for
                use_cache=False,
                logits_to_keep=torch.tensor(rows or [0]).to(device),
            )
        return found.logits[0, : len(rows)].float()

    def _try_out(self) -> None:
        """Runs two steps: the first one finds the heads of the layers on this rank. Raises an error for operations that do not work over
        the cache."""
        heads: dict[int, Heads] = {}
        step: dict[str, Any] = {"spans": [Span(slot=0, start=0, length=3, row=0)], "rows": [2]}
        try:
            with torch.inference_mode():
                for found in (heads, None):
                    self.own_logits(torch.tensor([0, 1, 0]), cache=self.scratch(3), heads=found, **step)
                    if len(set(heads.values())) != 1:
                        raise ValueError("has layers with heads of several shapes, or without any")
                    own = heads[min(heads)]
                    self.description = replace(self.description, heads=own.query, kv_heads=own.key, head_dim=own.size)
        except (PeerLost, CommMismatch):
            raise  # nothing that the module does
        except ValueError as error:
            raise _refused(self._module, reason=f"it {error}") from error
        except (RuntimeError, TypeError, AttributeError, LookupError, NotImplementedError, AssertionError) as error:
            raise _refused(self._module, reason=f"its forward fails over the cache ({error})") from error

    def own_broken(self, tokens: list[int], *, span: Span, cache: Cache) -> int | None:
        found: list[int] = []

        def look(number: int, out: Any) -> None:
            x = out[0] if isinstance(out, tuple) else out
            if not found and not x.isfinite().all():
                found.append(number)

        handles = [
            block.register_forward_hook(lambda module, given, out, number=number: look(number, out))
            for number, block in enumerate(self._blocks)
        ]
        try:
            self.own_logits(torch.tensor(tokens), spans=[span], cache=cache, rows=[])
        finally:
            for handle in handles:
                handle.remove()
        return found[0] if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Query and key heads of a layer, and elements of a key."""

    query: int
    key: int
    size: int


class _Activation(nn.Module):
    """Applies an activation to x [...]. An element's bits do not depend on the number of rows."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return activate_cpu(x, activation=self._kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pass:
    """The state of the current step for attention. dtype: dtype of its rows. layers: attention modules by id -> their place in the cache.
    heads: receives each layer's heads, and attention is skipped."""

    step: Step
    dtype: torch.dtype
    layers: dict[int, int]
    description: Description
    heads: dict[int, Heads] | None


@contextmanager
def _computing(one: _Pass) -> Iterator[None]:
    _computed.step = one  # transformers' interface passes nothing of ours
    try:
        yield
    finally:
        del _computed.step


def _attend_over_cache(  # noqa: PLR0917 - as transformers calls it
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Has the signature of transformers' attention functions: query [1, H, M, D], key and value [1, K, M, D]; returns [1, M, H, D of the
    values]."""
    one: _Pass = _computed.step
    unknown = [name for name in ("s_aux", "position_bias", "head_mask", "sinks") if kwargs.get(name) is not None]
    if unknown or attention_mask is None or attention_mask.dim() != 1 or id(module) not in one.layers:
        raise ValueError(f"attends with {unknown[0] if unknown else 'a mask of its own'}")
    layer, of = one.layers[id(module)], one.description
    q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    own, width = Heads(query=q.shape[1], key=k.shape[1], size=q.shape[2]), v.shape[2]
    if one.heads is not None:
        one.heads[layer] = own
        return q.new_zeros(1, len(q), own.query, width), None
    if own != Heads(query=of.heads, key=of.kv_heads, size=of.head_dim) or width > of.head_dim:
        raise ValueError(f"has heads of another shape in layer {layer}")
    how = Attention(
        layer=layer,
        heads=of.heads,
        kv_heads=of.kv_heads,
        head_dim=of.head_dim,
        scale=of.head_dim**-0.5 if scaling is None else scaling,
        window=int(attention_mask[0]) or None,
        softcap=softcap,
        eps=of.norm_eps,
    )
    parts = (q, k, F.pad(v, (0, of.head_dim - width)))
    rows = torch.cat([part.flatten(1).to(one.dtype) for part in parts], dim=1)
    out = one.step.attend(rows, by=how).unflatten(1, (of.heads, -1))
    return out[None, ..., :width].to(query.dtype), None


def _window_marker(
    *,
    mask_function: Any,
    q_length: int,
    local_size: int | None = None,
    use_vmap: bool = False,
    **kwargs: object,
) -> Tensor:
    """Replaces a mask: int64 [1], the number of keys that a query attends to, including itself; 0 for all before it. Refuses other
    masks."""
    if use_vmap:
        raise ValueError("has a mask of its own")
    last = 2 * (local_size or q_length)
    keys = torch.arange(last + 1)
    seen = mask_function(0, 0, torch.tensor(last), keys)
    expected = keys <= last if local_size is None else keys > last - local_size
    if not torch.equal(torch.as_tensor(seen).expand_as(expected), expected):
        raise ValueError("attends in chunks, or by another mask of its own")
    return torch.tensor([local_size or 0])


def _copy_over_products(
    module: Any,
    *,
    state: Mapping[str, Tensor],
    placement: Placement,
    cut: ModuleCut | None,
    placed: Callable[[str, Linear], None],
) -> Any:
    """A copy that shares tensors of `state` that need not be moved, with products instead of linear layers. placed: called with name and
    layer of each."""
    shared = {id(value): value for value in (*module.parameters(), *module.buffers())}
    own, (product, head_product, _) = copy.deepcopy(module, memo=shared), products_of(placement)
    head = own.get_output_embeddings()
    tied = own.get_input_embeddings().weight  # the head's, too, where they are tied
    embedding = next(name for name, value in own.named_parameters() if value is tied)
    for name, part in list(own.named_modules()):
        activation = _ACTIVATIONS.get(type(part).__name__)
        if activation is not None:
            own.set_submodule(name, _Activation(activation))
            continue
        columns = type(part).__name__ == "Conv1D" and hasattr(part, "nf")
        if not columns and not isinstance(part, nn.Linear):
            continue
        weight, bias = state.get(f"{name}.weight"), state.get(f"{name}.bias")
        found = _fp32(state[embedding] if weight is None else weight)
        affine = Affine(weight=found.t().contiguous() if columns else found, bias=None if bias is None else _fp32(bias))
        made = head_product if part is head else product
        layer = Linear(made(affine)) if cut is None else cut.linear(name, full=affine, product=made)
        own.set_submodule(name, layer)
        placed(name, layer)
    if cut is not None:
        cut.tell_attention(own)
    for name, _ in list(own.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(own.get_submodule(owner), leaf, nn.Parameter(placement.place(state[name]), requires_grad=False))
    modeling, masks = sys.modules[_MODELS], sys.modules[_MASKS]
    modeling.ALL_ATTENTION_FUNCTIONS.register(NAME, _attend_over_cache)
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _window_marker)
    own.set_attn_implementation(NAME)
    return own.eval()


def _fp32(value: Tensor) -> Tensor:
    return value.detach().to("cpu", torch.float32)


def _description(module: Any) -> Description:
    config = module.config
    heads = config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return Description(
        family=config.model_type,
        vocab_size=config.vocab_size,
        dim=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=size,
        max_len=getattr(config, "max_position_embeddings", None) or 2048,
        activation="",
        is_tied=False,
    )


def blocks_name(module: nn.Module, *, count: int) -> str:
    """Of the list of its `count` blocks; empty if there is none."""
    lists = (name for name, part in module.named_modules() if isinstance(part, nn.ModuleList) and len(part) == count)
    return next(lists, "")


def _blocks(module: nn.Module, *, count: int) -> list[nn.Module]:
    name = blocks_name(module, count=count)
    return list(module.get_submodule(name).children()) if name else []


def _rope_kinds(part: Any) -> list[str]:
    kinds = getattr(part, "rope_type", None) or ()
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds] if isinstance(kinds, str) else []


def _refused(module: Any, *, reason: str) -> ValueError:
    kind = getattr(module.config, "model_type", type(module).__name__)
    families = ", ".join(sorted(FAMILIES))
    return ValueError(
        f"model_type={kind}: {reason}. The inference engine computes the native decoder, {families}, and by their own modules those that "
        f"attend through transformers' interface; {_ELSEWHERE}"
    )
