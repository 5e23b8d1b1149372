"""The user's objects and keys: nodes with a `_target_`, as in Hydra, and the group `user`.

A section with a `_target_` holds the arguments of one object. Of ztk's keys it has only the ones in `OBJECTS`. Its node is stored in
`Config.own`, and the typed section gets neutral values, which satisfy every rule.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, get_args, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from ztk.core.policies.config import Config
from ztk.core.policies.reward import RewardConfig

TARGET, SCHEMA, USER, CALLBACKS = "_target_", "_schema_", "user", "callbacks"
# Groups without keys of ztk.
FREE = {
    USER: "Your own keys: any name, nested as you like. user._schema_=MODULE.CLASS, a dataclass, gives them types and defaults.",
    CALLBACKS: "Objects with methods that the training loop calls: callbacks.NAME._target_=MODULE.CLASS.",
    "loss": "An own loss: loss._target_=MODULE.NAME, a function or class that takes the model's outputs and the batch's targets.",
}
SHARE = "share"  # the argument of own data that ztk passes
_OF_REWARDS = (  # arguments of reward functions
    *("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"),
    *("prompt", "answer", "record"),
)
_ENDLESS = 1 << 30
_TRAINING = ("pretrain", "plan")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Object:
    """A section that may hold an object of the user's.

    tasks: the tasks that use the object; () for all. neutral: the values of ztk's section with an object. kept: keys of ztk that then apply,
    too. read: keys of the node that ztk also reads. passed: number of positional arguments that ztk passes before the node's keys.
    """

    tasks: tuple[str, ...] = ()
    neutral: dict[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    passed: int = 0


OBJECTS = {
    "model": _Object(
        tasks=_TRAINING,
        neutral={
            "vocab_size": 256,
            "dim": 0,
            "layers": _ENDLESS,
            "heads": 0,
            "kv_heads": 0,
            "max_seq_len": _ENDLESS,
        },
        read=("vocab_size",),
    ),
    "data": _Object(tasks=_TRAINING, neutral={"name": "synthetic", "seq_len": 0}, read=("seq_len",)),
    "optimizer": _Object(
        tasks=_TRAINING,  # other tasks build ztk's own
        neutral={"name": "adamw", "lr": 0.0, "weight_decay": 0.0, "clip_grad_norm": 0.0},
        kept=("clip_grad_norm", "skip_unused", "elementwise", "needs_closure"),
        read=("lr",),
        passed=1,
    ),
    "scheduler": _Object(neutral={"name": "constant", "warmup_steps": 0}),
    "reward": _Object(tasks=("grpo", "ppo"), kept=tuple(vars(RewardConfig()))),
    "task": _Object(
        neutral={"name": "pretrain", "module": "ztk.experiments.pretrain"}, kept=("name", "module"), passed=1
    ),
    "loss": _Object(tasks=_TRAINING),
    CALLBACKS: _Object(tasks=_TRAINING),
}


class Recorded(dict):
    """A node of a record. It is compared, and `instantiate` refuses it."""


def recorded(value: Any) -> Any:
    """Returns nested values whose mappings are `Recorded`."""
    if isinstance(value, Mapping):
        return Recorded({key: recorded(entry) for key, entry in value.items()})
    return [recorded(entry) for entry in value] if isinstance(value, list) else value


def is_own_key(config: Config, *, key: str) -> bool:
    """Returns whether `key` belongs to a user's object."""
    section, _, name = key.partition(".")
    return section in config.own and name not in OBJECTS[section].kept


def is_emptied(name: str, *, words: Iterable[str]) -> bool:
    """Returns whether a command line takes away all of a section, by `~NAME` or `NAME=null`."""
    return not {f"~{name}", f"{name}=", f"{name}=null"}.isdisjoint(words)


def empty_free(choices: DictConfig, *, overrides: Sequence[str]) -> None:
    """Takes away everything that options and experiments set in a section of `FREE` that the command line takes away.

    Hydra takes away only the choice of an option where a folder of options has the section's name.
    """
    for name in FREE:
        if is_emptied(name, words=overrides):
            choices[name] = {}


def keyless(choices: DictConfig) -> Iterator[str]:
    """Yields one line per section whose keys an option file replaced by a single value. An empty `user` is no fault."""
    for section in (*OBJECTS, USER):
        if not isinstance(node := choices.get(section) or {}, DictConfig | ListConfig | dict):
            choices[section] = {}  # the other faults can be looked for
            choose = "" if section in FREE else f", or choose by `override /{section}: {node}` in the defaults list"
            yield f"{section}: {node} takes the place of its keys; set {section}.KEY{choose}"


def take_user(choices: DictConfig) -> list[str]:
    """Converts the group `user` to its `_schema_`, including defaults, before other groups refer to it. Returns one line per fault."""
    user = choices.get(USER)
    name = None if user is None else user.get(SCHEMA)
    if name is None:
        return []
    try:
        schema = find(name)
    except (Exception, SystemExit) as error:
        return [_not_found(f"{USER}.{SCHEMA}", name=name, error=error)]
    if not is_dataclass(schema):
        return [f"{USER}.{SCHEMA}={name}: is no dataclass: name one, with a type and a default for every key"]
    own = {key: user._get_node(key) for key in user if key != SCHEMA}
    try:
        typed = OmegaConf.merge(OmegaConf.structured(schema), own)
    except OmegaConfBaseException as error:
        return [f"{USER}.{error.full_key or error.key}: {str(error).splitlines()[0]} ({USER}.{SCHEMA}={name})"]
    with open_dict(choices):
        choices[USER] = typed
    return []


def nameless(values: Mapping[str, Any]) -> list[str]:
    """Returns one line per section whose option leaves the object to the command line, if the line does not name one."""
    nodes = {section: values.get(section) for section in OBJECTS}
    return [
        f"{section}=own names no object: use {section}.{TARGET}=MODULE.NAME"
        for section, node in nodes.items()
        if isinstance(node, Mapping) and node.get(TARGET) == "???"
    ]


def take_objects(values: dict[str, Any]) -> dict[str, Any]:
    """Moves the nodes with a `_target_` out of a configuration and leaves neutral sections. values: resolved and plain; changed in
    place.
    """
    own = {}
    for section, kind in OBJECTS.items():
        node = values.get(section)
        if section in FREE:
            values.pop(section, None)
            if node:
                own[section] = node
        elif isinstance(node, Mapping) and TARGET in node:
            kept = {key: value for key, value in node.items() if key in kind.kept and value is not None}
            own[section] = {key: value for key, value in node.items() if key not in kind.kept}
            read = {key: node[key] for key in kind.read if isinstance(node.get(key), int | float)}
            named = {"name": str(node[TARGET])} if section == "model" else {}
            unset = {
                key: None
                for key, hint in get_type_hints(get_type_hints(Config)[section]).items()
                if type(None) in get_args(hint)
            }
            values[section] = unset | kind.neutral | named | kept | read
    return own


def written_user(user: Any) -> dict[str, Any]:
    """Returns the group `user` in the form that `take_user` reads."""
    values: Any = OmegaConf.to_container(
        OmegaConf.structured(user) if is_dataclass(user) else OmegaConf.create(user), enum_to_str=True
    )
    return {SCHEMA: f"{type(user).__module__}.{type(user).__qualname__}", **values} if is_dataclass(user) else values


def nodes_of(config: Config) -> dict[str, Any]:
    """Returns section -> its keys for all objects of the user, including the keys of ztk in `OBJECTS`."""
    found: dict[str, Any] = {}
    for section, node in config.own.items():
        kept = {key: getattr(getattr(config, section), key) for key in OBJECTS[section].kept}
        found[section] = node | {key: value for key, value in kept.items() if value is not None}
    return found


def own_faults(config: Config) -> Iterator[str]:
    """Yields one line per object that this run does not use, that cannot be imported, or that does not accept its keys."""
    for section, node in config.own.items():
        tasks = OBJECTS[section].tasks
        if tasks and config.task.name not in tasks:
            yield f"{section}: an own one has no effect with task={config.task.name}, only with task={' or '.join(tasks)}: leave it out"
        if section == CALLBACKS:
            for name, entry in callback_nodes(node).items():
                yield from _node_faults(f"{CALLBACKS}.{name}" if name else CALLBACKS, node=entry, given=config.given)
        else:
            yield from _node_faults(section, node=node, given=config.given)
    if "optimizer" in config.own and TARGET in config.own["optimizer"]:
        yield from _optimizer_faults(config)


def callback_nodes(node: Any) -> dict[str, Any]:
    """Returns `callbacks` as name -> node. Accepts one object, named objects, or a list."""
    if isinstance(node, Mapping):
        return {"": node} if TARGET in node else dict(node)
    return {str(number): entry for number, entry in enumerate(node)}


def _node_faults(section: str, *, node: Any, given: Container[str]) -> Iterator[str]:
    """given: the keys that the user has set."""
    if not isinstance(node, Mapping) or TARGET not in node:
        yield f"{section}: names no object: use {section}.{TARGET}=MODULE.NAME"
        return
    target = node[TARGET]
    try:
        found = find(target)
    except (Exception, SystemExit) as error:
        yield _not_found(f"{section}.{TARGET}", name=target, error=error)
        return
    if not callable(found):
        yield f"{section}.{TARGET}={target}: is a {type(found).__name__}, which cannot be called: name a class or a function"
        return
    faults = list(_argument_faults(section, node=node, found=found, given=given))
    for key, inner in node.items():
        if isinstance(inner, Mapping) and TARGET in inner:
            faults += _node_faults(f"{section}.{key}", node=inner, given=given)
    if section == "scheduler" and getattr(found, "__name__", "") == "ReduceLROnPlateau":
        faults.append(
            f"scheduler.{TARGET}={target}: follows a measured loss, and a schedule depends on the step alone: use another scheduler, or set "
            "the rate in a callback"
        )
    yield from faults


def _argument_faults(section: str, *, node: Mapping[str, Any], found: Any, given: Container[str]) -> Iterator[str]:
    """Yields a fault for keys that the object does not accept or that do not reach it, and for some required ones that a class lacks."""
    keys = {key: value for key, value in node.items() if not (key.startswith("_") and key.endswith("_"))}
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return  # implemented in C, without a signature
    complete = inspect.isclass(found) and not node.get("_partial_") and "_args_" not in node and section != "scheduler"
    passed = {SHARE: None} if section == "data" and takes_share(found) else {}
    if passed and SHARE in keys:
        yield f"{section}.{SHARE}: ztk passes this argument, the part of each batch that belongs to a rank: leave it out"
        return
    kept = OBJECTS[section].kept if section in OBJECTS else ()
    for name in kept:
        if name in signature.parameters and f"{section}.{name}" in given:
            yield (
                f"{section}.{name}: is a key of ztk's, and the argument {name!r} of {section}.{TARGET}={node[TARGET]} would not get its value: "
                "rename the argument"
            )
    if section == "reward" and (clash := [name for name in keys if name in _OF_REWARDS]):
        yield f"{section}.{clash[0]}: every call passes this argument: rename it"
    try:
        positional = [None] * (OBJECTS[section].passed if section in OBJECTS else 0)
        (signature.bind if complete else signature.bind_partial)(*positional, **(keys | passed))
    except TypeError as error:
        taken = ", ".join(name for name in signature.parameters if name != "self")
        needs = section == "data" and f"argument: '{SHARE}'" in str(error)
        usual = "keyword argument 'name'" in str(error) and section in OBJECTS and section not in FREE
        fix = (
            f"; take ztk's option away by {section}=own, in an option file `override /{section}: own`" if usual else ""
        )
        fix = f"; ztk passes it to a parameter `{SHARE}: ztk.data.Share`" if needs else fix
        yield f"{section}.{TARGET}={node[TARGET]}: {error}; it takes ({taken}){fix}"


def takes_share(found: Any) -> bool:
    """Returns whether ztk passes `ztk.data.Share` to own data: to a parameter `share` with this class as its type."""
    try:
        parameter = inspect.signature(found).parameters.get(SHARE)
    except (TypeError, ValueError):
        return False  # implemented in C, without a signature
    return parameter is not None and _is_share(parameter.annotation)


def _is_share(annotation: Any) -> bool:
    """Accepts the class, its name as a text, and an optional one."""
    if isinstance(annotation, str):
        return any(part.strip().rpartition(".")[2] == "Share" for part in annotation.strip("'\"").split("|"))
    named = f"{getattr(annotation, '__module__', '')}.{getattr(annotation, '__qualname__', '')}"
    return named == "ztk.data.stream.Share" or any(map(_is_share, get_args(annotation)))


def _optimizer_faults(config: Config) -> Iterator[str]:
    """Yields the faults of an own optimizer's object and declaration, and of its use with a model that is divided over ranks."""
    import torch  # imported late: the command line imports torch only for objects that need it

    from ztk.optim import TorchStep
    from ztk.optim.elementwise import is_elementwise

    node = config.own["optimizer"]
    target = node[TARGET]
    if list(_node_faults("optimizer", node=node, given=config.given)):
        return
    try:
        shapes = ((320,), (8, 32), (160, 144), (4,))
        parameters = {str(number): torch.nn.Parameter(torch.zeros(shape)) for number, shape in enumerate(shapes)}
        made = instantiate(node, list(parameters.values()))
        if not isinstance(made, torch.optim.Optimizer):
            yield f"optimizer.{TARGET}={target}: is no torch.optim.Optimizer but a {type(made).__name__}"
        elif config.optimizer.elementwise or is_elementwise(made):
            TorchStep(made, parameters=parameters)
        else:
            for axis in ("pipeline", "tensor", "expert"):
                if (degree := getattr(config.topology, axis)) > 1:
                    yield (
                        f"optimizer.{TARGET}={target}: steps full parameters, and topology.{axis}={degree} divides the model over ranks: use "
                        f"topology.{axis}=1, or optimizer.elementwise=true if it updates every element by itself"
                    )
    except ValueError as error:
        yield str(error)
    except Exception as error:
        yield f"optimizer.{TARGET}={target}: {type(error).__name__}: {error}"


def _not_found(key: str, *, name: Any, error: BaseException) -> str:
    place, trace = "", error.__traceback__
    while trace is not None:  # finds the last line outside the import system
        if not trace.tb_frame.f_code.co_filename.startswith("<") and trace.tb_frame.f_code.co_filename != __file__:
            place = f" ({trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno})"
        trace = trace.tb_next
    said: Any = error
    if isinstance(error, SyntaxError):
        place, said = f" ({error.filename}, line {error.lineno})", error.msg
    fix = "" if place else "; name MODULE.NAME in the current folder, in the parent of --config-dir, or installed"
    return f"{key}={name}: {type(error).__name__}: {said}{place}{fix}"


def find(path: Any) -> Any:
    """Returns the object of a dotted path.

    Raises ModuleNotFoundError for a missing module, AttributeError for a name that its module lacks, and else the error of the import.
    """
    parts = str(path).split(".")
    for count in range(len(parts), 0, -1):
        name = ".".join(parts[:count])
        try:
            exists = all(parts) and importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            exists = False  # the parent is not a package, or its own import fails, which the next iteration raises
        if exists:
            found = importlib.import_module(name)
            for part in parts[count:]:
                found = getattr(found, part)
            return found
    raise ModuleNotFoundError(f"No module named {parts[0]!r}")


def target_of(node: Mapping[str, Any]) -> Any:
    """Imports and returns the class or function of a node. Raises ValueError for a node of a record, and as `find`."""
    if isinstance(node, Recorded):
        raise ValueError(f"{TARGET}={node[TARGET]}: is named by the record of a run, and reading a record runs no code")
    return find(node[TARGET])


def instantiate(node: Mapping[str, Any], *passed: Any, **more: Any) -> Any:
    """Creates the object of a node like `hydra.utils.instantiate`. passed, more: arguments in addition to the node's keys.

    Raises ValueError for a node of a record.
    """
    from hydra.utils import instantiate as hydra_instantiate

    target_of(node)
    return hydra_instantiate(dict(node), *passed, _convert_="all", **more)


def call_later(node: Mapping[str, Any]) -> Any:
    """Returns a callable for repeated use: an instance of a class, or a function with the node's keys bound."""
    return instantiate(node if inspect.isclass(target_of(node)) else {**node, "_partial_": True})
