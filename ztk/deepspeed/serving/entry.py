"""`init_inference`: builds an inference engine from a script's model and configuration."""

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ztk.core.runtime import Comm, Process, Topology
from ztk.core.runtime.part import Part
from ztk.deepspeed.config import DeepSpeedConfigError, Settings, parse_config, read_source
from ztk.deepspeed.engine.deepspeed_engine import DeepSpeedEngine
from ztk.deepspeed.engine.owners import owner_of
from ztk.deepspeed.experts import expert_degree
from ztk.deepspeed.pipe.module import PipelineModule
from ztk.deepspeed.serving.config import DeepSpeedInferenceConfig
from ztk.deepspeed.serving.inference_engine import InferenceEngine
from ztk.deepspeed.serving.weights import load_weights
from ztk.deepspeed.start.build import Builder
from ztk.deepspeed.start.mesh import arranged, parts_of
from ztk.deepspeed.start.process import arrange, this_process
from ztk.deepspeed.tools.log import logger, show_messages
from ztk.hf.kernels import inject_kernels
from ztk.parallel.tensor import Heads, Style, TensorPolicy, TensorRule, is_attention, plan_of, shard_tensors
from ztk.zero.parameters.partitioned import partitioned_of

_cut: WeakIdKeyDictionary = WeakIdKeyDictionary()  # models with permanently cut layers -> number of ranks


def init_inference(model: nn.Module, config: object = None, **kwargs: object) -> InferenceEngine:
    """DeepSpeed's `init_inference`. A collective call.

    model: a plain module, changed in place and available as the engine's `module`.
    config: dict, path, or base64 of JSON. Keyword arguments are further keys.

    Raises DeepSpeedConfigError (a ValueError) with every fault of the configuration, and ValueError for an unsuitable model.
    """
    settings = DeepSpeedInferenceConfig(**_merged(config, kwargs))
    process = _arranged(settings, process=this_process())
    zero = settings_of(settings, replicas=process.mesh.replicas)
    show_messages(None)
    _check(model, sharded=zero is not None, has_checkpoint=settings.checkpoint is not None)
    cut = _cut_of(model, config=settings, process=process)
    if settings.checkpoint is not None:
        load_weights(model, checkpoint=settings.checkpoint, base_dir=settings.base_dir)
    injection = inject_kernels(model) if settings.replace_with_kernel_inject else None
    parts = _cut_model(model, policy=cut, process=process) if cut is not None else None
    streaming = _placed(model, config=settings, zero=zero, process=process, parts=parts)
    if parts is not None:
        _share_random_states(process.mesh.comm("tp"))
    notes = settings.notes + notes_of(settings, settings=zero)
    if injection is not None:
        notes += (f"replace_with_kernel_inject: {injection}",)
    if process.rank == 0:
        for note in notes:
            logger.info("init_inference: %s", note)
    return InferenceEngine(
        model, config=settings, process=process, injection=injection, streaming=streaming, notes=notes
    )


def _merged(config: object, given: Mapping[str, object]) -> dict[str, object]:
    """Merges both sources. Raises DeepSpeedConfigError for a key with different values."""
    of_config = {} if config is None else dict(config) if isinstance(config, Mapping) else read_source(config)
    faults = [
        f"{name}: is {of_config[name]!r:.60} in config and {value!r:.60} as an argument; keep one"
        for name, value in given.items()
        if name in of_config and of_config[name] != value
    ]
    if faults:
        raise DeepSpeedConfigError(faults)
    return of_config | dict(given)


def _arranged(config: DeepSpeedInferenceConfig, *, process: Process) -> Process:
    """Returns the process in a mesh with the configured number of ranks per model; further ranks are replicas."""
    if config.tensor_parallel.mpu is not None:
        return arranged(process, config.tensor_parallel.mpu)
    degree, world = config.tensor_parallel.tp_size, process.world_size
    if world % degree:
        raise DeepSpeedConfigError(
            [
                f"tensor_parallel.tp_size={degree} (mp_size): {world} ranks cannot be divided by {degree}; start {degree} ranks, by "
                f"python -m ztk.deepspeed --num_gpus {degree} script.py, or use tp_size={_divisor(world, below=degree)}"
            ]
        )
    return arrange(process, Topology(tensor=degree))


def _divisor(number: int, *, below: int) -> int:
    return max(size for size in range(1, below) if number % size == 0)


def _check(model: nn.Module, *, sharded: bool, has_checkpoint: bool) -> None:
    """Raises for models that cannot be used for inference in their current form."""
    if not isinstance(model, nn.Module) or isinstance(model, (DeepSpeedEngine, InferenceEngine)):
        raise ValueError(
            f"model={type(model).__name__}: must be a module without an engine around it; pass engine.module"
        )
    if isinstance(model, PipelineModule):
        raise ValueError("model=PipelineModule: not offered, by DeepSpeed neither; initialize's engine has eval_batch")
    if any(owner_of(parameter) is not None for parameter in model.parameters()):
        raise ValueError(
            "model: belongs to another engine; call its destroy() before, which leaves the weights in the model"
        )
    if model in _cut:
        raise ValueError(f"model: its layers are cut over {_cut[model]} ranks already; load it anew")
    if expert_degree(model) > 1:
        raise ValueError(
            "model: has MoE layers with ep_size > 1; initialize(model=..., config=...) without an optimizer evaluates it"
        )
    partitioned = any(partitioned_of(parameter) is not None for parameter in model.parameters())
    if partitioned and not sharded:
        raise ValueError('model: was built under zero.Init, its parameters are sharded; give zero={"stage": 3}')
    if partitioned and has_checkpoint:
        raise ValueError("checkpoint: the model was built under zero.Init; load it by from_pretrained there")
    if not has_checkpoint and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("model: lies on the meta device and has no weights; give checkpoint=")


def _cut_model(model: nn.Module, *, policy: TensorPolicy, process: Process) -> dict[str, Part]:
    """Cuts the model over the tensor-parallel ranks. A collective call."""
    _cut[model] = degree = process.mesh.comm("tp").size
    try:
        return shard_tensors(model, mesh=process.mesh, policy=policy).parts
    except ValueError as error:
        raise ValueError(f"tensor_parallel.tp_size={degree}: {error}") from None


def _cut_of(model: nn.Module, *, config: DeepSpeedInferenceConfig, process: Process) -> TensorPolicy | None:
    """Returns the plan of the cut, or None if every rank has the full model. Raises ValueError if there is neither a policy nor a plan."""
    if process.mesh.comm("tp").size == 1:
        return None
    # pyrefly: ignore[missing-attribute]  # with mpu the model has parts
    if config.tensor_parallel.mpu is not None and not all(p.is_full for p in parts_of(model, process=process).values()):
        raise ValueError("mpu: the model is cut over ranks already; initialize(model=..., mpu=...) evaluates it")
    policy = config.injection_policy
    if config.injection_policy_tuple is not None:
        policy = policy_of(model, suffixes=config.injection_policy_tuple)
    if policy is not None:
        return TensorPolicy(plan=rules_of_policy(model, policy=policy))
    try:
        plan_of(model)
    except ValueError:
        raise ValueError(
            f"tensor_parallel.tp_size={process.mesh.comm('tp').size}: {type(model).__name__} brings no tensor-parallel plan, and none "
            "follows from its modules; give injection_policy="
            "{class of its layers: ends of names of the linear layers whose results are summed}, as {OPTDecoderLayer: "
            "('self_attn.out_proj', 'fc2')}, or use tp_size=1"
        ) from None
    return TensorPolicy()


def _placed(
    model: nn.Module,
    *,
    config: DeepSpeedInferenceConfig,
    zero: Settings | None,
    process: Process,
    parts: Mapping[str, Part] | None,
) -> DeepSpeedEngine | None:
    """Moves the model to its device in its dtype; buffers keep theirs. Returns the engine that streams it, or None without ZeRO."""
    if zero is not None:
        streaming = stream(model, settings=zero, process=process, parts=parts)
        if hasattr(model, "generate") and process.world_size > 1:
            generate_in_step(model)
        return streaming
    device = None if config.keep_module_on_host else process.device
    for parameter in model.parameters():
        dtype = config.dtype if parameter.is_floating_point() else None
        parameter.data = parameter.data.to(device=device, dtype=dtype)
    if device is not None:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = buffer.to(device)
    return None


def _share_random_states(comm: Comm) -> None:
    """Makes ranks that share a model draw the same tokens."""
    torch.set_rng_state(comm.gather_objects(torch.get_rng_state())[0])
    if comm.device.type == "cuda":
        torch.cuda.set_rng_state(comm.gather_objects(torch.cuda.get_rng_state(comm.device))[0], comm.device)


# `injection_policy`: derives a plan of cuts from the names of layers whose results are summed over ranks.
#
# Inside a layer of a class in the policy, the linear layers are cut: listed ones by rows, with summed partial results, all others by columns.
# Attention is cut between heads. If the model has a plan, or one follows from its modules, that plan is used and the policy must agree.

Policy = Mapping[type[nn.Module], tuple[str, ...]]


def policy_of(model: nn.Module, *, suffixes: tuple[str, ...]) -> Policy:
    """Returns a policy from names without a class: their classes are found in the model's lists of layers.

    Raises ValueError if there are none.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    kinds = {type(layer) for layers in lists for layer in layers if any(_ending(layer, suffixes=suffixes))}
    if not kinds:
        raise ValueError(f"injection_policy_tuple={suffixes}: no layer of {type(model).__name__} has such a module")
    return dict.fromkeys(kinds, suffixes)


def rules_of_policy(model: nn.Module, *, policy: Policy) -> dict[str, TensorRule]:
    """Returns module name -> its cut.

    Raises ValueError for unknown classes and names, and for layers that cannot be cut in this way.
    """
    own, heads = _own_rules(model), Heads.of(getattr(model, "config", None))
    rules: dict[str, TensorRule] = dict(own)
    for kind, suffixes in policy.items():
        layers = {name: module for name, module in model.named_modules() if isinstance(module, kind)}
        if not layers:
            raise ValueError(f"injection_policy: {type(model).__name__} has no {kind.__name__}")
        for suffix in suffixes:
            if not any(any(_ending(layer, suffixes=(suffix,))) for layer in layers.values()):
                raise ValueError(
                    f"injection_policy[{kind.__name__}]: no {kind.__name__} has a module named ...{suffix}"
                )
        for prefix, layer in layers.items():
            names = {below: f"{prefix}.{below}".lstrip(".") for below, _ in layer.named_modules()}
            if any(name in own for name in names.values()):
                _check_agreement(names, own=own, rows=set(_ending(layer, suffixes=suffixes)))
                continue
            for below, rule in _rules(layer, suffixes=suffixes, heads=heads).items():
                rules[names[below]] = rule
    return rules


def _rules(layer: nn.Module, *, suffixes: tuple[str, ...], heads: Heads | None) -> dict[str, TensorRule]:
    """Returns name in the layer -> rule, for all of its linear layers."""
    rows, rules = set(_ending(layer, suffixes=suffixes)), {}
    for name, module in layer.named_modules():
        if name in rows and not isinstance(module, nn.Linear):
            raise ValueError(
                f"injection_policy: {name} is a {type(module).__name__}; only nn.Linear can be cut by rows (a Conv1D keeps its weight "
                "the other way round)"
            )
        if not isinstance(module, nn.Linear):
            continue
        of_heads = heads if is_attention(name) else None
        if of_heads is not None and name not in rows:
            _check_one_projection(module, name=name, heads=of_heads)
        style = Style.row if name in rows else Style.column
        rules[name] = TensorRule(style=style, grain=1 if of_heads is None else of_heads.grain(name))
    return rules


def _check_one_projection(module: nn.Linear, *, name: str, heads: Heads) -> None:
    if module.out_features not in (heads.query * heads.size, heads.key * heads.size):
        raise ValueError(
            f"injection_policy: {name} holds several projections in one weight, and how they lie there is not known; use a model "
            "that brings a tp_plan for it, or tp_size=1"
        )


def _check_agreement(names: Mapping[str, str], *, own: Mapping[str, TensorRule], rows: set[str]) -> None:
    """Checks that the policy agrees with the model's own plan, which cuts attention between heads."""
    summed = {below for below, name in names.items() if name in own and own[name].style in (Style.row, Style.row_split)}
    for below in sorted(rows ^ summed):
        fix = "is not summed over ranks" if below in rows else "is summed over ranks, too: name it"
        raise ValueError(f"injection_policy: {names[below]} {fix} in the model's own plan, which has precedence")


def _own_rules(model: nn.Module) -> dict[str, TensorRule]:
    try:
        return plan_of(model).matches(model)
    except ValueError:  # the model has no plan, and the policy is enough
        return {}


def _ending(layer: nn.Module, *, suffixes: tuple[str, ...]) -> Iterator[str]:
    for name, _ in layer.named_modules():
        if any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes):
            yield name


# ZeRO-Inference: parameters are sharded in main memory or on a disk, and each layer's parameters are gathered while it runs.

_SECTIONS = {
    torch.float32: {},
    torch.float16: {"fp16": {"enabled": True, "auto_cast": False}},
    torch.bfloat16: {"bf16": {"enabled": True}},
}


def settings_of(config: DeepSpeedInferenceConfig, *, replicas: int) -> Settings | None:
    """Returns the section `zero` in the form of a training configuration, or None at stage 0, without sharding.

    replicas: number of data-parallel ranks. Raises DeepSpeedConfigError with every fault of the section.
    """
    if not config.zero:
        return None
    zero = {
        name: value for name, value in config.zero.items() if name != "offload_optimizer"
    }  # inference has no optimizer
    given = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **_SECTIONS[config.dtype]}
    if config.aio:
        given["aio"] = dict(config.aio)
    faults = []
    if zero.get("stage", 0) in (1, 2):
        faults.append(
            f"zero.stage={zero['stage']}: shards optimizer states, which inference does not have; use stage 3, which shards parameters"
        )
    place = zero.get("offload_param")
    place = place.get("device", "none") if isinstance(place, Mapping) else "none"
    if not zero.get("stage") and place not in (None, "none"):  # otherwise nothing would be offloaded
        faults.append(f"zero.offload_param.device={place}: has no effect at stage 0; use stage 3")
    try:
        settings = parse_config(given, world_size=replicas)
    except DeepSpeedConfigError as error:
        faults += [fault.replace("zero_optimization", "zero") for fault in error.faults]
    if faults:
        raise DeepSpeedConfigError(faults)
    # pyrefly: ignore[unbound-name]  # unbound only with faults, which have raised
    return settings if settings.zero.stage == 3 else None


def notes_of(config: DeepSpeedInferenceConfig, *, settings: Settings | None) -> tuple[str, ...]:
    """Returns notes on settings without effect."""
    notes = [] if settings is None else [note.replace("zero_optimization", "zero") for note in settings.notes]
    if "offload_optimizer" in config.zero:
        notes.append("zero.offload_optimizer: there is no optimizer")
    return tuple(notes)


def stream(
    model: nn.Module, *, settings: Settings, process: Process, parts: Mapping[str, Part] | None
) -> DeepSpeedEngine:
    """Takes over the model's parameters, frozen and without optimizer states. A collective call.

    parts: this rank's parts of a model that is cut over tensor-parallel ranks.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    builder = Builder(model=model, settings=settings, process=process, trainable=frozenset(), parts=parts)
    engine, _ = builder.build(None)
    return DeepSpeedEngine(engine, builder=builder, optimizer=None, lr_scheduler=None, collate_fn=None)


def generate_in_step(model: nn.Module) -> None:
    """Makes `model.generate` continue until every rank has its text, because gathers are collective calls."""
    original = model.generate

    @functools.wraps(original)
    def generate(*args, **kwargs):
        if kwargs.get("synced_gpus") is None:
            kwargs["synced_gpus"] = True
        # pyrefly: ignore[not-callable]  # nn.Module types every attribute as Tensor or Module
        return original(*args, **kwargs)

    model.generate = generate
