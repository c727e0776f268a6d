"""Progress bar on standard error. It needs rich, which the demo's packages have."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[float], None]


@contextmanager
def progress(text: str, total: float | None = None, colour: bool = True) -> Iterator[Advance]:
    """Show a bar until the block ends, if standard error is a terminal. Yield a function that adds to what is done.

    Without a total, the bar shows only that time passes. Colours obey NO_COLOR, as everywhere in rich.
    """
    try:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:
        yield _ignore
        return
    columns = [TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()]
    # Without a thread that draws, because the simulator forks.
    bar = Progress(
        *columns if total is None else [*columns, TaskProgressColumn()],
        console=Console(stderr=True, no_color=None if colour else True),
        auto_refresh=total is None,
        transient=True,
        disable=not sys.stderr.isatty(),  # FORCE_COLOR is about colours only
    )
    with bar:
        task = bar.add_task(text, total=total)
        yield lambda done: bar.update(task, advance=done, refresh=True)


def _ignore(_: float) -> None:
    """Do nothing with what is done."""
