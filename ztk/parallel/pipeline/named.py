"""A user's module as layers: the modules that its forward runs one after another."""

from collections.abc import Callable

from torch import fx, nn
from torch.nn import ModuleList, Sequential

from ztk.parallel.pipeline.layers import BuiltLayers, Carry, Layer, MicroBatch

PLAN = "pipeline_plan"  # the attribute of a model that lists its layers


class NamedLayers(BuiltLayers):
    """See `LayeredModel`. Every layer takes the output of the one before it as its only argument, and the first takes `inputs`.

    The layers are the children of a Sequential, or the modules in the model's attribute `pipeline_plan`, where a ModuleList or Sequential
    stands for all its elements. The forward of the model's class has to run exactly these modules, because a stage does not run it.

    inputs: returns the first layer's argument from a micro-batch. finish: returns the loss from the last layer's output and a micro-batch.
    finish_modules: paths of the modules that `finish` uses.

    A parameter that several layers share stays, under its one name, on all stages that use it.

    Raises:
        ValueError: for a model without such layers, for a forward that does anything else, and for parameters outside the layers.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        inputs: Callable[[MicroBatch], Carry],
        finish: Callable[[Carry, MicroBatch], Carry],
        finish_modules: tuple[str, ...] = (),
    ) -> None:
        self.module = model
        names = _layer_names(model)
        if type(model).forward is not Sequential.forward:
            _check_forward(model, names=names)
        needed = _modules_of_layers(model, names=names, finish_modules=finish_modules)
        self._inputs, self._finish, last = inputs, finish, len(names) - 1
        self.layers = [
            self._named(name, modules=needed[name], is_first=index == 0, is_last=index == last)
            for index, name in enumerate(names)
        ]

    def _named(self, name: str, *, modules: tuple[str, ...], is_first: bool, is_last: bool) -> Layer:
        module = self.module.get_submodule(name)

        def run(carry: Carry, batch: MicroBatch) -> Carry:
            output = module(self._inputs(batch) if is_first else carry)
            return self._finish(output, batch) if is_last else output

        return self.layer(name, modules=modules, run=run)


def _layer_names(model: nn.Module) -> list[str]:
    """Paths of the layers in order. Raises ValueError for a model without a plan, and for one that names no modules or one twice."""
    kind = type(model).__name__
    plan = getattr(model, PLAN, None)
    if plan is None and isinstance(model, Sequential):
        plan = [name for name, _ in model.named_children() if name != "own_loss"]
    if plan is None:
        raise ValueError(
            f"topology.pipeline: {kind} cannot be cut into stages; give the class an attribute {PLAN} with the names of its modules in the "
            f"order in which its forward runs them, such as {PLAN} = ['embedding', 'layers', 'output'], make it a torch.nn.Sequential or a "
            "ztk.parallel.pipeline.PipelineModule, or use topology.pipeline=1"
        )
    if isinstance(plan, str) or not all(isinstance(name, str) for name in plan):
        raise ValueError(f"{kind}.{PLAN}={plan!r}: must be a list of names of modules")
    names = [path for name in plan for path in _elements(model, name=name)]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{kind}.{PLAN}: {name} is there twice; a stage runs a layer once, so list it once")
    return names


def _elements(model: nn.Module, *, name: str) -> list[str]:
    try:
        module = model.get_submodule(name)
    except AttributeError:
        known = ", ".join(child for child, _ in model.named_children())
        raise ValueError(f"{type(model).__name__}.{PLAN}: the model has no module {name}; it has {known}") from None
    is_list = isinstance(module, ModuleList) or type(module) is Sequential
    return [f"{name}.{child}" for child, _ in module.named_children()] if is_list else [name]


class _Tracer(fx.Tracer):
    """Records the calls of the layers, without looking into them."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self._paths = {f"model.{name}" for name in names}

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._paths or super().is_leaf_module(m, module_qualified_name)


class _OneArgument(nn.Module):
    """Runs the forward of a model's class with one argument, and defaults for the others."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Carry) -> Carry:
        return type(self.model).forward(self.model, inputs)


def _check_forward(model: nn.Module, *, names: list[str]) -> None:
    """Raises ValueError if the model's forward does anything but pass its argument through the layers `names`, one after another."""
    kind = type(model).__name__
    fix = f"move all computation into the modules of {PLAN}, or use topology.pipeline=1"
    try:
        graph = _Tracer(names).trace(_OneArgument(model))
    except Exception as error:
        raise ValueError(
            f"{kind}.{PLAN}: its forward depends on values or sizes of its inputs ({type(error).__name__}: {error}), and stages run the "
            f"modules alone; {fix}"
        ) from error
    first, *nodes = graph.nodes
    last, left = first, list(names)
    for node in nodes:
        is_chain = node.args == (last,) and not node.kwargs
        if node.op == "call_module" and is_chain and left and node.target == f"model.{left[0]}":
            left.pop(0)
            last = node
        elif not (node.op == "output" and is_chain and not left):
            expected = f"the call of {left[0]} with the output of the module before" if left else "its end"
            raise ValueError(
                f"{kind}.{PLAN}: its forward has {_described(node)} in place of {expected}, and stages run the modules alone; {fix}"
            )


def _described(node: fx.Node) -> str:
    match node.op:
        case "call_module":
            return f"a call of {str(node.target).removeprefix('model.')}"
        case "get_attr":
            return f"the attribute {str(node.target).removeprefix('model.')}"
        case "output":
            return "its end"
    return f"the operation {getattr(node.target, '__name__', node.target)}"


def _modules_of_layers(
    model: nn.Module, *, names: list[str], finish_modules: tuple[str, ...]
) -> dict[str, tuple[str, ...]]:
    """The paths of the modules that each layer needs: its own first, then those whose parameters it shares, and the loss's for the last.

    Raises ValueError for parameters that belong to no layer.
    """
    owner_of: dict[nn.Parameter, str] = {}
    outside = []
    for name, parameter in model.named_parameters():
        owners = [path for path in (*names, *finish_modules) if name.startswith(f"{path}.")]
        if owners:
            owner_of[parameter] = owners[0]
        else:
            outside.append(name)
    if outside:
        raise ValueError(
            f"{type(model).__name__}.{PLAN}: the parameters {', '.join(outside)} belong to none of its modules, and no stage would train "
            f"them; move them into a module of {PLAN}"
        )
    needed = {}
    for name in names:
        own = (name, *(finish_modules if name == names[-1] else ()))
        shared = (owner_of[parameter] for path in own for parameter in model.get_submodule(path).parameters())
        needed[name] = tuple(dict.fromkeys((*own, *shared)))
    return needed
