"""A residual network with dropout, and a probe of the memory that a forward leaves behind."""

import weakref
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIDTH, HIDDEN, ROWS, LAYERS = 16, 64, 32, 4


class Block(nn.Module):
    def __init__(self, *, dropout: float = 0.3) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x))))) * scale


class Residual(nn.Module):
    """Block 0's input needs a gradient, as behind an embedding."""

    def __init__(self, *, dropout: float = 0.3) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(dropout=dropout) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.enter(x), torch.tensor(0.5)
        for block in self.blocks:
            x = block(x, scale=scale)
        return x.square().mean()


def build(**options) -> Residual:
    """The same model on every call."""
    torch.manual_seed(0)
    return Residual(**options)


def rows(step: int = 0) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, *, steps: int = 3) -> list[float]:
    """Losses and sums of gradients, which are equal only if the gradients are bitwise equal."""
    found = []
    torch.manual_seed(1)
    for step in range(steps):
        loss = model(rows(step))
        loss.backward()
        found.append(loss.item())
        for parameter in model.parameters():
            found.append(parameter.grad.double().sum().item())
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return found


class Calls(TorchDispatchMode):
    """Counts the calls of each operator inside."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of[func] += 1
        return func(*args, **(kwargs or {}))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that were made inside and are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._made: dict[int, tuple[weakref.ref, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in given:
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes()
        return out

    @property
    def now(self) -> int:
        return sum(nbytes for storage, nbytes in self._made.values() if not storage.expired())
