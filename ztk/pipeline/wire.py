"""What flows between stages: nestings of tensors, taken apart, sent and put together again.

The receiver must know shapes before it can receive. They are agreed when they change: the first stage's ranks know the shapes of their
micro-batches, and from them every rank knows before a batch which of its transfers are of a kind that it has not seen; those are
announced, all others are the bare tensors. A model whose activations change shape by itself says `dynamic_shapes`: then every
transfer is announced.
"""

import pickle
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ztk.pipeline.layers import Carry, MicroBatch
from ztk.runtime import Comm
from ztk.runtime.comm import Work


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorKind:
    """One tensor of a transfer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    needs_gradient: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferKind:
    """Everything about a transfer but its numbers. `others`: leaves that are no tensors, by position."""

    spec: pytree.TreeSpec
    tensors: tuple[TensorKind, ...]
    others: tuple[tuple[int, object], ...]


class Arriving:
    """A nesting of tensors on its way here."""

    def __init__(self, kind: TransferKind, *, tensors: list[Tensor], works: list[Work]) -> None:
        self._kind, self._tensors, self._works = kind, tensors, works

    def wait(self) -> Carry:
        """The activation: floating tensors whose gradient the sender wants are leaves that require it."""
        for work in self._works:
            work.wait()
        for tensor, kind in zip(self._tensors, self._kind.tensors, strict=True):
            tensor.requires_grad_(kind.needs_gradient)
        leaves: list[object] = list(self._tensors)
        for position, other in self._kind.others:
            leaves.insert(position, other)
        return pytree.tree_unflatten(leaves, self._kind.spec)


class ArrivingGradients:
    """Gradients on their way here, in the order of the tensors that want them."""

    def __init__(self, *, tensors: list[Tensor], works: list[Work]) -> None:
        self._tensors, self._works = tensors, works

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        return self._tensors


class Wire:
    """Transfers along the pipeline axis `comm`, counted as "send": one tensor's bytes per boundary and micro-batch each way."""

    def __init__(self, comm: Comm, *, dynamic_shapes: bool = False) -> None:
        self._comm, self._dynamic = comm, dynamic_shapes
        self._known: dict[
            tuple, TransferKind
        ] = {}  # (stage, is training, shapes of the micro-batch) -> of what arrives
        self._announced: dict[tuple, TransferKind] = {}  # the same of what leaves
        self._sending: deque[tuple[Work, Tensor]] = deque()
        self._keys: list[int] = []
        self._is_training = True

    def open(self, batches: Sequence[MicroBatch | None]) -> None:
        """A batch begins: every rank learns the shapes of the first stage's micro-batches. A collective call."""
        self._is_training = torch.is_grad_enabled()
        keys = torch.tensor([_key(batch) for batch in batches], dtype=torch.int64)  # on the host: no device waits
        self._keys = self._comm.gather_scalars(keys, label="shapes of micro-batches")[0].tolist()

    def send_activation(self, carry: Carry, *, stage: int, to: int, micro_batch: int) -> None:
        """The output of `stage`; its gradients will be those of the tensors in it that require them, in order."""
        leaves, spec = pytree.tree_flatten(carry)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        key = (stage + 1, self._is_training, self._keys[micro_batch])
        others = tuple((i, leaf) for i, leaf in enumerate(leaves) if not isinstance(leaf, Tensor))
        kind = TransferKind(spec=spec, tensors=tuple(map(_kind, tensors)), others=others)
        if self._dynamic or key not in self._announced:
            self._announce(kind, to=to)
            self._announced[key] = kind
        elif kind != self._announced[key]:
            raise ValueError(
                f"the output of pipeline stage {stage} changed from {self._announced[key]} to {kind} although the "
                "micro-batch has the shapes it had before; build the engine with dynamic_shapes=True"
            )
        for tensor in tensors:
            self._send(tensor, to=to, label=f"activation {stage}.{micro_batch}")

    def receive_activation(self, *, stage: int, source: int, micro_batch: int) -> Arriving:
        """The input of `stage`."""
        key = (stage, self._is_training, self._keys[micro_batch])
        if self._dynamic or key not in self._known:
            self._known[key] = self._hear(source=source)
        kind = self._known[key]
        tensors = [torch.empty(t.shape, dtype=t.dtype, device=self._comm.device) for t in kind.tensors]
        label = f"activation {stage - 1}.{micro_batch}"
        works = [self._comm.recv(tensor, source=source, label=label) for tensor in tensors]
        return Arriving(kind, tensors=tensors, works=works)

    def send_gradients(self, gradients: list[Tensor], *, stage: int, to: int, micro_batch: int) -> None:
        """The gradients of the input of `stage`."""
        for gradient in gradients:
            self._send(gradient, to=to, label=f"gradient {stage}.{micro_batch}")

    def receive_gradients(
        self, like: list[TensorKind], *, stage: int, source: int, micro_batch: int
    ) -> ArrivingGradients:
        """The gradients of the output of `stage`, whose tensors are `like`."""
        tensors = [torch.empty(t.shape, dtype=t.dtype, device=self._comm.device) for t in like]
        label = f"gradient {stage + 1}.{micro_batch}"
        works = [self._comm.recv(tensor, source=source, label=label) for tensor in tensors]
        return ArrivingGradients(tensors=tensors, works=works)

    def spread(self, carry: Carry, *, source: int) -> Carry:
        """What pipeline rank `source` has, on every rank. A collective call."""
        leaves, spec = pytree.tree_flatten(carry)
        kinds = [_kind(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        kinds, spec = self._comm.gather_objects((kinds, spec))[source]
        out = []
        for index, kind in enumerate(kinds):
            if not isinstance(kind, TensorKind):
                out.append(kind)
                continue
            is_own = self._comm.rank == source
            tensor = leaves[index] if is_own else torch.empty(kind.shape, dtype=kind.dtype, device=self._comm.device)
            out.append(tensor.contiguous())
            self._comm.broadcast(out[-1], source=source, label="output").wait()
        return pytree.tree_unflatten(out, spec)

    def finish(self) -> None:
        """Everything sent has left."""
        while self._sending:
            self._sending.popleft()[0].wait()

    def _send(self, tensor: Tensor, *, to: int, label: str) -> None:
        tensor = tensor.detach().contiguous()
        self._sending.append((self._comm.send(tensor, to=to, label=label), tensor))
        while self._sending and self._sending[0][0].is_done:
            self._sending.popleft()[0].wait()  # raises what went wrong

    def _announce(self, kind: TransferKind, *, to: int) -> None:
        data = torch.frombuffer(bytearray(pickle.dumps(kind)), dtype=torch.uint8).to(self._comm.device)
        size = torch.tensor([data.numel()], device=self._comm.device)
        for tensor in (size, data):
            self._sending.append((self._comm.send(tensor, to=to, label="shapes", kind="scalars"), tensor))

    def _hear(self, *, source: int) -> TransferKind:
        size = torch.zeros(1, dtype=torch.int64, device=self._comm.device)
        self._comm.recv(size, source=source, label="shapes").wait()
        data = torch.empty(int(size), dtype=torch.uint8, device=self._comm.device)
        self._comm.recv(data, source=source, label="shapes").wait()
        return pickle.loads(bytes(data.tolist()))


def needs_gradient(tensor: Tensor) -> bool:
    return tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex())


def _kind(tensor: Tensor) -> TensorKind:
    return TensorKind(shape=tuple(tensor.shape), dtype=tensor.dtype, needs_gradient=needs_gradient(tensor))


def kinds_of(tensors: Sequence[Tensor]) -> list[TensorKind]:
    """Shapes and dtypes of tensors that want gradients."""
    return [_kind(tensor) for tensor in tensors]


def _key(batch: MicroBatch | None) -> int:
    """A number for the shapes in a micro-batch, the same in every process; 0 on ranks that were given none."""
    if batch is None:
        return 0
    leaves, spec = pytree.tree_flatten((batch.args, batch.kwargs))
    shapes = [(tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, Tensor) else None for leaf in leaves]
    digest = blake2b(repr((shapes, spec)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
