"""The engine of a `PipelineModule`, which trains whole batches. Losses have the output dtype of the last stage."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ztk.deepspeed.config.top import BatchSizes
from ztk.deepspeed.engine.deepspeed_engine import DeepSpeedEngine
from ztk.deepspeed.start.loader import RepeatingLoader
from ztk.deepspeed.tools.helpers import map_nested
from ztk.parallel.pipeline import MicroBatch
from ztk.train.engine.pipeline import PipelineEngine as PipelinedEngine


class PipelineError(Exception):
    """A forward, backward or step was called on a pipeline."""


class PipelineEngine(DeepSpeedEngine):
    """`train_batch` and `eval_batch` take micro-batches `(inputs, labels)` from an iterator on the ranks of the first and the last stage.
    The iterators of other ranks are not used and may be None.
    """

    engine: PipelinedEngine
    module: Any  # a PipelineModule

    def _prepare(self) -> None:
        self.data_iterator: Iterator | None = None
        self.batch_fn: Callable | None = None
        self.agg_train_loss: Tensor | None = None
        self.grid = self.mpu = self.module.mpu()
        self.num_stages, self.stage_id = self.module.num_stages, self.grid.stage_id
        self.micro_batches = self.gradient_accumulation_steps()

    # Batches

    def train_batch(self, data_iter: Iterator | None = None) -> Tensor:
        """Runs one optimizer step over gradient_accumulation_steps micro-batches.

        Returns the mean loss of all replicas, a scalar on every rank.

        data_iter: defaults to the data of `set_dataiterator`, `set_dataloader` or `training_data`.
        """
        self._need_optimizer()
        self.module.train()
        if data_iter is not None:
            self.set_dataiterator(data_iter)
        batches = self._take(self.micro_batches)
        with self._watcher.batch():
            assert self.optimizer is not None
            loss = self.optimizer.train_batch(batches)
            self.agg_train_loss = self._mean_of_replicas(loss)
        self._watcher.note_loss(self.agg_train_loss)
        self._after_batch()
        self._watcher.after_step()
        return self.agg_train_loss

    def eval_batch(
        self,
        data_iter: Iterator,
        return_logits: bool = False,
        compute_loss: bool = True,
        reduce_output: str | None = "avg",
        bcast_loss: bool = True,
        num_micro_batches: int | None = None,
    ) -> Tensor | list | tuple | None:
        """Runs forwards only, over num_micro_batches, which defaults to the number in a training batch.

        Returns the mean loss of all replicas on every rank, or with reduce_output=None a list of the micro-batches' losses on the last
        stage. With compute_loss=False, returns the outputs on the last stage. return_logits: returns (loss, outputs), with outputs on the
        last stage.
        bcast_loss: with False, the loss is None before the last stage. Losses are scalars. Raises ValueError for another reduce_output.
        """
        if reduce_output not in ("avg", None):
            raise ValueError(f"reduce_output={reduce_output!r}: must be 'avg' or None")
        before, self.data_iterator = self.data_iterator, data_iter
        try:
            batches = self._take(num_micro_batches or self.micro_batches)
        finally:
            self.data_iterator = before
        inputs = [(batch[0],) if batch is not None else None for batch in batches]
        with self.engine.evaluating():
            outputs = self._forward_all(inputs)
            if not compute_loss:
                return outputs
            losses = self._losses(outputs, batches=batches)
        result = losses if reduce_output is None else self._reduced(losses, shares=bcast_loss)
        return (result, outputs) if return_logits else result

    def set_dataloader(self, loader: Iterable) -> None:
        """Uses the batches of `loader`, repeatedly."""
        self.training_dataloader = loader
        self.data_iterator = iter(RepeatingLoader(loader))

    def set_dataiterator(self, iterator: Iterator) -> None:
        """Uses the batches of `iterator` until it ends."""
        self.data_iterator = iterator

    def set_batch_fn(self, fn: Callable) -> None:
        """Replaces each batch of the iterator by `fn(batch)`."""
        self.batch_fn = fn

    def _take(self, count: int) -> list:
        if not (self.is_first_stage() or self.is_last_stage()):
            return [None] * count
        if self.data_iterator is None:
            if self.training_dataloader is None:
                raise ValueError("train_batch() has no data: pass data_iter, or training_data to initialize")
            self.set_dataloader(self.training_dataloader)
        batches = []
        for _ in range(count):
            batch = next(self.data_iterator)
            batch = batch if self.batch_fn is None else self.batch_fn(batch)
            if not isinstance(batch, (tuple, list)) or len(batch) != 2:
                raise ValueError("a pipeline's batches are (inputs, labels); set_batch_fn makes them of others")
            batches.append(tuple(map_nested(part, self._placed) for part in batch))
        return batches

    def _placed(self, value: object) -> object:
        return value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value

    def _set_batch(self, batch: BatchSizes) -> None:
        self.micro_batches = batch.accumulation
        super()._set_batch(batch)

    # Parts of eval_batch

    def _forward_all(self, inputs: list) -> list:
        if self.num_stages == 1:
            return [self.engine(*batch) for batch in inputs]
        return self.engine.forward_batches([MicroBatch(args=batch or ()) for batch in inputs])

    def _losses(self, outputs: list, *, batches: list) -> list[Tensor] | None:
        """Returns the loss of each micro-batch on the last stage; None elsewhere."""
        if not self.is_last_stage():
            return None
        if self.module.loss_fn is None:  # the model returns its loss
            return outputs
        return [self.module.loss_fn(output, batch[1]) for output, batch in zip(outputs, batches, strict=True)]

    def _reduced(self, losses: list[Tensor] | None, *, shares: bool) -> Tensor | None:
        mean = None if losses is None else torch.stack([loss.float() for loss in losses]).mean()
        shared = self._mean_of_replicas(mean if self.num_stages == 1 else self.engine.share(mean))
        return shared if shares or self.is_last_stage() else None

    def _mean_of_replicas(self, loss: Tensor) -> Tensor:
        return self.engine.process.mesh.comm("data").gather_scalars(loss.float().view(1), label="loss").mean()

    def _after_batch(self) -> None:
        self.micro_steps += self.micro_batches
        self.global_samples += self.settings.batch.train
        self._advance_schedule()

    # Questions

    def is_first_stage(self) -> bool:
        return self.grid.is_first_stage()

    def is_last_stage(self) -> bool:
        return self.grid.is_last_stage()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Returns True: every batch is a step."""
        return True

    def reset_activation_shape(self) -> None:
        """Does nothing: stages agree on shapes whenever the micro-batches' shapes change."""

    def set_has_attention_mask(self, value: bool) -> None:
        """Does nothing: tuples may contain a mask."""
        del value

    def get_additional_losses(self) -> None:
        """Returns None: `loss_fn` returns the only loss."""

    def get_model_parallel_rank(self) -> int:
        """Returns the same as `PipelineParallelGrid.get_model_parallel_rank`."""
        return self.grid.get_model_parallel_rank()

    # Unsupported by pipelines

    def forward(self, *args, **kwargs):
        """Raises PipelineError."""
        raise PipelineError(
            "a pipeline runs full batches and steps in them: use engine.train_batch(data_iter) or engine.eval_batch(data_iter)"
        )

    backward = step = forward
