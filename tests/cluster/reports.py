"""A callback of Ray Train that writes reports into the file that RAY_TRAIN_REPORTS names."""

import json
import os
from pathlib import Path
from typing import Any

from ray.train.v2._internal.execution.callback import ReportCallback


class Reports(ReportCallback):
    """Ray Train creates it from RAY_TRAIN_CALLBACKS and calls it in the trainer's controller."""

    def __init__(self) -> None:
        self._path = Path(os.environ["RAY_TRAIN_REPORTS"])

    def after_report(self, training_report: Any, metrics: list[dict[str, Any]]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")
