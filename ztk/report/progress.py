"""The live display of a run."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from ztk.report.units import format_bytes, format_count


class LiveProgress:
    """A progress bar and a line of metrics, redrawn in place on a terminal. Only one process may draw. device: see `describe_row`."""

    def __init__(self, *, console: Console, total_steps: int, start_step: int, device: str = "GPU") -> None:
        self._console, self._device = console, device
        self._bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            expand=True,
        )
        self._task = self._bar.add_task("train", total=total_steps, completed=start_step)
        self._live = Live(self._bar, console=console, refresh_per_second=4)
        self._live.start()

    def row(self, row: Mapping[str, Any]) -> None:
        self._bar.update(self._task, completed=row["step"])
        self._live.update(
            Group(self._bar, Text(describe_row(row, device=self._device), overflow="ellipsis", no_wrap=True))
        )

    def close(self) -> None:
        self._live.stop()


class PlainProgress:
    """Prints one line every `seconds`, and for the first and the last step, for logs and pipes. device: see `describe_row`."""

    def __init__(self, *, console: Console, total_steps: int, seconds: float = 10.0, device: str = "GPU") -> None:
        self._console, self._device = console, device
        self._total_steps = total_steps
        self._seconds = seconds
        self._last = float("-inf")

    def row(self, row: Mapping[str, Any]) -> None:
        now = time.monotonic()
        if now - self._last < self._seconds and row["step"] != self._total_steps:
            return
        self._last = now
        text = f"step {row['step']}/{self._total_steps}  {describe_row(row, device=self._device)}"
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def close(self) -> None:
        pass


def describe_row(row: Mapping[str, Any], *, device: str = "GPU") -> str:
    """Describes a row: loss, learning rate, speed with MFU and HFU if known, memory of the tiers in use, validation loss and loss scale
    if any.

    Rows of a policy start with reward, KL divergence, entropy and length. device: unit in "tokens/s (N/GPU)", "GPU" or "rank".
    """
    parts = [f"{name} {row[name]:.3f}" for name in ("reward", "kl", "entropy", "length") if row.get(name) is not None]
    parts += [
        f"loss {row['loss']:.4f}",
        f"lr {row['lr']:.2e}",
        _speed(row, device=device),
        f"{1e3 * row['step_seconds']:.0f} ms/step",
    ]
    parts += [f"{name.upper()} {row[name]:.1%}" for name in ("mfu", "hfu") if row.get(name) is not None]
    for tier in ("device", "host", "nvme"):
        if nbytes := row[f"memory.{tier}_bytes"]:
            parts.append(f"{tier} {format_bytes(nbytes)}")
    if row["loss_scale"] != 1:
        parts.append(f"scale {row['loss_scale']:g}")
    if (validation := row.get("validation_loss")) is not None:
        parts.append(f"validation {validation:.4f}")
    return "  ".join(parts)


def _speed(row: Mapping[str, Any], *, device: str) -> str:
    """Formats tokens per second over all devices, and per device if there are several."""
    total, own = row["tokens_per_second"], row.get("tokens_per_second_per_gpu")
    of_one = f" ({format_count(own)}/{device})" if own is not None and own != total else ""
    return f"{format_count(total)} tokens/s{of_one}"
