"""How many sequences a step takes, and how many micro-batches that is on this number of ranks."""

from dataclasses import replace
from pathlib import Path

from ztk.config.schema import Config
from ztk.config.topology import fits, replicas_of

AUTO = "auto"  # checkpoint.resume: the run folder's own latest checkpoint, if it has one


def settle_batch(config: Config, *, recorded: Config | None) -> None:
    """Numbers for `train.global_batch_size` and `train.accumulation_steps`. Ranks are settled before.

    recorded: the run that this one continues, whose global batch it keeps on any number of ranks.
    """
    train, replicas = config.train, replicas_of(config.topology, ranks=config.launch.ranks)
    if train.global_batch_size is None and recorded is not None:
        train.global_batch_size = recorded.train.global_batch_size
    if train.global_batch_size is None:
        train.global_batch_size = replicas * train.micro_batch_size * (train.accumulation_steps or 1)
    train.accumulation_steps = -(-train.global_batch_size // (replicas * train.micro_batch_size))


def on_fewer_ranks(config: Config, *, lost: int) -> Config | None:
    """The run after so many ranks were lost: from its own latest checkpoint, with the same global batch.

    None if the ranks that are left are too few, for `launch.min_ranks` or for the topology.
    """
    for ranks in range(config.launch.ranks - lost, config.launch.min_ranks - 1, -1):
        if fits(config.topology, ranks=ranks):
            break
    else:
        return None
    topology = replace(config.topology, data=replicas_of(config.topology, ranks=ranks))
    smaller = replace(
        config, launch=replace(config.launch, ranks=ranks), train=replace(config.train), topology=topology
    )
    settle_batch(smaller, recorded=None)
    return smaller


def record_of(folder: str | Path) -> Path | None:
    """The configuration that a run has left in its folder."""
    path = Path(folder, "config.yaml")
    return path if path.is_file() else None
