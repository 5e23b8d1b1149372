"""Folders of measured results, one per machine."""

import re
import subprocess
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "experiments" / "results"
PREDICTED = RESULTS / "predicted_gpu.json"  # of scripts/predict_gpu.py


def folder_of(gpu: str) -> Path:
    """The folder for the results of a GPU with torch's name: NVIDIA H200 -> experiments/results/nvidia-h200."""
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def commit_of(checkout: Path) -> str:
    """The short hash of the checked-out commit; `unknown` in a copy without git or its folder."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return done.stdout.strip() or "unknown"
