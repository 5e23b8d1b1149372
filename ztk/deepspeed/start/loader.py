"""Loaders of the data given to `initialize`, and a repeating loader."""

from collections.abc import Callable, Iterator, Mapping

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, Sampler

from ztk.core.runtime import Process
from ztk.deepspeed.tools.timers import ThroughputTimer

ROUTES = ("train", "eval", "predict")


def loader_of(
    data: Dataset,
    *,
    batch_size: int,
    process: Process,
    drop_last: bool,
    route: str = "train",
    pin_memory: bool = True,
    sampler: Sampler | None = None,
    collate_fn: Callable | None = None,
    num_workers: int = 0,
) -> DataLoader:
    """Returns batches of this rank's part of `data`. Ranks that share a model read the same part.

    batch_size: samples.
    route: "train" shuffles (`dataloader.sampler.set_epoch(n)` changes the order); "eval" and "predict" keep the order.
    Raises ValueError for data that are not a dataset.
    """
    if route not in ROUTES:
        raise ValueError(f"route={route!r}: must be one of {', '.join(ROUTES)}")
    iterable = isinstance(data, IterableDataset)
    if not iterable and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise ValueError(f"training_data={type(data).__name__}: must be a dataset with __getitem__ and __len__")
    if sampler is None and not iterable:
        mesh = process.mesh
        sampler = DistributedSampler(data, num_replicas=mesh.replicas, rank=mesh.replica, shuffle=route == "train")
    return DataLoader(
        data,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=pin_memory and process.device.type == "cuda",
    )


class DeepSpeedDataLoader:
    """Batches of one rank's part of `dataset`, with DeepSpeed's constructor. `engine.deepspeed_io` creates an engine's loader.

    batch_size: samples of this rank.
    local_rank: a negative value means no ranks, and a random order of all samples.
    tput_timer: if given, started at every batch.
    num_local_io_workers: number of reading processes. By default this process reads.
    data_sampler: defaults to the part of data_parallel_rank of data_parallel_world_size; `loader.data_sampler.set_epoch(n)` changes the
    order.

    Raises ValueError for curriculum learning, which is not supported.
    """

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int,
        pin_memory: bool,
        local_rank: int,
        tput_timer: ThroughputTimer | None,
        collate_fn: Callable | None = None,
        num_local_io_workers: int | None = None,
        data_sampler: Sampler | None = None,
        data_parallel_world_size: int | None = None,
        data_parallel_rank: int | None = None,
        dataloader_drop_last: bool = False,
        deepspeed_dataloader_config: Mapping[str, object] | None = None,
    ) -> None:
        if deepspeed_dataloader_config and deepspeed_dataloader_config.get("curriculum_learning"):
            raise ValueError("deepspeed_dataloader_config: curriculum_learning is not offered; pass a data_sampler")
        if data_sampler is None and local_rank >= 0:
            data_sampler = DistributedSampler(dataset, num_replicas=data_parallel_world_size, rank=data_parallel_rank)
        self.data_sampler = RandomSampler(dataset) if data_sampler is None else data_sampler
        self.dataset, self.batch_size, self.collate_fn = dataset, batch_size, collate_fn
        self.tput_timer, self.dataloader_drop_last = tput_timer, dataloader_drop_last
        self.dataloader = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=self.data_sampler,
            collate_fn=collate_fn,
            drop_last=dataloader_drop_last,
            num_workers=num_local_io_workers or 0,
            pin_memory=pin_memory,
        )
        self._batches: Iterator | None = None

    def __len__(self) -> int:
        return len(self.dataloader)

    def __iter__(self) -> Iterator:
        self._batches = iter(self.dataloader)
        return self

    def __next__(self) -> object:
        """Returns the next batch. Raises RuntimeError before `iter(loader)`."""
        if self._batches is None:
            raise RuntimeError("next(loader): call iter(loader) before, or loop over it")
        if self.tput_timer is not None:
            self.tput_timer.start()
        return next(self._batches)


class RepeatingLoader:
    """An iterator over `loader` that restarts at the end."""

    def __init__(self, loader) -> None:
        self.loader = loader
        self._batches = iter(loader)

    def __iter__(self) -> Iterator:
        return self

    def __len__(self) -> int:
        return len(self.loader)

    def __next__(self) -> object:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
