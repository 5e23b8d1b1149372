"""Transfers between stages: nested tensors, sent one by one.

The receiver needs the shapes first. They are sent only when they change: before a batch the first stage broadcasts a hash of the shapes of
each micro-batch, so every rank can tell which of its transfers have new shapes. Only for those the sender sends the
shapes before the tensors. If activations change shape although micro-batches do not, `dynamic_shapes` sends them every time.
Received tensors have the dtype of the sent ones.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ztk.core.runtime import Comm
from ztk.core.runtime.comm import Work
from ztk.nn.documents import Documents
from ztk.parallel.pipeline.layers import Carry, MicroBatch


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorKind:
    """One tensor of a transfer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool


class Incoming:
    """Nested tensors of any shapes that are being received: an activation, or the list of its gradients."""

    def __init__(self, form: Carry, *, tensors: list[Tensor], works: list[Work]) -> None:
        self._form, self._tensors, self._works = form, tensors, works

    def wait(self) -> Carry:
        """The activation: tensors whose gradient the sender needs are leaves that require it."""
        for work in self._works:
            work.wait()
        tensors = iter(self._tensors)
        return pytree.tree_map(
            lambda leaf: next(tensors).requires_grad_(leaf.needs_gradient) if isinstance(leaf, TensorKind) else leaf,
            self._form,
        )


class Wire:
    """Transfers along the pipeline axis `comm`, counted as "send": one tensor's bytes per boundary and micro-batch each way."""

    def __init__(self, comm: Comm, *, dynamic_shapes: bool = False) -> None:
        self._comm, self._dynamic = comm, dynamic_shapes
        # (stage, is training, shapes of the micro-batch) -> the nesting, with a `TensorKind` for each tensor
        self._known: dict[tuple, Carry] = {}  # of received activations
        self._announced: dict[tuple, Carry] = {}  # of sent activations
        self._sending: deque[tuple[Work, Tensor]] = deque()
        self._keys: list[int] = []
        self._is_training = True

    def open(self, batches: Sequence[MicroBatch | None]) -> list[float]:
        """Begins a batch: sends the shapes and router weights of the first stage's micro-batches to every rank. A collective call.

        Returns the router weight of each micro-batch. Raises ValueError on all ranks if only some have documents, which every stage needs.
        """
        self._is_training = torch.is_grad_enabled()
        keys = torch.tensor([_key(batch) for batch in batches], dtype=torch.int64)  # on the host: no device waits
        weights = torch.tensor(
            [1.0 if batch is None else batch.router_weight for batch in batches], dtype=torch.float64
        )
        apart = torch.tensor([_has_documents(batch) for batch in batches], dtype=torch.int64)
        own = torch.cat([keys, weights.view(torch.int64), apart])
        rows = self._comm.gather_scalars(own, label="shapes of micro-batches")
        keys, weights, apart = rows.chunk(3, dim=1)
        if not torch.equal(apart, apart[:1].expand_as(apart)):
            raise ValueError(
                "some stages' micro-batches have documents and some have none: every stage attends inside documents; pass the same "
                "micro-batches on all ranks of a pipeline"
            )
        keys, weights = keys[0], weights[0]
        self._keys = keys.tolist()
        return weights.clone().view(torch.float64).tolist()

    def send_activation(self, carry: Carry, *, stage: int, to: int, micro_batch: int) -> None:
        """Sends the output of `stage`. Its gradients come back for the tensors that require them, in order.

        Raises ValueError if its shapes changed although the micro-batch's did not.
        """
        tensors = [leaf for leaf in pytree.tree_leaves(carry) if isinstance(leaf, Tensor)]
        form = pytree.tree_map(lambda leaf: _kind(leaf) if isinstance(leaf, Tensor) else leaf, carry)
        key = (stage + 1, self._is_training, self._keys[micro_batch])
        if self._dynamic or key not in self._announced:
            self._sending += self._comm.send_object(form, to=to, label=f"shapes {stage}")
            self._announced[key] = form
        elif form != self._announced[key]:
            raise ValueError(
                f"the output of pipeline stage {stage} changed from {self._announced[key]} to {form} although the "
                "micro-batch has the shapes it had before; use PipelinePolicy(dynamic_shapes=True)"
            )
        for tensor in tensors:
            self._send(tensor, to=to, label=f"activation {stage}.{micro_batch}")

    def receive_activation(self, *, stage: int, source: int, micro_batch: int) -> Incoming:
        """Starts receiving the input of `stage`."""
        key = (stage, self._is_training, self._keys[micro_batch])
        if self._dynamic or key not in self._known:
            self._known[key] = self._comm.recv_object(source=source, label=f"shapes {stage - 1}")
        return self._receive(self._known[key], source=source, label=f"activation {stage - 1}.{micro_batch}")

    def send_gradients(self, gradients: list[Tensor], *, stage: int, to: int, micro_batch: int) -> None:
        """Sends the gradients of the input of `stage`, in its shapes."""
        for gradient in gradients:
            self._send(gradient, to=to, label=f"gradient {stage}.{micro_batch}")

    def receive_gradients(self, like: list[TensorKind], *, stage: int, source: int, micro_batch: int) -> Incoming:
        """Starts receiving the gradients of the output of `stage`, whose tensors are `like`."""
        form = [replace(kind, needs_gradient=False) for kind in like]
        return self._receive(form, source=source, label=f"gradient {stage + 1}.{micro_batch}")

    def _receive(self, form: Carry, *, source: int, label: str) -> Incoming:
        kinds = [leaf for leaf in pytree.tree_leaves(form) if isinstance(leaf, TensorKind)]
        tensors = [torch.empty(kind.shape, dtype=kind.dtype, device=self._comm.device) for kind in kinds]
        works = [self._comm.recv(tensor, source=source, label=label) for tensor in tensors]
        return Incoming(form, tensors=tensors, works=works)

    def spread(self, carry: Carry, *, source: int) -> Carry:
        """Broadcasts `carry` of pipeline rank `source`. A collective call."""
        form = pytree.tree_map(lambda leaf: _kind(leaf) if isinstance(leaf, Tensor) else leaf, carry)
        own = iter([leaf for leaf in pytree.tree_leaves(carry) if isinstance(leaf, Tensor)])
        form, is_source = self._comm.gather_objects(form)[source], self._comm.rank == source

        def receive(leaf: object) -> object:
            if not isinstance(leaf, TensorKind):
                return leaf
            empty = partial(torch.empty, leaf.shape, dtype=leaf.dtype, device=self._comm.device)
            tensor = next(own).contiguous() if is_source else empty()
            self._comm.broadcast(tensor, source=source, label="output").wait()
            return tensor

        return pytree.tree_map(receive, form)

    def finish(self) -> None:
        """Waits for all sends."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def _send(self, tensor: Tensor, *, to: int, label: str) -> None:
        tensor = tensor.detach().contiguous()
        self._sending.append((self._comm.send(tensor, to=to, label=label), tensor))
        while self._sending and self._sending[0][0].is_done:
            self._sending.popleft()[0].wait()  # raises errors of the send


def needs_gradient(tensor: Tensor) -> bool:
    """Whether a tensor of any shape requires a gradient and has a dtype that can have one."""
    return tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())


def _kind(tensor: Tensor) -> TensorKind:
    return TensorKind(shape=tuple(tensor.shape), dtype=tensor.dtype, needs_gradient=needs_gradient(tensor))


def kinds_of(tensors: Sequence[Tensor]) -> list[TensorKind]:
    """Shapes and dtypes of tensors."""
    return [_kind(tensor) for tensor in tensors]


def _has_documents(batch: MicroBatch | None) -> bool:
    return batch is not None and any(isinstance(value, Documents) for value in (*batch.args, *batch.kwargs.values()))


def _key(batch: MicroBatch | None) -> int:
    """A hash of the shapes in a micro-batch, the same in every process; 0 without a micro-batch."""
    if batch is None:
        return 0
    leaves, spec = pytree.tree_flatten((batch.args, batch.kwargs))
    shapes = [(tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else None for leaf in leaves]
    digest = blake2b(repr((shapes, spec)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
