"""`init_inference`: builds an inference engine from a script's model and configuration."""

from collections.abc import Mapping

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from ztk.core.runtime import Comm, Process, Topology
from ztk.core.runtime.part import Part
from ztk.deepspeed.config import DeepSpeedConfigError, Settings, read_source
from ztk.deepspeed.engine.deepspeed_engine import DeepSpeedEngine
from ztk.deepspeed.engine.owners import owner_of
from ztk.deepspeed.experts import expert_degree
from ztk.deepspeed.pipe.module import PipelineModule
from ztk.deepspeed.serving.config import DeepSpeedInferenceConfig
from ztk.deepspeed.serving.inference_engine import InferenceEngine
from ztk.deepspeed.serving.injection import policy_of, rules_of_policy
from ztk.deepspeed.serving.streaming import generate_in_step, notes_of, settings_of, stream
from ztk.deepspeed.serving.weights import load_weights
from ztk.deepspeed.start.mesh import arranged, parts_of
from ztk.deepspeed.start.process import arrange, this_process
from ztk.deepspeed.tools.log import logger, show_messages
from ztk.hf.kernels import inject_kernels
from ztk.parallel.tensor import TensorPolicy, plan_of, shard_tensors
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
