"""Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685) on frozen linear layers, named as in peft.

A target keeps its module, name and weight. It gets two children, `lora_A.default.weight` [rank, in] and `lora_B.default.weight` [out,
rank], and adds scale * B A dropout(x) to its output. Weights keep their dtype.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ztk.core.policies.model import LoraPolicy
from ztk.core.runtime.part import InitialValues
from ztk.core.runtime.seed import generator

ALL = "all-linear"
_A, _B = "lora_A.default.weight", "lora_B.default.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class PeftDescription:
    """`adapter_config.json` of peft, for checkpoints."""

    values: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Returns the policy for JSON."""
        return dict(self.values)


class _Named(nn.Module):
    """A container with one child, "default". Not a ModuleDict, whose elements would be gathered one by one."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.default = nn.Linear(inputs, outputs, bias=False, device="meta")


def add_adapters(model: nn.Module, *, policy: LoraPolicy, base: str) -> None:
    """Freezes `model`, in place, and adds trained adapters on the meta device: see `adapter_values`.

    base: source of the frozen weights, for peft; empty if no folder has them.
    Raises ValueError for targets that match no linear layer, and for layers whose weight is tied to another module's.
    """
    found = targets_of(model, targets=policy.targets)
    _refuse_tied(model, targets=found)
    model.requires_grad_(False)
    turned = set()
    for module in found.values():
        inputs, outputs, is_turned = _sizes(module)
        turned.add(is_turned)
        module.lora_A, module.lora_B = _Named(inputs, policy.rank), _Named(policy.rank, outputs)
        module.adapter = functools.partial(_added, module, scale=policy.scale, dropout=policy.dropout)
        module.adapter_is_off = False
        module.forward = functools.partial(_adapted, module, module.forward)
    if len(turned) > 1:
        raise ValueError(
            "lora.targets: peft cannot describe one adapter for weights stored as [in, out] and as [out, in]; name one kind"
        )
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": policy.rank,
        "lora_alpha": policy.alpha,
        "lora_dropout": policy.dropout,
        "target_modules": sorted(found),
        "fan_in_fan_out": turned == {True},
        "bias": "none",
    }
    model.peft_config = {"default": PeftDescription(values=described)}


def _refuse_tied(model: nn.Module, *, targets: Mapping[str, nn.Module]) -> None:
    owners: dict[int, list[str]] = {}  # by identity
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for name, module in targets.items():
        others = [owner for owner in owners.get(id(module.weight), ()) if owner != f"{name}.weight"]
        if others:
            raise ValueError(
                f"lora.targets={name.rpartition('.')[2]}: its weight is {others[0]}, too, which a merged adapter would change; name other "
                "layers, or use lora.targets=all-linear"
            )


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.endswith((f".{_A}", f".{_B}"))


def adapter_of(weight: str) -> tuple[str, str]:
    """The names of A and B of the layer with this weight."""
    layer = weight.removesuffix(".weight")
    return f"{layer}.{_A}", f"{layer}.{_B}"


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """Context in which `model` is its frozen base, without gradients: adapters are not computed.

    Raises ValueError for a model without adapters.
    """
    adapted: list[Any] = [module for module in model.modules() if hasattr(module, "adapter_is_off")]
    if not adapted:
        raise ValueError("the model has no adapters to leave out; use lora=adapter")
    before = [module.adapter_is_off for module in adapted]
    for module in adapted:
        module.adapter_is_off = True
    try:
        with torch.no_grad():  # a block recomputed in a backward would include the adapters again
            yield
    finally:
        for module, was in zip(adapted, before, strict=True):
            module.adapter_is_off = was


def targets_of(model: nn.Module, *, targets: tuple[str, ...]) -> dict[str, nn.Module]:
    """Name -> linear layer. Raises ValueError for a target that names none, and for a model without any in a list of layers."""
    linear = {name: module for name, module in model.named_modules() if _is_linear(module)}
    if targets == (ALL,):
        lists = [f"{name}." for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
        found = {name: module for name, module in linear.items() if any(name.startswith(within) for within in lists)}
        if not found:
            raise ValueError(
                f"lora.targets={ALL}: {type(model).__name__} has no linear layer in a list of layers; name layers, or use lora=none"
            )
        return found
    for target in targets:
        if not any(_ends(name, end=target) for name in linear):
            leaves = sorted({name.rpartition(".")[2] for name in linear})
            raise ValueError(f"lora.targets={target}: no linear layer has that name; the model has {', '.join(leaves)}")
    return {name: module for name, module in linear.items() if any(_ends(name, end=target) for target in targets)}


def adapter_values(values: InitialValues, *, model: nn.Module, seed: int) -> InitialValues:
    """Adds peft's initial values for adapters to `values`: A uniform within 1 / sqrt(inputs), from `seed`; B zero, so the base is unchanged."""
    inputs = {name: p.shape[1] for name, p in model.named_parameters() if name.endswith(_A)}
    sizes = {name: p.numel() for name, p in model.named_parameters() if name.endswith(_A)}

    def with_adapters(*, name: str, start: int, stop: int) -> Tensor:
        if name.endswith(_B):
            return torch.zeros(stop - start)
        if name not in inputs:
            return values(name=name, start=start, stop=stop)
        drawn = torch.rand(sizes[name], generator=generator(seed, "lora", name)) * 2 - 1
        return drawn[start:stop] / math.sqrt(inputs[name])

    return with_adapters


def merge_adapters(model: nn.Module, *, state: Mapping[str, Tensor], scale: float) -> nn.Module:
    """Adds scale * B A to the weights of `model`, in place, and returns it. state: adapters by name, as `add_adapters` names
    them, A [rank, in] and B [out, rank].

    Raises ValueError for an adapter of a layer that the model does not have, and for values that are no adapter.
    """
    layers = dict(model.named_modules())
    for name, down in state.items():
        layer, _, end = name.rpartition(f".{_A}")
        if name.endswith(_B) and name.removesuffix(_B) + _A in state:
            continue
        if not layer or end or layer not in layers:
            raise ValueError(
                f"{name}: is no adapter of a layer of this model; name the model that the adapters were trained with"
            )
        module = layers[layer]
        product = state[f"{layer}.{_B}"] @ down * scale
        with torch.no_grad():
            module.weight += product.T if _sizes(module)[2] else product
    return model


def merged_parameters(
    model: nn.Module, *, read: Callable[[], Iterator[tuple[str, Tensor]]]
) -> Iterator[tuple[str, Tensor]]:
    """(name, value of any shape) of the parameters of `model` with adapters merged: their products are added to the layers' weights in
    fp32.

    read: yields (name, full value) of all parameters. If there are adapters, it is called twice and read to its end.
    """
    adapted: dict[str, Any] = {
        name: module for name, module in model.named_modules() if hasattr(module, "adapter_is_off")
    }
    if not adapted:
        yield from read()
        return
    adapters = {name: value.detach().to(torch.float32, copy=True) for name, value in read() if name.endswith((_A, _B))}
    for name, value in read():
        layer, _, leaf = name.rpartition(".")
        if leaf == "weight" and layer in adapted:
            module = adapted[layer]
            product = adapters[f"{layer}.{_B}"] @ adapters[f"{layer}.{_A}"] * module.adapter.keywords["scale"]
            yield name, value.float() + (product.T if _sizes(module)[2] else product)
        elif name not in adapters:
            yield name, value


def _added(module: Any, out: Tensor, *, x: Tensor, scale: float, dropout: float) -> Tensor:
    """out [..., out], the output of the layer, plus the output of its adapter for x [..., in]."""
    if module.adapter_is_off:
        return out
    if dropout and module.training:
        x = F.dropout(x, p=dropout)
    return out + module.lora_B.default(module.lora_A.default(x)) * scale


def _adapted(module: Any, original: Any, x: Tensor) -> Tensor:
    return module.adapter(original(x), x=x)


def is_turned(module: nn.Module | None) -> bool | None:
    """Whether the weight of a layer that can have an adapter is [in, out]; None for other modules."""
    return not isinstance(module, nn.Linear) if module is not None and _is_linear(module) else None


def _ends(name: str, *, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _is_linear(module: nn.Module) -> bool:
    """Whether this is torch's linear layer or a subclass (Falcon's has its own product), or the Conv1D of transformers' GPT-2."""
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))


def _sizes(module: nn.Module) -> tuple[int, int, bool]:
    """(inputs, outputs, whether the weight is [in, out])."""
    # pyrefly: ignore[not-iterable]  # nn.Module types every attribute as Tensor or Module
    first, second = module.weight.shape
    is_turned = not isinstance(module, nn.Linear)
    return (first, second, True) if is_turned else (second, first, False)
