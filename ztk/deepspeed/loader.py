"""Loaders: of the data given to `initialize`, and one that never ends."""

from collections.abc import Callable, Iterator

from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Sampler

from ztk.runtime import Process

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
    """Batches of this rank's part of `data`; ranks that share a model's parts read the same.

    route: "train" is shuffled (`dataloader.sampler.set_epoch(n)` gives another order each epoch), "eval" and "predict" are in order.
    Raises ValueError for data that are no dataset.
    """
    if route not in ROUTES:
        raise ValueError(f"route={route!r}: must be one of {', '.join(ROUTES)}")
    iterable = isinstance(data, IterableDataset)
    if not iterable and not (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        raise ValueError(f"training_data={type(data).__name__}: must be a dataset with __getitem__ and __len__")
    if sampler is None and not iterable:
        group = process.mesh.comm("data")
        sampler = DistributedSampler(data, num_replicas=group.size, rank=group.rank, shuffle=route == "train")
    return DataLoader(
        data,
        batch_size=batch_size,
        sampler=sampler,
        collate_fn=collate_fn,
        drop_last=drop_last,
        num_workers=num_workers,
        pin_memory=pin_memory and process.device.type == "cuda",
    )


class RepeatingLoader:
    """An iterator over `loader` that starts again where it ends."""

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
