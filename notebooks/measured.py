"""The bytes of activations that a step keeps on the CPU, where no allocator counts them."""

import sys
from pathlib import Path
from typing import Any

import torch

import ztk

sys.path.insert(0, str(Path(ztk.__file__).parents[1]))  # the programs and the checks of the checkout

from tests.planner.measure import branches_of_a_gpu
from ztk.config import compose
from ztk.core.runtime import Process
from ztk.experiments import pretrain
from ztk.planner.trace import STEPS
from ztk.planner.tracker import StepTracker


def peak_of_step(*overrides: str, **keys: Any) -> int:
    """The most bytes that the tensors of a rank's step had at one time, in this process: real values, real storages, counted as they live.

    The rank calls the operations of a GPU, which the plan is about; the CPU's own have other temporaries.
    """
    words = [*overrides, *(f"{key}={value}" for key, value in keys.items())]
    config = compose(*words, output_dir=".")
    process = Process.start(device="cpu")
    tracker = StepTracker(device="cpu")
    tokens = torch.zeros(config.train.micro_batch_size, config.data.seq_len, dtype=torch.int64)
    with branches_of_a_gpu(offloads=False), tracker:
        engine = pretrain.build_engine(config, process=process)
        for _ in range(STEPS):
            tracker.restart()
            engine.backward(engine(tokens, tokens))
            engine.step()
        peak = tracker.peak.nbytes
    engine.close()
    process.stop()
    return peak
