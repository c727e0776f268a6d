"""Context managers and iterators that `Run` returns to a training loop. They record times and raise no own errors."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from threading import get_ident
from typing import Any, Generic, TypeVar

from flopwatch.training.recorder import CHECK_BACKLOG, Recorder
from flopwatch.training.totals import Group, Totals

_T = TypeVar("_T")

# Looked up once, because each attribute lookup costs time in every step.
_WAITS, _GOT, _ENTER, _LEAVE = Totals.waits_for_batch, Totals.got_batch, Totals.enter, Totals.leave


class Activity:
    """Context manager whose time counts as the activity `name`. One object serves all uses of that name."""

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


class Checkpoint(Activity):
    """Context manager around a blocking save of `step` (None: the last step), durable unless the block raises."""

    def __init__(self, recorder: Recorder, step: int | None) -> None:
        super().__init__(recorder, "checkpoint_save")
        self._step = step

    def __exit__(self, kind: object = None, *_: object) -> None:
        super().__exit__()
        if kind is None:
            self._recorder.note("checkpoint", Totals.commit, self._step)


class _Timed:
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder


class Wait:
    """Context manager around a wait for other ranks of a process group, recorded as this rank's in the open step."""

    def __init__(self, recorder: Recorder, group: Group | None) -> None:
        self._recorder, self._group = recorder, group

    def __enter__(self) -> None:
        self._recorder.measures_wait()
        self._recorder.in_wait = True
        self._began = self._recorder.mark()

    def __exit__(self, *_: object) -> None:
        self._recorder.waited(self._began, self._recorder.mark(), self._group)
        self._recorder.in_wait = False


class Background(_Timed):
    """Context manager, usable on any thread, around a checkpoint save that runs while training goes on."""

    def __enter__(self) -> None:
        self._began = self._recorder.clock()

    def __exit__(self, *_: object) -> None:
        recorder = self._recorder
        recorder.note("background_save", Totals.saved_in_background, recorder.clock() - self._began)


def commit_when_done(recorder: Recorder, future: Future[Any], step: int | None) -> None:
    """Record a background save until `future` is done. If it succeeds, the checkpoint of `step` is durable."""
    background = Background(recorder)

    def done(future: Future[Any]) -> None:
        background.__exit__(None, None, None)
        if not future.cancelled() and future.exception() is None and step is not None:
            recorder.committed(step)

    background.__enter__()
    future.add_done_callback(done)


class Copy(_Timed):
    """Context manager around a batch's copy to the device, recorded as phase `host_to_device` in a measured step."""

    def __enter__(self) -> None:
        self._began = self._recorder.mark() if self._recorder.measuring else None

    def __exit__(self, *_: object) -> None:
        if self._began is not None:
            self._recorder.phase("host_to_device", self._began, self._recorder.mark())


class Batches(Generic[_T]):
    """Iterable over `loader` that records the time spent waiting for each batch. Repeatable as often as the loader."""

    def __init__(self, recorder: Recorder, loader: Iterable[_T]) -> None:
        self._recorder = recorder
        self._loader = loader

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a TypeError, as from the loader itself

    def __iter__(self) -> Iterator[_T]:
        recorder, thread, iterator, count = self._recorder, get_ident(), None, 0
        try:
            while True:
                try:  # in place of `note`, because a call costs time in every step
                    recorder.record((_WAITS, recorder.mark(), thread))
                except Exception as error:
                    recorder.failed("batches", error)
                iterator = iter(self._loader) if iterator is None else iterator
                try:
                    batch = next(iterator)
                except StopIteration:
                    return
                try:  # in place of `note`, because a call costs time in every step
                    recorder.record((_GOT, recorder.mark(), thread))
                except Exception as error:
                    recorder.failed("batches", error)
                yield batch
                count += 1
                if not count % CHECK_BACKLOG:
                    recorder.check_backlog()
        finally:
            recorder.note("batches", Totals.end_of_batches, get_ident())
