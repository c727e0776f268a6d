"""Context managers and iterators around a training loop: `with run.activity(...)`, `for batch in run.batches(...)`.

Each reads the clock and records an event. None raises, and none suppresses an exception of the loop.
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from threading import get_ident
from typing import Any, Generic, TypeVar

from flopwatch.training.recorder import CHECK_BACKLOG, Recorder
from flopwatch.training.totals import Totals

_T = TypeVar("_T")

# Looked up once: every step pays for it.
_WAITS, _GOT, _ENTER, _LEAVE = Totals.waits_for_batch, Totals.got_batch, Totals.enter, Totals.leave


class Activity:
    """Context manager whose time counts as the activity `name`; one object serves all uses of a name."""

    __slots__ = ("_name", "_recorder")

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder, self._name = recorder, name

    def __enter__(self) -> None:
        recorder = self._recorder
        try:
            recorder.record((_ENTER, recorder.mark(), self._name, get_ident()))
        except Exception as error:
            recorder.failed("activity", error)

    def __exit__(self, kind: object = None, error: object = None, trace: object = None) -> None:
        recorder = self._recorder
        try:
            recorder.record((_LEAVE, recorder.mark(), self._name, get_ident()))
        except Exception as failure:
            recorder.failed("activity", failure)


class Checkpoint:
    """Context manager around a blocking checkpoint save; the checkpoint counts as durable if no exception leaves it."""

    def __init__(self, recorder: Recorder, step: int | None) -> None:
        self._recorder, self._step = recorder, step

    def __enter__(self) -> None:
        self._recorder.enter("checkpoint_save")

    def __exit__(self, kind: type[BaseException] | None = None, *_: object) -> None:
        self._recorder.leave("checkpoint_save")
        if kind is None:
            self._recorder.note("checkpoint", Totals.commit, self._step)


class _Timed:
    """Base of the context managers that record the time between their ends."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder


class Wait(_Timed):
    """Context manager around a wait for other ranks."""

    def __enter__(self) -> None:
        self._recorder.measures_wait()
        self._recorder.in_wait = True
        self._began = self._recorder.mark()

    def __exit__(self, *_: object) -> None:
        self._recorder.waited(self._began, self._recorder.mark())
        self._recorder.in_wait = False


class Background(_Timed):
    """Context manager around a checkpoint save that runs while training goes on; for any thread."""

    def __enter__(self) -> None:
        self._began = self._recorder.clock()

    def __exit__(self, *_: object) -> None:
        recorder = self._recorder
        recorder.note("background_save", Totals.saved_in_background, recorder.clock() - self._began)


def commit_when_done(recorder: Recorder, future: Future[Any], step: int | None) -> None:
    """Record a background save until `future` is done, and a durable checkpoint of `step` if it has no error."""
    background = Background(recorder)

    def done(future: Future[Any]) -> None:
        background.__exit__(None, None, None)
        if not future.cancelled() and future.exception() is None and step is not None:
            recorder.committed(step)

    background.__enter__()
    future.add_done_callback(done)


class Copy(_Timed):
    """Context manager around a copy from host to device, recorded as a phase of a measured step."""

    def __enter__(self) -> None:
        self._began = self._recorder.mark() if self._recorder.measuring else None

    def __exit__(self, *_: object) -> None:
        if self._began is not None:
            self._recorder.phase("host_to_device", self._began, self._recorder.mark())


class Batches(Generic[_T]):
    """A loader whose waits for batches are recorded; can be iterated as often as the loader itself."""

    def __init__(self, recorder: Recorder, loader: Iterable[_T]) -> None:
        self._recorder = recorder
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError, as from the loader itself

    def __iter__(self) -> Iterator[_T]:
        recorder, thread, iterator, count = self._recorder, get_ident(), None, 0
        try:
            while True:
                try:
                    recorder.record((_WAITS, recorder.mark(), thread))
                except Exception as error:
                    recorder.failed("batches", error)
                iterator = iter(self._loader) if iterator is None else iterator
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                try:
                    recorder.record((_GOT, recorder.mark(), thread))
                except Exception as error:
                    recorder.failed("batches", error)
                yield batch
                count += 1
                if not count % CHECK_BACKLOG:
                    recorder.check_backlog()
        finally:
            recorder.note("batches", Totals.end_of_batches, get_ident())
