"""Whose a parameter is, and for how long."""

import gc
import weakref

import pytest

from tests.deepspeed.scripts import build, config, loop
from ztk import deepspeed
from ztk.core.runtime import Process
from ztk.deepspeed.engine.owners import owner_of


def dropped(process: Process, *, stage: int) -> list[bool]:
    """Whether engine and model still exist after a script has dropped both without `destroy`."""

    def trained() -> list[weakref.ref]:
        model = build()
        engine, *_ = deepspeed.initialize(model=model, config=config(stage=stage))
        loop(process, engine, steps=1)
        assert owner_of(next(model.parameters())).engine is engine.engine
        return [weakref.ref(engine.engine), weakref.ref(model)]

    left = trained()
    gc.collect()
    return [ref() is not None for ref in left]


@pytest.mark.parametrize("stage", [0, 3])
def test_an_engine_that_is_dropped_frees_its_memory(ranks, stage):
    assert ranks(1).run(dropped, stage=stage)[0] == [False, False]
