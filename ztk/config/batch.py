"""The number of sequences per step, and of micro-batches per step on the given number of ranks."""

from collections.abc import Iterator
from dataclasses import replace

from ztk.config.keys import fill
from ztk.config.topology import replicas_of
from ztk.core.policies.config import Config
from ztk.core.policies.pipeline import ScheduleName, interleaved_faults
from ztk.core.policies.runs import infers


def settle_batch(config: Config, *, recorded: Config | None) -> None:
    """Settles `train.global_batch_size` and `train.accumulation_steps`. The number of ranks must be settled already.

    recorded: the run that this one continues. Its global batch is kept on any number of ranks.
    """
    train, replicas = config.train, replicas_of(config.topology, ranks=config.launch.ranks)
    batch = replicas * train.micro_batch_size * (train.accumulation_steps or 1)
    if recorded is not None and recorded.train.global_batch_size is not None:
        batch = recorded.train.global_batch_size
    reason = "replicas * train.micro_batch_size * train.accumulation_steps"
    fill(config, key="train.global_batch_size", value=batch, reason=reason)
    forwards = forwards_of(train.global_batch_size, replicas=replicas, size=train.micro_batch_size)
    fill(config, key="train.accumulation_steps", value=forwards, reason="forwards that train.global_batch_size takes")
    train.accumulation_steps = forwards  # on other ranks than before, too


def forwards_of(batch: int, *, replicas: int, size: int) -> int:
    """Returns the micro-batches of at most `size` sequences per rank for a step of `batch` sequences."""
    return -(-batch // (replicas * size))


def round_faults(config: Config) -> Iterator[str]:
    """Yields faults of the interleaved schedule, which runs micro-batches in rounds.

    Batches must be settled already.
    """
    train, ranks = config.train, config.topology.pipeline
    if ranks == 1 or config.topology.schedule is not ScheduleName.interleaved or infers(config):
        return
    batch, count = train.global_batch_size, train.accumulation_steps
    if "train.global_batch_size" not in config.given and config.checkpoint.resume is None:
        yield from interleaved_faults(num_ranks=ranks, num_micro_batches=count, virtual_stages=None)
        return
    if count % ranks == 0:
        return
    replicas = replicas_of(config.topology, ranks=config.launch.ranks)
    sizes = range(train.micro_batch_size, 0, -1)
    fitting = [size for size in sizes if forwards_of(batch, replicas=replicas, size=size) % ranks == 0]
    even = [size for size in fitting if batch % (replicas * size) == 0]
    fix = f"train.micro_batch_size={(even or fitting)[0]}, or " if fitting else ""
    yield (
        f"topology.schedule=interleaved runs micro-batches in rounds of one per stage: train.global_batch_size={batch} is {count} forwards of "
        f"train.micro_batch_size={train.micro_batch_size}, no multiple of topology.pipeline={ranks}; use {fix}topology.schedule=1f1b"
    )


def on_fewer_ranks(config: Config, *, lost: int) -> Config | None:
    """Returns the configuration that continues a run after `lost` ranks are gone: its own latest checkpoint, the same global batch.

    Returns None if too few ranks are left for `launch.min_ranks` or for the topology.
    """
    for ranks in range(config.launch.ranks - lost, config.launch.min_ranks - 1, -1):
        if config.topology.divide(ranks):
            break
    else:
        return None
    topology = replace(config.topology, data=replicas_of(config.topology, ranks=ranks))
    smaller = replace(
        config, launch=replace(config.launch, ranks=ranks), train=replace(config.train), topology=topology
    )
    settle_batch(smaller, recorded=None)
    return smaller
