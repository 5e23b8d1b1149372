"""Shows the progress of tokenisation: a bar on a terminal, else a line every few seconds."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Show = Callable[[int, int, float], None]  # documents, bytes of text, fraction of the files
SECONDS = 5.0  # seconds between two lines


@contextlib.contextmanager
def shown_progress(*, say: Callable[[str], None]) -> Iterator[Show]:
    """Yields a function that shows the progress. say: prints a line if standard error is not a terminal."""
    if not sys.stderr.isatty():
        yield _Lines(say)
        return
    from rich.console import Console  # imported late: most runs find their text tokenised
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=None), TaskProgressColumn(), TextColumn("left"), TimeRemainingColumn())
    with Progress(
        TextColumn("{task.description}"), *columns, console=Console(stderr=True), expand=True, transient=True
    ) as bar:
        task = bar.add_task("tokenises", total=1.0, visible=False)

        def show(documents: int, nbytes: int, share: float) -> None:
            bar.update(task, completed=share, visible=True, description=_words(documents, nbytes=nbytes))

        yield show


class _Lines:
    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._last = say, time.monotonic()

    def __call__(self, documents: int, nbytes: int, share: float) -> None:
        if time.monotonic() - self._last >= SECONDS:
            self._last = time.monotonic()
            self._say(f"{_words(documents, nbytes=nbytes)}, {share:.0%}")


def _words(documents: int, *, nbytes: int) -> str:
    return f"tokenises: {documents:,} documents, {nbytes / 1e6:,.0f} MB"
