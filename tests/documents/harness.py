"""Runs a document's block on a rank: its own text, with the substitutions that the test names, under ztk or under plain PyTorch."""

import contextlib
import importlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ztk.deepspeed
from tests.documents import plain
from ztk.core.runtime import Process
from ztk.deepspeed.config import read_source

BLOCKS = Path(__file__).with_name("blocks")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One block and its inputs.

    block: file in `blocks/`. names: `function` in `preludes.py` that returns the names which the block does not define.
    replace: text -> text, for hub names and `.cuda()`. argv: the command line of a script. then: Python text to run after it.
    config, files: JSON files in the working folder: `ds_config.json`, and files with their own names.
    repeat: repeats the block from this text on this many times. keep: names whose values are returned.
    """

    block: str
    names: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    replace: dict[str, str] = field(default_factory=dict)
    argv: tuple[str, ...] = ()
    config: dict | None = None
    files: dict[str, dict] = field(default_factory=dict)
    then: str = ""
    repeat: tuple[str, int] | None = None
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Results of a run: the mean over ranks of every loss passed to `backward`, fp32 weights, the kept names, or an error."""

    losses: list[float]
    weights: dict[str, Tensor]
    kept: dict[str, Any]
    error: str | None


def config_of(name: str, **more: Any) -> dict:
    """A document's JSON, with the keys in `more` that its text leaves out."""
    return {**read_source(str(BLOCKS / name)), **more}


def run(process: Process, *, work: Run, by_plain_pytorch: bool = False) -> Found:
    """Every rank runs the block, in one folder. Random numbers differ between the ranks; weights are rank 0's."""
    os.environ |= {
        "LOCAL_RANK": str(process.local_rank),
        "LOCAL_WORLD_SIZE": str(process.local_world_size),
    }  # as a launcher does
    recorder = _Recorder(process)
    head, rest, count = _text(work)
    kept, error = {}, None
    with _folder(process, work=work), _deepspeed(recorder, by_plain_pytorch=by_plain_pytorch), _arguments(work):
        torch.manual_seed(process.rank)
        namespace: dict[str, Any] = {"__name__": "__main__"}
        if work.names is not None:
            prelude = getattr(importlib.import_module("tests.documents.preludes"), work.names)
            namespace |= prelude(process=process, **work.options)
            process.comm.barrier()
        try:
            exec(compile(head, work.block, "exec"), namespace)
            for _ in range(count):
                exec(compile(rest, work.block, "exec"), namespace)
            exec(compile(work.then, f"after {work.block}", "exec"), namespace)
        except (ValueError, AssertionError, AttributeError) as refused:
            error = f"{type(refused).__name__}: {refused}"
        process.comm.barrier()
        weights = recorder.weights()
        kept = {name: namespace[name] for name in work.keep if name in namespace}
        recorder.close()
    return Found(losses=recorder.losses, weights=weights, kept=kept, error=error)


def _text(work: Run) -> tuple[str, str, int]:
    """The part that runs once, the repeated part, and the number of repeats."""
    text = (BLOCKS / work.block).read_text()
    for old, new in work.replace.items():
        if old not in text:
            raise ValueError(f"{work.block} does not hold {old!r}")
        text = text.replace(old, new)
    if work.repeat is None:
        return text, "", 0
    mark, count = work.repeat
    head, found, rest = text.partition(mark)
    assert found, f"{work.block} does not hold {mark!r}"
    return head, found + rest, count


class _Recorder:
    """Listens to the engines that a block makes."""

    def __init__(self, process: Process) -> None:
        self._process, self._engine = process, None
        self.losses: list[float] = []

    def initialize(self, original):
        def initialize(*args, **kwargs):
            made = original(*args, **kwargs)
            self._engine = made[0]
            backward = self._engine.backward

            def recorded(loss: Tensor, *more, **options):
                value = loss.detach().float().view(1)
                self.losses.append(float(self._process.comm.gather_scalars(value, label="document loss").mean()))
                return backward(loss, *more, **options)

            self._engine.backward = recorded
            return made

        return initialize

    def weights(self) -> dict[str, Tensor]:
        engine = self._engine
        if isinstance(engine, plain.PlainEngine):
            return engine.weights()
        if engine is None or engine.optimizer is None:
            return {}
        return {
            name: value.float().clone()
            for name, p in engine.module.named_parameters()
            if (value := ztk.deepspeed.safe_get_full_fp32_param(p)) is not None
        }

    def close(self) -> None:
        if isinstance(self._engine, ztk.deepspeed.DeepSpeedEngine):
            self._engine.destroy()


@contextlib.contextmanager
def _deepspeed(recorder: _Recorder, *, by_plain_pytorch: bool) -> Iterator[None]:
    """Makes `import deepspeed` import ztk, or the plain stand-in, and records the calls of both."""
    ztk.deepspeed.install()
    home = ztk.deepspeed
    if by_plain_pytorch:
        hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "deepspeed"}
        for name in hidden:
            del sys.modules[name]
        sys.modules |= plain.modules()
        home = sys.modules["deepspeed"]
    original = home.initialize
    home.initialize = recorder.initialize(original)
    try:
        yield
    finally:
        home.initialize = original
        if by_plain_pytorch:
            for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
                del sys.modules[name]
            sys.modules.update(hidden)


@contextlib.contextmanager
def _folder(process: Process, *, work: Run) -> Iterator[None]:
    """A working folder that the ranks share, with the block's files."""
    before, rank = os.getcwd(), process.rank
    folder = process.comm.gather_objects(tempfile.mkdtemp() if rank == 0 else None)[0]
    os.chdir(folder)
    for name, content in ({"ds_config.json": work.config} | work.files).items():
        if content is not None and rank == 0:
            Path(name).write_text(json.dumps(content))
    process.comm.barrier()
    try:
        yield
    finally:
        os.chdir(before)
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _arguments(work: Run) -> Iterator[None]:
    before, sys.argv = sys.argv, [work.block, *work.argv]
    try:
        yield
    finally:
        sys.argv = before
