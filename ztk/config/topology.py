"""The distribution of ranks over the axes of parallelism, and the models that fit: the arithmetic of `ztk.core.runtime.mesh` without
torch.
"""

import math
from collections.abc import Iterator

from ztk.core.policies.config import Config
from ztk.core.policies.layout import hpz_faults, recompute_faults
from ztk.core.policies.machine import Machine
from ztk.core.policies.pipeline import ScheduleName, interleaved_faults, partition_faults
from ztk.core.policies.runs import device_of, infers, is_hugging_face, is_own
from ztk.core.policies.tensor import tensor_rule
from ztk.core.policies.topology import TopologyConfig, heads_of_ranks

RANKS_WITHOUT_GPU = 2
DEGREES = ("pipeline", "tensor", "context", "sequence", "expert")


def cut_degrees(topology: TopologyConfig) -> dict[str, int]:
    """Returns the degrees above 1, without data parallelism, by name."""
    return {name: degree for name in DEGREES if (degree := getattr(topology, name)) > 1}


def is_cut(topology: TopologyConfig) -> bool:
    """Returns whether any axis except data parallelism has more than one rank."""
    return bool(cut_degrees(topology))


def ranks_of(topology: TopologyConfig) -> int:
    """Returns the world size of the layout: with its number of replicas, or with the smallest possible one."""
    return topology.min_ranks if topology.data is None else max(1, topology.data) * topology.model_ranks


def replicas_of(topology: TopologyConfig, *, ranks: int) -> int:
    """Returns the number of replicas, each of which gets its own sequences."""
    return max(1, ranks // topology.model_ranks)


def settled_ranks(config: Config, *, machine: Machine) -> int:
    """Returns the number of ranks: started, requested, or implied by the layout; else one per GPU, or two without a GPU.

    Tasks that only run inference use the tensor-parallel degree.
    """
    if infers(config):
        return max(1, config.topology.tensor)
    named = ranks_of(config.topology) if is_cut(config.topology) or config.topology.data else 0
    everything = machine.gpus if device_of(config, machine=machine) == "cuda" else 0
    return machine.started_ranks or config.launch.ranks or named or everything or RANKS_WITHOUT_GPU


def topology_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields one line per fault, with its fix."""
    topology = config.topology
    if infers(config):
        return  # reported by `answering_faults`
    if min(getattr(topology, name) for name in DEGREES) < 1 or (topology.data or 1) < 1:
        return  # reported by the ranges
    yield from _rank_faults(config, machine=machine)
    yield from _model_faults(config)
    yield from _layout_faults(config, machine=machine)
    yield from _expert_faults(config)
    yield from _plan_faults(config)
    yield from _pipeline_faults(config)


def critic_faults(config: Config, *, needs: str) -> Iterator[str]:
    """Yields faults of layouts that a model with one value per token does not have. needs: who has it, for the text."""
    topology = config.topology
    if topology.tensor > 1 and topology.sequence_parallel:
        yield (
            f"topology.sequence_parallel=true: the value layer of {needs} has one output, which is not cut over ranks; use "
            "topology.sequence_parallel=false"
        )
    if topology.pipeline > 1 and is_hugging_face(config.model):
        yield (
            f"topology.pipeline={topology.pipeline}: {needs} of transformers has no stages; use topology.pipeline=1 with topology.tensor "
            "or topology.data"
        )


def padded_expert_faults(config: Config) -> Iterator[str]:
    """Yields a fault if texts of a model with experts would be padded, because its layers or sequences are cut."""
    cut = cut_degrees(config.topology)
    cut.pop("expert", None)
    if cut and config.model.experts is not None:
        key = ", ".join(f"topology.{degree}={value}" for degree, value in cut.items())
        yield (
            f"{key}: task={config.task.name} pads rows of a model whose layers are cut, and padding would be routed to experts; use "
            f"topology.expert or topology=dp with model.experts={config.model.experts}"
        )


def debug_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields a fault if the rank of `launch.debug` does not exist."""
    debug, ranks = config.launch.debug, 1 if config.task.name == "plan" else settled_ranks(config, machine=machine)
    if debug is not None and debug >= ranks:
        counted = "one rank" if ranks == 1 else f"{ranks} ranks"
        yield f"launch.debug={debug}: the run has {counted}, counted from 0; use launch.debug={ranks - 1}"


def _rank_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    topology, ranks = config.topology, machine.started_ranks or config.launch.ranks
    named = ranks_of(topology)
    if ranks and "topology.data" in config.given and topology.data and ranks != named:
        yield (
            f"topology.data={topology.data} makes {named} ranks and there are {ranks}: use launch.ranks={named}, or leave out "
            "topology.data"
        )
    elif not topology.divide(ranks or named):
        named_degrees = [name for name in DEGREES[:-1] if name != "context" or topology.context > 1]
        degrees = " x ".join(f"topology.{name}={getattr(topology, name)}" for name in named_degrees)
        yield (
            f"{ranks or named} ranks cannot be cut into {degrees} with topology.expert={topology.expert}: use "
            f"launch.ranks={topology.min_ranks} or a multiple of it"
        )


def _layout_faults(config: Config, *, machine: Machine) -> Iterator[str]:
    """Yields faults between ZeRO, recomputation and the topology."""
    topology, group = config.topology, config.zero.hpz_partition_size or 1
    cut = topology.pipeline * topology.tensor
    data = settled_ranks(config, machine=machine) // cut
    yield from hpz_faults(group, data_ranks=data, model_ranks=cut)
    yield from recompute_faults(
        partition_inputs=config.recompute.partition_inputs, sequence_parallel=topology.sequence_parallel
    )


def _model_faults(config: Config) -> Iterator[str]:
    topology, model, length = config.topology, config.model, config.data.seq_len
    tensor, sequence = topology.tensor, topology.sequence
    if model.heads < 1 or model.kv_heads < 1 or model.heads % model.kv_heads:
        return  # reported by the model's own rules
    own = heads_of_ranks(model.heads, kv_heads=model.kv_heads, ranks=tensor)
    if tensor > model.kv_heads:
        yield (
            f"topology.tensor={tensor} is more than model.kv_heads={model.kv_heads}, and heads are not cut: use "
            f"topology.tensor={model.kv_heads} or less"
        )
    elif bad := [heads for heads in own if heads % sequence]:
        fixed = math.gcd(sequence, *own)
        yield (
            f"topology.sequence={sequence} does not divide the {bad[0]} heads of a rank (model.heads={model.heads}, "
            f"topology.tensor={tensor}): use topology.sequence={fixed}, or another degree that divides them"
        )
    if topology.context > 1:
        yield from _context_faults(config)
        return
    if length > 0 and length % sequence:
        yield (
            f"data.seq_len={length} is not a multiple of topology.sequence={sequence}: use "
            f"data.seq_len={-(-length // sequence) * sequence}"
        )
    if topology.sequence_parallel and length > 0 and length // sequence % tensor:
        unit = tensor * sequence
        yield (
            f"data.seq_len={length} is not a multiple of {unit}, as topology.sequence_parallel=true needs: use "
            f"data.seq_len={-(-length // unit) * unit}"
        )


def _context_faults(config: Config) -> Iterator[str]:
    """Yields faults of ring attention, which pads the end of sequences of other lengths."""
    topology, length = config.topology, config.data.seq_len
    if config.task.name not in ("pretrain", "plan", "eval"):
        yield (
            f"topology.context={topology.context}: task={config.task.name} reads answers of several lengths, which are not padded for a ring; "
            "use topology.context=1 and topology.sequence"
        )
    unit = 2 * topology.sequence_ranks * (topology.tensor if topology.sequence_parallel else 1)
    if config.model.experts is not None and length % unit:
        yield (
            f"data.seq_len={length}: topology.context={topology.context} pads it to a multiple of {unit}, and padding would be routed to "
            f"experts; use data.seq_len={-(-length // unit) * unit}"
        )


def _pipeline_faults(config: Config) -> Iterator[str]:
    topology, ranks = config.topology, config.topology.pipeline
    if ranks == 1:
        return
    interleaved = topology.schedule is ScheduleName.interleaved
    if interleaved:  # `round_faults` checks the number of micro-batches
        yield from interleaved_faults(num_ranks=ranks, num_micro_batches=None, virtual_stages=topology.virtual_stages)
    stages = ranks * (topology.virtual_stages or 1 if interleaved else 1)
    layers = config.model.layers + 2  # embedding and head count as one layer each
    if stages > layers and not is_own(config, section="model"):
        yield (
            f"{stages} pipeline stages cannot be made of model.layers={config.model.layers}, embedding and head: use "
            f"topology.pipeline={max(1, layers * ranks // stages)} or a model with more layers"
        )
    yield from partition_faults(topology.partition)


def _plan_faults(config: Config) -> Iterator[str]:
    """Yields faults of `topology.plan`. Whether its patterns match is known when the model is built."""
    plan = config.topology.plan or {}
    if plan and not is_own(config, section="model") and not is_hugging_face(config.model):
        yield f"topology.plan: model={config.model.name} has a tensor plan; leave topology.plan out, or use a model of your own"
    for pattern, text in plan.items():
        try:
            tensor_rule(pattern, text=text)
        except ValueError as error:
            yield f"topology.plan: {error}"


def _expert_faults(config: Config) -> Iterator[str]:
    degree, experts = config.topology.expert, config.model.experts
    if experts is None and degree > 1:
        yield (
            f"topology.expert={degree} spreads experts and model={config.model.name} has none: use topology.expert=1, or "
            "model=tiny_moe"
        )
    if experts is not None and experts % degree:
        divisor = next(number for number in range(degree, 0, -1) if experts % number == 0)
        yield (
            f"topology.expert={degree} does not divide model.experts={experts}: use topology.expert={divisor}, or "
            f"model.experts={-(-experts // degree) * degree}"
        )
