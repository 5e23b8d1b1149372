"""Runs forwards of a model's modules with ztk's kernels and unchanged weights: `model.kernels` and `replace_with_kernel_inject`.

Modules are recognised by their results, not by their names: a copy with small weights is compared with the kernel on a sample. Modules
that round or scale differently (Gemma's 1 + weight) stay unchanged.
"""

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ztk.core.runtime.own_forward import replace_forward
from ztk.hf.attention_interface import restore_attention, use_attention
from ztk.hf.rotary import by_kernel, rotation_of
from ztk.kernels import geglu, layer_norm, rms_norm, swiglu

_GATED = ("gate_proj", "up_proj", "down_proj")
_IN_ONE = ("gate_up_proj", "down_proj")
_WIDTH, _INNER = 8, 12  # sizes of the copies
_RELATIVE, _ABSOLUTE = 1e-5, 1e-6  # fp32 rounding in another order; the two forms of gelu differ by 1e-4
Forward = Callable[[Tensor], Tensor]


@dataclass(kw_only=True)
class Injection:
    """The replaced modules. counts: "LlamaRMSNorm -> rms_norm" to the number of modules."""

    model: nn.Module
    forwards: list[tuple[nn.Module, Forward]] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    attention: str | None = None  # the model's previous attention implementation

    def undo(self) -> None:
        """Restores the modules' forwards, except those that were wrapped again since."""
        for module, forward in self.forwards:
            if module.__dict__.get("forward") is forward:
                del module.forward
        self.forwards.clear()
        if self.attention is not None:
            restore_attention(self.model, implementation=self.attention)
            self.attention = None

    def __str__(self) -> str:
        return ", ".join(f"{count} {op}" for op, count in self.counts.items())


def inject_kernels(model: nn.Module, *, option: str = "replace_with_kernel_inject") -> Injection:
    """Replaces all modules that a kernel can compute, for inference and training.

    option: the key that requested it, for the error message. Raises ValueError for a model without such modules.
    """
    made = Injection(model=model)
    tried: dict[tuple[type, str], Callable | None] = {}
    for module in model.modules():
        if "forward" in module.__dict__:  # already replaced by other code
            continue
        for recognise in (_root_mean_square, _layer_norm, _gated):
            if (found := recognise(module, tried=tried)) is not None:
                kernel, forward = found
                replace_forward(module, by=forward)
                made.forwards.append((module, module.forward))
                made.counts[f"{type(module).__name__} -> {kernel}"] += 1
                break
        else:
            if rotation_of(module, model=model) is not None:
                replace_forward(module, by=_rotating(module.forward))
                made.forwards.append((module, module.forward))
                made.counts[f"{type(module).__name__} -> rope"] += 1
    made.attention = use_attention(model)
    if made.attention is not None:
        # pyrefly: ignore[missing-attribute]  # nn.Module types every attribute as Tensor or Module
        made.counts["attention of full prompts -> attention"] = model.config.get_text_config().num_hidden_layers
    if not made.counts:
        raise ValueError(
            f"{option}=true: {type(model).__name__} has no module that a kernel of ztk could compute (RMS and layer "
            "norms, gated MLPs, rotary positions, attention by transformers' interface): use "
            f"{option}=false"
        )
    return made


def _root_mean_square(module: nn.Module, *, tried: dict) -> tuple[str, Forward] | None:
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if list(module._parameters) != ["weight"] or module._modules or not isinstance(eps, float):
        return None
    if not isinstance(module.weight, Tensor) or module.weight.dim() != 1:
        return None
    key = type(module), f"rms_norm {eps}"
    if key not in tried:
        twin = _twin(module, parameters={"weight": 1 + 0.3 * _numbers(_WIDTH)})
        # pyrefly: ignore[bad-assignment]  # without residual the result is one tensor
        tried[key] = _first_equal(twin, {rms_norm: lambda x: rms_norm(x, twin.weight, eps=eps)})
    if tried[key] is None:
        return None
    return "rms_norm", lambda x: rms_norm(x, module.weight, eps=eps)


def _layer_norm(module: nn.Module, *, tried: dict) -> tuple[str, Forward] | None:
    if type(module) is not nn.LayerNorm or len(module.normalized_shape) != 1 or module.weight is None:
        return None
    return "layer_norm", lambda x: layer_norm(x, module.weight, module.bias, eps=module.eps)


def _gated(module: nn.Module, *, tried: dict) -> tuple[str, Forward] | None:
    """Recognises down(act(gate(x)) * up(x)), act silu or gelu's tanh form. Gate and up may be the halves of one projection."""
    names = _GATED if "gate_proj" in module._modules else _IN_ONE
    others = [child for name, child in module.named_children() if name not in names]
    if module._parameters or not all(isinstance(module._modules.get(name), nn.Linear) for name in names):
        return None
    if len(others) > 1 or any(True for child in others for _ in child.parameters()):
        return None
    key = type(module), f"gated {names} {others}"
    if key not in tried:
        widths = (_INNER, _INNER) if names is _GATED else (2 * _INNER,)
        linears = [*(_linear(_WIDTH, width) for width in widths), _linear(_INNER, _WIDTH)]
        twin = _twin(module, modules=dict(zip(names, linears, strict=True)))
        tried[key] = _first_equal(twin, {op: _by_gate(twin, names=names, op=op) for op in (swiglu, geglu)})
    op = tried[key]
    return None if op is None else (op.__name__, _by_gate(module, names=names, op=op))


def _by_gate(module: nn.Module, *, names: tuple[str, ...], op: Callable) -> Forward:
    """Returns the forward of such a module. Its layers are looked up in every call, because they may be replaced."""
    *gates, down = names

    def forward(x: Tensor) -> Tensor:
        projected = [getattr(module, name)(x) for name in gates]
        gate, up = projected if len(projected) == 2 else projected[0].chunk(2, dim=-1)
        return getattr(module, down)(op(gate, up))

    return forward


def _rotating(forward: Callable) -> Callable:
    def run(*args: Any, **options: Any) -> Any:
        with by_kernel():
            return forward(*args, **options)

    return run


def _twin(module: nn.Module, *, parameters: dict[str, Tensor] | None = None, modules: dict | None = None) -> nn.Module:
    """Returns a copy of the module with small weights. Its own weights, which may be sharded or on the meta device, are not touched."""
    twin = copy.copy(module)
    twin._parameters = {name: nn.Parameter(value) for name, value in (parameters or {}).items()}
    twin._modules = module._modules | (modules or {})
    return twin


def _first_equal(twin: nn.Module, candidates: dict[Callable, Forward]) -> Callable | None:
    x = 2 * _numbers(3, 5, _WIDTH)
    with torch.no_grad():
        try:
            expected = type(twin).forward(twin, x)
        except Exception:  # a forward with other arguments is not recognised
            return None
        for op, forward in candidates.items():
            if isinstance(expected, Tensor) and torch.allclose(forward(x), expected, rtol=_RELATIVE, atol=_ABSOLUTE):
                return op
    return None


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    # pyrefly: ignore[missing-attribute]  # nn.Module types every attribute as Tensor or Module
    linear.weight.data, linear.bias.data = _numbers(outputs, inputs) / inputs**0.5, _numbers(outputs)
    return linear


def _numbers(*shape: int) -> Tensor:
    """Returns constant fp32 numbers, without using the program's random state."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
