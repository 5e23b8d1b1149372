"""zero_optimization, and where its shards are stored: offload_optimizer, offload_param and aio."""

from dataclasses import dataclass
from typing import Any

from ztk.core.policies.offload import MAX_THREADS, PAGE_BYTES
from ztk.core.policies.ranges import PART
from ztk.core.policies.zero import ZeroPolicy
from ztk.deepspeed.config.keys import (
    Effect,
    Findings,
    Key,
    anything,
    boolean,
    fixed,
    hint,
    one_of,
    one_or_more_texts,
    read_section,
    shown,
    takes,
    whole_number,
    within,
)
from ztk.zero.offload import OffloadPolicy

_NOT_YET = "not offered by ztk yet; leave it out"
_SIZES = whole_number(0)

KEYS = {
    "stage": takes(whole_number(0)),
    "reduce_bucket_size": takes(whole_number(1), auto=True),
    "allgather_bucket_size": hint(
        whole_number(1), "ztk gathers the buffers it reduces; reduce_bucket_size sets their size", auto=True
    ),
    "contiguous_gradients": hint(boolean, "gradients always lie in one flat buffer", usual=(True,), auto=True),
    "reduce_scatter": hint(boolean, "gradients are always reduced by reduce-scatter", usual=(True,), auto=True),
    "allgather_partitions": hint(boolean, "shards are always gathered by all-gather", usual=(True,), auto=True),
    "overlap_comm": hint(boolean, "communication always runs behind computation", usual=(True, None), auto=True),
    "round_robin_gradients": hint(boolean, "a rank's shard is one contiguous slice", usual=(False,), auto=True),
    "use_multi_rank_bucket_allreduce": hint(boolean, "one reduce-scatter serves all ranks", usual=(True,)),
    "sub_group_size": hint(whole_number(1), "the optimizer goes by bucket, from a disk by pool buffer", auto=True),
    "offload_param": takes(anything),
    "offload_optimizer": takes(anything),
    "cpu_offload": takes(boolean),
    "cpu_offload_param": takes(boolean),
    "cpu_offload_use_pin_memory": takes(boolean),
    "stage3_prefetch_bucket_size": takes(_SIZES, auto=True),
    "stage3_param_persistence_threshold": takes(_SIZES, auto=True),
    "stage3_max_live_parameters": takes(_SIZES, auto=True),
    "stage3_max_reuse_distance": takes(_SIZES, auto=True),
    "stage3_gather_16bit_weights_on_model_save": takes(boolean, auto=True),
    "stage3_gather_fp16_weights_on_model_save": takes(boolean, auto=True),
    "memory_efficient_linear": hint(boolean, "no linear layer keeps a gathered weight for its backward"),
    "elastic_checkpoint": hint(boolean, "every checkpoint loads at every number of ranks and stage", usual=(False,)),
    "log_trace_cache_warnings": hint(boolean, "the order of use is followed whatever it is", usual=(False,)),
    "override_module_apply": hint(boolean, "Module.apply is not touched", usual=(True,)),
    "load_from_fp32_weights": hint(boolean, "a checkpoint's fp32 weights are always loaded", usual=(True,)),
    "ignore_unused_parameters": fixed(
        True, why=f"{_NOT_YET}: an unused parameter has the gradient zero and is no error"
    ),
    "compute_grad_norm": fixed(True, why="the norm comes with the look for overflows and costs nothing; leave it out"),
    "stage3_model_persistence_threshold": fixed(
        9223372036854775807, "auto", why=f"{_NOT_YET}; use stage3_param_persistence_threshold"
    ),
    "stage3_module_granularity_threshold": fixed(0, why=_NOT_YET),
    "stage3_use_all_reduce_for_fetch_params": fixed(False, why=_NOT_YET),
    "stage3_allgather_sequential": fixed(False, why=_NOT_YET),
    "legacy_stage1": hint(boolean, "there is one stage 1, which gives the same numbers", usual=(False,)),
    "parameter_alignment": fixed(False, why="ztk aligns every parameter to 64 bytes; leave it out"),
    "pipeline_loading_checkpoint": fixed(False, why=_NOT_YET),
    "enable_sanity_checks": hint(boolean, "ztk always checks writes to gathered parameters", usual=(False,)),
    "save_muon_momentum_buffer_in_memory": fixed(False, why=_NOT_YET),
    "leaf_module": takes(anything),
    "aio": takes(anything),  # see _read_offload
    "zenflow": fixed(None, why=_NOT_YET),
    "zero_hpz_partition_size": takes(whole_number(1)),
    "zero_quantized_weights": takes(boolean),
    "zero_quantized_gradients": takes(boolean),
    "zero_quantized_nontrainable_weights": takes(boolean),
}
# `max_live_parameters` means stage3_max_live_parameters. DeepSpeed accepts both names.
_ALIASES = {name.removeprefix("stage3_"): name for name in KEYS if name.startswith("stage3_")}
_REMOVED = "was removed from DeepSpeed in 0.19.8; leave it out"
_ELSEWHERE = {
    "mics_shard_size": _REMOVED,
    "mics_hierarchical_params_gather": _REMOVED,
    "zeropp_loco_param": _REMOVED,
    "gradient_clipping": "belongs to the top level of the configuration; move it there",
}
STAGE3 = {  # keys that act at stage 3 -> fields of ZeroPolicy
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_max_live_parameters": "max_live_parameters",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
}
# DeepSpeed's defaults, where they differ from ZeroPolicy's.
_DEFAULTS = {
    "prefetch_bucket_size": 50_000_000,
    "max_live_parameters": 1_000_000_000,
    "param_persistence_threshold": 100_000,
    "max_reuse_distance": 1_000_000_000,
}
_ZERO_PLUS_PLUS = {
    "zero_hpz_partition_size": ("hpz_partition_size", 1),
    "zero_quantized_weights": ("quantized_weights", False),
    "zero_quantized_nontrainable_weights": ("quantized_nontrainable_weights", False),
    "zero_quantized_gradients": ("quantized_gradients", False),
}


class Zero:
    """zero_optimization and aio: the policies of sharding and of offload."""

    def __init__(self, given: dict, *, findings: Findings) -> None:
        """given: the full configuration."""
        section = given.get("zero_optimization", {})
        values = read_section(
            section,
            path="zero_optimization.",
            keys=KEYS | _not_at_this_stage(section),
            findings=findings,
            elsewhere=_ELSEWHERE,
            aliases=_ALIASES,
        )
        self.stage = values.get("stage", 0)
        self.gathers_on_save = bool(
            values.get("stage3_gather_16bit_weights_on_model_save")
            or values.get("stage3_gather_fp16_weights_on_model_save")
        )
        self.leaves = read_leaf_modules(values.get("leaf_module"), findings=findings)
        if self.leaves.wanted and self.stage != 3:
            findings.faults.append(
                f"zero_optimization.leaf_module: has no effect at stage {self.stage}, where nothing is gathered; leave it out"
            )
        self.policy = self._policy(values, findings=findings)
        if self.policy.quantized_nontrainable_weights:
            findings.notes.append(
                "zero_optimization.zero_quantized_nontrainable_weights: frozen parameters are gathered as int8; shards keep their dtype"
            )
        self.offload = _read_offload(
            given,
            optimizer=_with_old_flag(values, name="offload_optimizer", old="cpu_offload", findings=findings),
            parameters=_with_old_flag(values, name="offload_param", old="cpu_offload_param", findings=findings),
            stage=self.stage,
            findings=findings,
        )

    def _policy(self, values: dict, *, findings: Findings) -> ZeroPolicy:
        if self.stage > 3:
            findings.faults.append(f"zero_optimization.stage={self.stage}: must be 0, 1, 2 or 3")
            self.stage = 3
        options = {ours: values[theirs] for theirs, ours in STAGE3.items() if theirs in values}
        if self.stage < 3:
            # Files for all stages, in which only the stage changes, contain these keys. Their names show that they need stage 3.
            findings.notes += [
                f"zero_optimization.{theirs}: acts at stage 3; this is stage {self.stage}"
                for theirs in STAGE3
                if theirs in values
            ]
            options = {}
        else:
            options = _DEFAULTS | options
            options |= {ours: values[theirs] for theirs, (ours, _) in _ZERO_PLUS_PLUS.items() if theirs in values}
        return ZeroPolicy(stage=self.stage, bucket_size=values.get("reduce_bucket_size", 500_000_000), **options)


def _not_at_this_stage(given: object) -> dict[str, Key]:
    """Returns overrides for keys below stage 3: ZeRO++ would have no effect and is rejected. Unsupported stage3_ keys only get a note."""
    stage = given.get("stage", 0) if isinstance(given, dict) else 0
    if stage == 3:
        return {}
    refused = {
        name: fixed(usual, why=f"has no effect at stage {stage}; leave it out")
        for name, (_, usual) in _ZERO_PLUS_PLUS.items()
    }
    noted = {
        name: hint(anything, f"acts at stage 3; this is stage {stage}", usual=key.usual)
        for name, key in KEYS.items()
        if name.startswith("stage3_") and key.effect is Effect.fixed
    }
    return refused | noted


def _with_old_flag(values: dict, *, name: str, old: str, findings: Findings) -> object:
    """Returns the offload section, or its equivalent for the old flag `cpu_offload`."""
    section = values.get(name)
    if values.get(old):
        if section is not None:
            findings.faults.append(
                f"zero_optimization.{old}: is the old form of {name}, which is given too; keep {name}"
            )
        else:
            section = {"device": "cpu"}
            if "cpu_offload_use_pin_memory" in values:
                section["pin_memory"] = values["cpu_offload_use_pin_memory"]
    return section


USUAL_CLASSES = (
    "transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock",
    "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeSparseMoeBlock",
    "transformers.models.qwen3_moe.modeling_qwen3_moe.Qwen3MoeSparseMoeBlock",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafModules:
    """Classes by names or full names, modules by names or their last parts. wanted: the configured value."""

    classes: tuple[str, ...] = USUAL_CLASSES
    names: tuple[str, ...] = ()
    name_suffixes: tuple[str, ...] = ()
    wanted: frozenset[str] = frozenset()


_LEAF_KEYS = {name: takes(one_or_more_texts) for name in ("classes", "names", "name_suffixes")}


def read_leaf_modules(given: object, *, findings: Findings) -> LeafModules:
    """Reads the section. Returns DeepSpeed's default classes if there is none."""
    if given is None:
        return LeafModules()
    values: dict[str, Any] = read_section(
        given, path="zero_optimization.leaf_module.", keys=_LEAF_KEYS, findings=findings
    )
    return LeafModules(**values, wanted=frozenset(word for words in values.values() for word in words))


_POOL = "ztk's pool of buffers for a disk is its own size, the same for optimizer and parameters"
_PIPELINE = "reading, updating and writing always overlap"
_device = one_of("none", "cpu", "nvme")


OPTIMIZER = {
    "device": takes(_device),
    "nvme_path": takes(anything),
    "pin_memory": takes(boolean),
    "buffer_count": hint(whole_number(1), _POOL),
    "pipeline_read": hint(boolean, _PIPELINE),
    "pipeline_write": hint(boolean, _PIPELINE),
    "pipeline": hint(boolean, _PIPELINE),
    "fast_init": hint(boolean, "states are allocated in the tier they reside in, without a copy"),
    "ratio": takes(within(PART)),
    "super_offload": fixed(False, why="not offered by ztk yet; leave it out"),
    "cpuadam_cores_perc": fixed(0.8, why="has an effect with super_offload only, which ztk does not offer yet"),
}
PARAMETERS = {
    "device": takes(_device),
    "nvme_path": takes(anything),
    "pin_memory": takes(boolean),
    "buffer_count": hint(whole_number(1), _POOL),
    "buffer_size": hint(whole_number(1), _POOL, auto=True),
    "max_in_cpu": hint(whole_number(0), "parameters on the disk have no copy in main memory", auto=True),
}
AIO = {
    "block_size": takes(whole_number(1)),
    "intra_op_parallelism": takes(whole_number(1, high=MAX_THREADS)),
    "queue_depth": hint(whole_number(1), "requests in flight are threads: set intra_op_parallelism"),
    "single_submit": hint(boolean, "requests are system calls of threads"),
    "overlap_events": hint(boolean, "requests always overlap", usual=(True,)),
    "use_gds": fixed(False, why="not offered: files go through main memory; leave it out"),
}

_AIO_ALIASES = {"thread_count": "intra_op_parallelism"}  # its name before DeepSpeed 0.15


def _read_offload(
    given: dict, *, optimizer: object, parameters: object, stage: int, findings: Findings
) -> OffloadPolicy:
    """Returns the policy of both sections and of `aio`.

    given: the full configuration. optimizer, parameters: the two sections of zero_optimization, or None.
    """
    optim = _section(optimizer, name="offload_optimizer", keys=OPTIMIZER, findings=findings)
    param = _section(parameters, name="offload_param", keys=PARAMETERS, findings=findings)
    if param.get("device", "none") != "none" and stage < 3:
        findings.notes.append(
            f"zero_optimization.offload_param.device={param['device']}: acts at stage 3; this is stage {stage}, where every rank "
            "keeps all parameters"
        )
        param = {}
    places = {"offload_optimizer": optim.get("device", "none"), "offload_param": param.get("device", "none")}
    paths = {values["nvme_path"] for values in (optim, param) if values.get("nvme_path")}
    if len(paths) > 1:
        findings.faults.append(f"nvme_path: ztk uses one folder for everything it offloads; have {sorted(paths)}")
    pins = {values["pin_memory"] for values in (optim, param) if "pin_memory" in values}
    if len(pins) > 1:
        findings.notes.append(
            "zero_optimization.pin_memory: is true in one offload section and false in the other; both are pinned"
        )
    aio = _aio(given, uses_nvme="nvme" in places.values(), findings=findings)
    missing = "nvme" in places.values() and not paths
    if missing:
        return OffloadPolicy()
    try:
        return OffloadPolicy(
            optimizer=places["offload_optimizer"],
            optimizer_fraction=optim.get("ratio", 1.0),
            parameters=places["offload_param"],
            nvme_path=min(paths) if paths else None,
            pin_memory=pins
            != {False},  # if both differ, true: copies from pinned memory overlap, and nothing else changes
            **aio,
        )
    except ValueError as error:
        findings.faults.append(f"zero_optimization: {error}")
        return OffloadPolicy()


def _section(given: object, *, name: str, keys: dict, findings: Findings) -> dict:
    if given is None:
        return {}
    path = f"zero_optimization.{name}."
    values = read_section(given, path=path, keys=keys, findings=findings)
    if isinstance(given, dict) and "device" not in given:
        findings.faults.append(f"{path}device: is missing; give cpu, nvme or none")
    if values.get("nvme_path") in (None, "none", ""):  # Accelerate writes "none" for a missing path
        values.pop("nvme_path", None)
    elif not isinstance(values["nvme_path"], str):
        findings.faults.append(f"{path}nvme_path={values.pop('nvme_path')!r}: must be the path of a folder")
    device = values.get("device")
    if device == "nvme" and "nvme_path" not in values:
        findings.faults.append(f"{path}nvme_path: is missing; device=nvme needs a folder on the disk to use")
    if device in ("cpu", "none") and "nvme_path" in values:
        findings.notes.append(f"{path}nvme_path={shown(values.pop('nvme_path'))}: has no effect with device={device}")
    if device == "none":
        values.pop("pin_memory", None)
        if values.pop("ratio", 1.0) != 1.0:
            findings.notes.append(f"{path}ratio: has no effect with device=none")
    return values


def _aio(given: dict, *, uses_nvme: bool, findings: Findings) -> dict:
    section = _aio_section(given, findings=findings)
    if section is None:
        return {}
    values = read_section(section, path="aio.", keys=AIO, findings=findings, aliases=_AIO_ALIASES)
    if not uses_nvme and section:
        findings.notes.append("aio: without effect while nothing is offloaded to nvme")
        return {}
    options = {}
    if "block_size" in values:
        options["block_bytes"] = -(-values["block_size"] // PAGE_BYTES) * PAGE_BYTES
    if "intra_op_parallelism" in values:
        options["threads"] = values["intra_op_parallelism"]
    return options


def _aio_section(given: dict, *, findings: Findings) -> object:
    """Returns the section `aio`, which DeepSpeed's documentation puts inside zero_optimization."""
    zero = given.get("zero_optimization")
    nested = zero.get("aio") if isinstance(zero, dict) else None
    section = given.get("aio")
    if nested is not None:
        if section is not None and section != nested:
            findings.faults.append(
                "zero_optimization.aio: differs from aio at the top level; keep the one at the top level"
            )
        findings.notes.append("zero_optimization.aio: is read as aio, its place at the top level of the configuration")
        section = nested if section is None else section
    return section
