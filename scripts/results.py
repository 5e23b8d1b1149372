"""Where the scripts keep what they have measured: a folder per machine."""

import re
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "experiments" / "results"


def folder_of(gpu: str) -> Path:
    """The folder of a GPU's results, by its name as torch gives it: NVIDIA H200 -> experiments/results/nvidia-h200."""
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
