"""Finds parameters and attributes that share memory in a model, before the engine moves the parameters into its buffers.

An engine gives every parameter a place of its own, so tensors that shared its memory would silently keep old values: parameters tied by
`a.data = b.data`, a parameter that is a view of another one, or an attribute or buffer that is a view of a parameter.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ztk.zero.parameters.partitioned import partitioned_of


def check_aliases(model: nn.Module) -> None:
    """Raises ValueError for a trained parameter that shares elements with another parameter or an attribute."""
    named = {name: parameter for name, parameter in model.named_parameters() if _has_memory(parameter)}
    by_storage: dict[int, list[tuple[str, nn.Parameter]]] = {}
    for name, parameter in named.items():
        by_storage.setdefault(parameter.untyped_storage()._cdata, []).append((name, parameter))
    for sharing in by_storage.values():
        open_: list[tuple[str, nn.Parameter]] = []  # parameters that may overlap the next one
        for name, parameter in sorted(sharing, key=lambda entry: _span(entry[1]).start):
            open_ = [entry for entry in open_ if _span(entry[1]).stop > _span(parameter).start]
            for other_name, other in open_:
                if (parameter.requires_grad or other.requires_grad) and _overlap(parameter, other):
                    both = " and ".join(sorted((other_name, name)))
                    raise ValueError(
                        f"parameters {both} share memory, but are two parameters (tied by .data, or one is a view of the "
                        "other): the engine gives each its own place, which would untie them. Use one parameter in both modules "
                        "(a.weight = b.weight), and transpose or slice it in the forward"
                    )
            open_.append((name, parameter))
    for name, tensor in _attributes(model):
        for owner, parameter in by_storage.get(tensor.untyped_storage()._cdata, ()):
            if parameter.requires_grad and _overlap(tensor, parameter):
                raise ValueError(
                    f"{name} is a view of parameter {owner}: the engine moves parameters, and the view would keep old values. Make it in the "
                    "forward, or a property, or a copy (clone())"
                )


def check_initialized(model: nn.Module) -> None:
    """Raises ValueError for a parameter of a lazy module, which has neither shape nor values before its first forward."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"parameter {name} of a lazy module has no shape yet: run one forward of the model before initialize (or parallelize), as "
                "with torch.no_grad(): model(batch)"
            )


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules hold in addition to their parameters, except those that a hook recomputes before every forward."""
    for prefix, module in model.named_modules():
        computed = {
            getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()
        }  # old weight_norm, spectral_norm
        for key, value in (*module._buffers.items(), *module.__dict__.items()):
            for tensor in value if isinstance(value, (list, tuple)) else (value,):
                is_plain = isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter)
                if is_plain and key not in computed and _has_memory(tensor):
                    yield f"{prefix}.{key}".lstrip("."), tensor


def _has_memory(tensor: Tensor) -> bool:
    is_here = not tensor.is_meta and tensor.layout is torch.strided and not nn.parameter.is_lazy(tensor)
    return is_here and tensor.numel() > 0 and partitioned_of(tensor) is None


def _span(tensor: Tensor) -> range:
    """The bytes of the storage from the tensor's first element to its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.storage_offset() * tensor.element_size()
    return range(start, start + (last + 1) * tensor.element_size())


def _overlap(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one storage have an element in common."""
    spans = _span(first), _span(second)
    if spans[0].stop <= spans[1].start or spans[1].stop <= spans[0].start:
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True
    marks = torch.zeros(
        first.untyped_storage().nbytes() // first.element_size(), dtype=torch.bool
    )  # interleaved, such as two columns
    marks.as_strided(first.shape, first.stride(), first.storage_offset()).fill_(True)
    return first.dtype != second.dtype or bool(
        marks.as_strided(second.shape, second.stride(), second.storage_offset()).any()
    )
