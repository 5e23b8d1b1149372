"""Plans the jobs of a sweep in a separate process, because the process that starts jobs does not import torch.

`python -m ztk.cli.planned_jobs` reads {"hardware": NAME or null, "jobs": {name: config.yaml}} from standard input and writes one JSON
line per job.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ztk.core.launch import python_path
from ztk.report.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPlan:
    """The plan of a job. values: the content of `plan.json`. If the job cannot be planned, values is empty and reason holds the cause."""

    values: Mapping[str, Any]
    reason: str = ""

    @property
    def does_not_fit(self) -> bool:
        """Whether the job exceeds the hardware's memory. False without hardware."""
        return self.values.get("fits") is False

    @property
    def cells(self) -> tuple[str, str, str]:
        """Table cells: peak memory of the device, whether it fits, seconds per step."""
        if not self.values:
            return "-", "not planned", "-"
        margin, seconds = self.values.get("margin_bytes"), self.values.get("step_seconds")
        fits = "-" if margin is None else f"fits, {format_bytes(margin)}"
        if self.does_not_fit:
            fits = f"does not fit, {format_bytes(self._lacking)}"
        peak = format_bytes(self.values["peak_memory.device_bytes"])
        return peak, fits, "-" if seconds is None else f"{seconds:.3g}"

    @property
    def misfit(self) -> str:
        """The message for a job that was not started."""
        where = "" if self.values["margin_bytes"] < 0 else "the main memory that a node of "
        return f"does not fit: {format_bytes(self._lacking)} more than {where}{self.values['hardware']} has after its reserve"

    @property
    def _lacking(self) -> int:
        """Missing bytes of a device, else of a node's main memory."""
        own = -self.values["margin_bytes"]
        return own if own > 0 else -self.values["host_margin_bytes"]


def plan_jobs(configs: Mapping[str, str], *, hardware: str | None) -> dict[str, JobPlan]:
    """Plans jobs. configs: `config.yaml` of each job by its name. hardware: the hardware option of the plans.

    Raises:
        ValueError: no plan is possible, for example for hardware=here before `python -m ztk.calibrate`.
    """
    if not configs:
        return {}
    request = json.dumps({"hardware": hardware, "jobs": dict(configs)})
    done = subprocess.run(
        [sys.executable, "-m", "ztk.cli.planned_jobs"],
        input=request,
        env=os.environ | {"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise ValueError(last.removeprefix("ValueError: "))
    answers = (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{"))
    return {answer["name"]: JobPlan(values=answer["values"], reason=answer["reason"]) for answer in answers}


def main() -> None:
    """Serves one request from standard input."""
    from ztk.config import from_yaml, hardware_values
    from ztk.core.policies.hardware import Hardware
    from ztk.worker import import_task

    request = json.load(sys.stdin)
    name = request["hardware"]
    hardware = None if name is None else Hardware(**hardware_values(name))
    program = import_task("ztk.experiments.plan")
    for job, text in request["jobs"].items():
        made = program.try_plan(from_yaml(text), hardware=hardware)
        values, reason = ({}, made) if isinstance(made, str) else (made.as_dict(), "")
        sys.stdout.write(json.dumps({"name": job, "values": values, "reason": reason}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
