"""Cuts a model's weights over the tensor-parallel ranks.

Matches the plan against the model, cuts and rewires each module in the plan, and marks all other parameters as copied.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ztk.core.policies.tensor import Style, TensorPolicy, TensorRule
from ztk.core.runtime import Comm, Mesh
from ztk.core.runtime.part import Part, share_first_values
from ztk.nn.staged import Arguments, sequence_length
from ztk.parallel.tensor import collectives, layers
from ztk.parallel.tensor.derived import is_conv1d
from ztk.parallel.tensor.heads import Heads, count_own_heads, head_by_head, is_attention
from ztk.parallel.tensor.layers import TensorAxis
from ztk.parallel.tensor.loss import VocabularyParallelLoss
from ztk.parallel.tensor.tensor_plan import TensorPlan, plan_of

_KEY = "topology.tensor (tensor_parallel.autotp_size)"
_CUTS_NO_WEIGHT = (Style.partial, Style.loss)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardedTensors:
    """The result of cutting a model.

    parts: this rank's part of every parameter, by name. partial: copied parameters of which each rank computes a part of the gradient;
    the parts are summed over `comm` before ZeRO reads them. uneven: the first module whose outputs the ranks have unequal shares of, or "".
    """

    parts: dict[str, Part]
    partial: frozenset[str]
    comm: Comm
    uneven: str

    def check_dropout(self, model: nn.Module) -> None:
        """Raises ValueError for a model that trains with dropout and has tensors of unequal sizes on the ranks.

        Ranks that draw random numbers for such tensors would disagree on later draws for tensors that all of them have.
        """
        if self.uneven and (found := _dropout(model)):
            raise ValueError(
                f"topology.tensor={self.comm.size} does not divide {self.uneven}, so ranks would draw different numbers in dropout "
                f"({found}); use a degree that divides it, or a model without dropout"
            )

    def sum_partial_gradients(self, model: nn.Module) -> None:
        """Hooks the sums into the backward. Call it after ZeRO is built, which may replace parameters."""
        for name, parameter in model.named_parameters():
            if name in self.partial and parameter.requires_grad:
                parameter.register_hook(_summing(self.comm, name=name))


def full_plan(model: nn.Module, *, policy: TensorPolicy) -> TensorPlan:
    """The plan of a full model. Raises ValueError for a model without a plan, and for a plan with modules that it has not."""
    plan = plan_of(model) if policy.plan is None else TensorPlan.of(policy.plan)
    plan.matches(model)
    return plan


def shard_tensors(
    model: nn.Module, *, mesh: Mesh, policy: TensorPolicy, plan: TensorPlan | None = None
) -> ShardedTensors:
    """Cuts `model` in place; parameters on the meta device stay there. A collective call along "tp".

    plan: the `full_plan` of the model of which `model` is a pipeline stage.
    Raises ValueError for a plan that does not fit the model or the number of ranks.
    """
    comm, staged = mesh.comm("tp"), plan is not None
    matched = (plan or full_plan(model, policy=policy)).matches(model, is_stage=staged)
    if policy.sequence_parallel and not staged and not any(r.style is Style.vocabulary for r in matched.values()):
        raise ValueError(
            "topology.sequence_parallel=true: the model's tensor plan does not cut its embedding; use false"
        )
    matched |= _tied_embeddings(model, matched=matched)
    axis = TensorAxis(comm, sequence=policy.sequence_parallel)
    canonical = {parameter: name for name, parameter in model.named_parameters()}
    cutter = _Cutter(axis=axis, canonical=canonical)
    modules = dict(model.named_modules())
    for name, rule in matched.items():
        if rule.style is not Style.loss:
            cutter.cut(modules[name], name=name, rule=rule)
    for name, rule in matched.items():
        if rule.style is Style.loss:
            _replace_loss(model, name=name, comm=comm, sizes=cutter.head_sizes)
    _tell_attention(model, matched=matched)
    if policy.sequence_parallel and staged:
        _begin_stages(model, axis=axis)
    parts, partial = dict(cutter.parts), set(cutter.partial)
    for name, parameter in model.named_parameters():
        if name not in parts:
            share_first_values(parameter, comm=comm, name=name, key=_KEY)
            parts[name] = Part.everything(tuple(parameter.shape), replica=comm.rank)
            if policy.sequence_parallel:
                partial.add(name)
    return ShardedTensors(parts=parts, partial=frozenset(partial), comm=comm, uneven=cutter.uneven)


def _tied_embeddings(model: nn.Module, *, matched: Mapping[str, TensorRule]) -> dict[str, TensorRule]:
    """Rules for embeddings that are not in the plan although it cuts their tied weight in another module, as in plans of tied models. They
    become vocabulary-parallel.

    Raises ValueError for other modules that share a weight that is cut.
    """
    modules = dict(model.named_modules())
    weights = {
        name: getattr(modules[name], "weight", None)
        for name, rule in matched.items()
        if rule.style not in _CUTS_NO_WEIGHT
    }
    cut = {weight: name for name, weight in weights.items() if weight is not None}
    found = {}
    for name, module in modules.items():
        for leaf, parameter in module._parameters.items():
            if name in matched or parameter not in cut:
                continue
            other = matched[cut[parameter]]
            if not isinstance(module, nn.Embedding) or other.style in (Style.row, Style.row_split):
                raise ValueError(
                    f"tensor plan {cut[parameter]}={other.style.value}: {name} has the same {leaf}, which the plan would not "
                    f"cut there; name {name} in the plan, or leave both out"
                )
            found[name] = TensorRule(style=Style.vocabulary, grain=other.grain)
    return found


class _Cutter:
    def __init__(self, *, axis: TensorAxis, canonical: dict[nn.Parameter, str]) -> None:
        self.parts: dict[str, Part] = {}
        self.partial: set[str] = set()
        self.head_sizes: tuple[int, ...] = ()
        self.uneven = (
            ""  # the name of a module between whose outputs and the next sum ranks have tensors of unequal sizes
        )
        self._axis, self._canonical = axis, canonical
        self._made: dict[nn.Parameter, nn.Parameter] = {}  # tied weights stay tied

    def cut(self, module: nn.Module, *, name: str, rule: TensorRule) -> None:
        """Replaces the module's parameters by this rank's part, and its forward by one that communicates."""
        comm, style = self._axis.comm, rule.style
        if style is Style.partial:
            self.partial.update(self._canonical[parameter] for parameter in module.parameters())
            return
        if not isinstance(weight := getattr(module, "weight", None), nn.Parameter) or weight.dim() != 2:
            raise ValueError(
                f"tensor plan {name}={style.value}: {type(module).__name__} has no weight with two dimensions"
            )
        by_rows = style in (Style.row, Style.row_split)
        dim = int(by_rows != is_conv1d(module))  # a Conv1D stores [in, out]
        # pyrefly: ignore[bad-index]  # nn.Module types every attribute as Tensor or Module
        size = module.weight.shape[dim]
        own = self._range(size, name=name, grain=rule.grain, part=comm.rank)
        sizes = tuple(len(self._range(size, name=name, grain=rule.grain, part=rank)) for rank in range(comm.size))
        self._replace(module, leaf="weight", dim=dim, own=own)
        if not by_rows and isinstance(getattr(module, "bias", None), nn.Parameter):
            self._replace(module, leaf="bias", dim=0, own=own)
        if hasattr(module, "lora_A"):
            self._cut_adapter(module, by_rows=by_rows, own=own)
        self._rewire(module, name=name, style=style, own=own, sizes=sizes)

    def _cut_adapter(self, module: Any, *, by_rows: bool, own: range) -> None:
        """Cuts an adapter of ztk.nn.lora: B's outputs or A's inputs like the layer's. Each rank computes a part of the other one's
        gradient."""
        cut, copied = (module.lora_A, module.lora_B) if by_rows else (module.lora_B, module.lora_A)
        self._replace(cut.default, leaf="weight", dim=int(by_rows), own=own)
        self.partial.add(self._canonical[copied.default.weight])

    def _rewire(self, module: nn.Module, *, name: str, style: Style, own: range, sizes: tuple[int, ...]) -> None:
        match style:
            case Style.column:
                layers.cut_column(module, axis=self._axis, name=name)
                self.uneven = self.uneven or (name if len(set(sizes)) > 1 else "")
            case Style.head:
                layers.cut_column(module, axis=self._axis, name=name)
                self.head_sizes = sizes
            case Style.column_gathered:
                layers.cut_column_gathered(module, axis=self._axis, name=name, sizes=sizes)
            case Style.row:
                layers.cut_row(module, axis=self._axis, name=name)
            case Style.row_split:
                layers.cut_row(module, axis=self._axis, name=name)
                layers.split_input(module, axis=self._axis, name=name, sizes=sizes)
            case Style.vocabulary:
                layers.cut_vocabulary(module, axis=self._axis, name=name, words=own)

    def _range(self, size: int, *, name: str, grain: int, part: int) -> range:
        parts = self._axis.comm.size
        try:
            return part_range(size, part=part, parts=parts, grain=grain)
        except ValueError:
            raise ValueError(
                f"topology.tensor={parts}: {name} has {size // grain} units of {grain} to distribute; "
                f"use topology.tensor={max(1, size // grain)} or less"
            ) from None

    def _replace(self, module: nn.Module, *, leaf: str, dim: int, own: range) -> None:
        old = getattr(module, leaf)
        name = self._canonical[old]
        part = Part.cut(tuple(old.shape), dim=dim, start=own.start, stop=own.stop)
        if self.parts.setdefault(name, part) != part:
            raise ValueError(f"tensor plan: {name} is shared by modules that the plan cuts in different ways")
        if old not in self._made:
            share_first_values(old, comm=self._axis.comm, name=name, key=_KEY)
            self._made[old] = nn.Parameter(part.of(old.detach()).clone(), requires_grad=old.requires_grad)
        module._parameters[leaf] = self._made[old]


def _tell_attention(model: nn.Module, *, matched: Mapping[str, TensorRule]) -> None:
    """Updates the numbers of heads in attention layers that are cut between heads."""
    heads, widths = Heads.of(getattr(model, "config", None)), dict[str, list[int]]()
    for name, rule in matched.items():
        owner = name.rpartition(".")[0]
        if heads is not None and rule.style is Style.column and is_attention(owner):
            module = model.get_submodule(name)
            # pyrefly: ignore[bad-index]  # nn.Module types every attribute as Tensor or Module
            size = module.weight.shape[int(is_conv1d(module))]
            fused = head_by_head(model.get_submodule(owner))
            widths.setdefault(owner, []).append(size // 3 if fused else size)
    for owner, found in widths.items():
        count_own_heads(model.get_submodule(owner), heads=heads, widths=found)


def _dropout(model: nn.Module) -> str:
    """The name of a dropout that draws numbers, or ""."""
    elsewhere = ("classifier", "summary")  # heads that a decoder does not have
    of_config = getattr(getattr(model, "config", None), "__dict__", {})  # attention's is called as a function
    for name, value in of_config.items():
        if (
            name.endswith(("dropout", "pdrop"))
            and not name.startswith(elsewhere)
            and isinstance(value, float)
            and value
        ):
            return name
    return next((name for name, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0), "")


def _replace_loss(model: nn.Module, *, name: str, comm: Comm, sizes: tuple[int, ...]) -> None:
    owner, _, leaf = name.rpartition(".")
    original = model.get_submodule(name)
    made = VocabularyParallelLoss(comm, sizes=sizes, z_loss=getattr(original, "z_loss", 0.0))
    setattr(model.get_submodule(owner), leaf, made.train(original.training))


def _begin_stages(model: nn.Module, *, axis: TensorAxis) -> None:
    """Begins a pass in the forward of pipeline stages after the first, which have no embedding to begin it."""
    original = model.forward

    @functools.wraps(original)
    def forward(stage: int, carry: object, batch: Arguments) -> object:
        axis.begin(sequence_length(batch, carry=carry, parts=axis.comm.size))
        return original(stage, carry, batch)

    model.forward = forward


def _summing(comm: Comm, *, name: str) -> Callable[[Tensor], Tensor]:
    def summed(gradient: Tensor) -> Tensor:
        return collectives.summed(gradient, comm=comm, label=f"gradient of {name}")

    return summed


def part_range(size: int, *, part: int, parts: int, grain: int = 1) -> range:
    """The range of part number `part` when `size` elements are cut into `parts` ranges of complete grains. Larger ranges come first.

    Raises ValueError if `size` is not a multiple of `grain`, or if a part would be empty.
    """
    units, rest = divmod(size, grain)
    if rest or units < parts:
        raise ValueError(f"{size} elements in grains of {grain} cannot be cut into {parts} parts")
    base, larger = divmod(units, parts)
    start = part * base + min(part, larger)
    return range(start * grain, (start + base + (part < larger)) * grain)
