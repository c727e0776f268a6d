"""What a training loop enters and leaves: `with run.activity(...)` and its like, and `for batch in run.batches(...)`.

Each of them reads the clock and records; none raises, and none holds an exception of the loop back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from threading import get_ident
from typing import TYPE_CHECKING, Generic, TypeVar

from flopwatch.training.totals import Books

if TYPE_CHECKING:
    from flopwatch.training.run import Run

CHECK_BACKLOG = 1 << 10  # steps or batches after which the loop looks whether too much waits to be added up

_T = TypeVar("_T")

# Looked up once: this is what a step pays for.
_WAITS, _GOT, _ENTER, _LEAVE = Books.waits_for_batch, Books.got_batch, Books.enter, Books.leave


class Activity:
    """`with run.activity(name):`; one object serves all uses of a name."""

    __slots__ = ("_name", "_run")

    def __init__(self, run: Run, name: str) -> None:
        self._run, self._name = run, name

    def __enter__(self) -> None:
        run = self._run
        try:
            run._record((_ENTER, run.mark(), self._name, get_ident()))
        except Exception as error:
            run.failed("activity", error)

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        run = self._run
        try:
            run._record((_LEAVE, run.mark(), self._name, get_ident()))
        except Exception as failure:
            run.failed("activity", failure)


class Checkpoint:
    """`with run.checkpoint(step):`"""

    def __init__(self, run: Run, step: int | None) -> None:
        self._run, self._step = run, step

    def __enter__(self) -> None:
        self._run.enter("checkpoint_save")

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        self._run.leave("checkpoint_save")
        if kind is None:
            self._run._note("checkpoint", Books.commit, self._step)


class Wait:
    """`with run.collective_wait():`"""

    __slots__ = ("_began", "_run")

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._run.measures_wait()
        self._run.in_wait = True
        self._began = self._run.mark()

    def __exit__(self, *_: object) -> None:
        self._run.waited(self._began, self._run.mark())
        self._run.in_wait = False


class Background:
    """`with run.background_save():`"""

    __slots__ = ("_began", "_run")

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._began = self._run.clock()

    def __exit__(self, *_: object) -> None:
        self._run._note("background_save", Books.saved_in_background, self._run.clock() - self._began)


class Copy:
    """`with run.host_to_device():`"""

    __slots__ = ("_began", "_run")

    def __init__(self, run: Run) -> None:
        self._run = run

    def __enter__(self) -> None:
        self._began = self._run.mark() if self._run.measuring else None

    def __exit__(self, *_: object) -> None:
        if self._began is not None:
            self._run.phase("host_to_device", self._began, self._run.mark())


class Batches(Generic[_T]):
    """`run.batches(loader)`: the loader itself, timed; as often iterable as the loader is."""

    def __init__(self, run: Run, loader: Iterable[_T]) -> None:
        self._run = run
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError, as from the loader itself

    def __iter__(self) -> Iterator[_T]:
        run, thread, iterator, count = self._run, get_ident(), None, 0
        try:
            while True:
                try:
                    run._record((_WAITS, run.mark(), thread))
                except Exception as error:
                    run.failed("batches", error)
                iterator = iter(self._loader) if iterator is None else iterator
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                try:
                    run._record((_GOT, run.mark(), thread))
                except Exception as error:
                    run.failed("batches", error)
                yield batch
                count += 1
                if not count % CHECK_BACKLOG:
                    run._check_backlog()
        finally:
            run.end_of_batches()
