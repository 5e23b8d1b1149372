"""Kernel tests run the kernels themselves, by the interpreter that tests/conftest.py chose before the first import of ztk."""

import pytest
import torch

from ztk.kernels import set_backend
from ztk.kernels.launch import memory


@pytest.fixture(autouse=True)
def restore_backend():
    """Resets the implementation to the default before and after every test."""
    set_backend("auto")
    yield
    set_backend("auto")


@pytest.fixture
def poisoned(monkeypatch):
    """Uninitialised memory reads as NaN, so a kernel that skips an element cannot pass."""

    def poison(make):
        def empty(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(float("nan")) if out.is_floating_point() else out

        return empty

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))
    if (fast := memory._FAST[True]) is not None:  # allocates the results of launchers on a GPU
        monkeypatch.setitem(memory._FAST, True, poison(fast))
