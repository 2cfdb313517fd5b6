"""Progress bars, for people who wait."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from .result import Progress

__all__ = ["progress_bar"]

#: Seconds after which a person begins to wait.
_PATIENCE = 1.0


@contextmanager
def progress_bar(what: str) -> Iterator[Progress | None]:
    """A progress bar for what takes longer than a second, on a terminal only.

    Args:
        what: What is done meanwhile, ``"comparing"``.

    Yields:
        A function that takes how much is done and how much there is; `None` where nothing is shown.
    """
    if sys.stderr is None or not sys.stderr.isatty():  # a daemon has none
        yield None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress as Bar
    except ImportError:  # it comes with the extras
        yield None
        return
    started, bar, task = time.monotonic(), Bar(console=Console(stderr=True), transient=True), None

    def advance(done: int, total: int) -> None:
        nonlocal task
        if task is None and time.monotonic() - started > _PATIENCE:
            bar.start()
            task = bar.add_task(what, total=total)
        if task is not None:
            bar.update(task, completed=done)

    try:
        yield advance
    finally:
        bar.stop()
