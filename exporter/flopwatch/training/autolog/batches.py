"""Batches of a training loop: time spent waiting for them, and the tokens in them.

A data loader feeds training if a backward pass follows its batch. It feeds evaluation if two of its batches follow each
other without a backward pass, or if it runs under no_grad or inference_mode. That is decided once per dataset. Tokens
count for the next backward pass. Only DataLoader.__iter__ and its iterators' __next__ are replaced.
"""

import contextlib
import itertools
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flopwatch.training.autolog.loop import LoopState
from flopwatch.training.recorder import Recorder
from flopwatch.training.sequence_lengths import lengths
from flopwatch.training.totals import Mark, Totals

MAX_FRAMES = 20  # callers inspected to find the code that fetches a batch

TRAINING, EVALUATION = "training", "evaluation"


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of one batch: their number, and the sum of the squared lengths of its samples."""

    count: int
    sum_len_squared: int


class Loaders:
    """Observer of all DataLoaders, which it classifies as training or evaluation by what follows each batch."""

    def __init__(self, loop: LoopState) -> None:
        self._loop = loop
        self._fetching = False
        self._made: tuple[int, Mark] | None = None  # id of the newest iterator, and when its making began
        self._kinds: dict[int, str] = {}  # by the dataset's id
        self._always_training: set[int] = set()  # also under no_grad
        self._newest: int | None = None  # dataset of the last batch
        self._held: tuple[int, Mark, Mark] | None = None  # a batch of unknown purpose: dataset, begin and end of wait
        self._evaluated: int | None = None  # dataset of the open evaluation
        self._evaluated_batches = 0
        self._batches: dict[int, deque[Tokens | None]] = {}  # fetched and not yet trained on
        self._passed: dict[int, list[Tokens | None]] = {}  # dropped from _batches, until the loop fetches again
        self._iterating: dict[int, weakref.ref[Any]] = {}

    def around_iter(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a replacement of DataLoader.__iter__ that counts the start of worker processes as waiting."""
        call = self._loop.call

        def __iter__(loader: Any) -> Any:
            recorder = call(self._loop.active_recorder)
            began = None if recorder is None else call(recorder.mark)
            iterator = original(loader)
            if began is not None:
                self._made = id(iterator), began
            return iterator

        return __iter__

    def around_next(self, original: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a replacement of a DataLoader iterator's __next__ that records the wait and the batch."""
        call = self._loop.call

        def __next__(iterator: Any) -> Any:
            begun = call(self._begins, iterator)
            if begun is None:
                return original(iterator)
            try:
                batch = original(iterator)
            except StopIteration:
                call(self._ends, iterator, *begun)
                raise
            finally:
                self._fetching = self._loop.checkpoints.fetching = False
            call(self._came, iterator, batch, *begun)
            return batch

        return __next__

    def _begins(self, iterator: Any) -> tuple[Recorder, Mark] | None:
        recorder = self._loop.active_recorder()
        if recorder is None or self._fetching or not self._loop.on_this_thread():
            return None
        self._fetching = self._loop.checkpoints.fetching = True
        self._loop.checkpoints.training_goes_on()
        made, self._made = self._made, None
        return recorder, recorder.mark() if made is None or made[0] != id(iterator) else made[1]

    def _came(self, iterator: Any, batch: Any, recorder: Recorder, began: Mark) -> None:
        ended = recorder.mark()
        dataset = self._newest = self._dataset(iterator)
        kind = self._kinds.get(dataset)
        if dataset not in self._always_training and (kind == EVALUATION or not torch.is_grad_enabled()):
            self._evaluate(recorder, dataset, began)
            return
        unused = self._batches.get(dataset)
        if unused is None:
            unused = self._batches[dataset] = deque(maxlen=1 + _fetches_ahead(sys._getframe(1)))
        if not unused:
            self._passed.pop(dataset, None)
        elif len(unused) == unused.maxlen:
            # Skipped by a loop that resumes, or the first of several batches fetched before training.
            self._passed.setdefault(dataset, []).append(unused[0])
        unused.append(None)  # in case tokens_of() raises
        unused[-1] = tokens_of(batch, self._loop.settings.tokens_from)
        if kind == TRAINING:
            self._leave_evaluation(recorder, began)
            recorder.waited_for_batch(began, ended)
        elif self._loop.seen_backward and self._held is not None and self._held[0] == dataset:
            # Two batches in a row, without a backward pass between them.
            self._kinds[dataset] = EVALUATION
            self._evaluate(recorder, dataset, self._held[1])
        else:
            self._held = dataset, began, ended

    def _ends(self, iterator: Any, recorder: Recorder, began: Mark) -> None:
        dataset = self._dataset(iterator)
        if self._held is not None and self._held[0] == dataset and self._loop.seen_backward:
            self._kinds[dataset] = EVALUATION
            self._evaluate(recorder, dataset, self._held[1])
        self._dropped(dataset, began)

    def _evaluate(self, recorder: Recorder, dataset: int, since: Mark) -> None:
        if self._evaluated is None:
            recorder.enter("evaluation", at=since)
            self._evaluated_batches = 0
        self._evaluated, self._held = dataset, None
        self._evaluated_batches += 1
        self._batches.pop(dataset, None)
        self._passed.pop(dataset, None)

    def _leave_evaluation(self, recorder: Recorder, now: Mark) -> None:
        if self._evaluated is not None:
            self._evaluated = None
            recorder.leave("evaluation", at=now)

    def settle(self, recorder: Recorder) -> None:
        """Count the newest batch and the wait for it as training, and end an open evaluation."""
        newest = self._newest
        if newest is None:
            return
        if self._evaluated is not None:
            if self._evaluated == newest and self._evaluated_batches == 1:
                self._always_training.add(newest)  # its batches are fetched under no_grad
                self._kinds[newest] = TRAINING
            self._leave_evaluation(recorder, recorder.mark())
        if self._held is not None:
            dataset, began, ended = self._held
            self._kinds[dataset], self._held = TRAINING, None
            recorder.waited_for_batch(began, ended)

    def training(self, recorder: Recorder) -> list[Tokens | None]:
        """Count the newest batch as training. Return the tokens of the batches that this backward pass uses."""
        self.settle(recorder)
        tokens = [unused.popleft() for unused in self._batches.values() if unused]
        if not tokens:
            tokens = [passed.pop() for passed in self._passed.values() if passed]
        return tokens

    def _dataset(self, iterator: Any) -> int:
        """Return the id of an iterator's dataset. When the iterator is deleted, the end of its loop is recorded."""
        dataset = getattr(iterator, "_dataset", iterator)
        this = id(dataset)
        known = self._iterating.get(this)
        if known is None or known() is not iterator:
            self._iterating[this] = weakref.ref(iterator, lambda _: self._loop.call(self._dropped, this, None))
            if this not in self._kinds:
                with contextlib.suppress(TypeError):  # a list, for example, allows no finalizer
                    weakref.finalize(dataset, self._forget, this).atexit = False
        return this

    def _forget(self, dataset: int) -> None:
        for by_dataset in (self._kinds, self._batches, self._passed, self._iterating):
            by_dataset.pop(dataset, None)
        self._always_training.discard(dataset)

    def _dropped(self, dataset: int, at: Mark | None) -> None:
        """Record that a loop over batches ended. Its last wait began at `at`, None after a `break`."""
        self._iterating.pop(dataset, None)
        recorder = self._loop.active_recorder()
        if recorder is None or not self._loop.on_this_thread():
            return
        if self._evaluated == dataset:
            self._leave_evaluation(recorder, recorder.mark())
        elif self._kinds.get(dataset) == TRAINING and self._newest == dataset:
            if at is not None:
                recorder.waited_for_batch(at, recorder.mark())  # the loop waited for the loader to report its end
            recorder.note("batches", Totals.end_of_batches, threading.get_ident())


def tokens_of(batch: Any, place: str | None = None) -> Tokens | None:
    """Return the tokens of a batch: integers at the key, attribute or index `place`, by default `input_ids`.

    An `attention_mask` of the same shape excludes padding. None without such integers, or if that mask is on a device.
    """
    ids = _at(batch, "input_ids" if place is None else place)
    if not isinstance(ids, torch.Tensor) or not ids.dim():
        return None
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool:
        return None
    others = (_at(batch, "attention_mask"), _at(batch, "position_ids"))
    mask, positions = (x if isinstance(x, torch.Tensor) and x.shape == ids.shape else None for x in others)
    unpadded = lengths(ids, mask, positions)
    return None if unpadded is None else Tokens(sum(unpadded), sum(length * length for length in unpadded))


def _at(batch: Any, place: str) -> Any:
    if isinstance(batch, Mapping):
        return batch.get(place)
    if isinstance(batch, Sequence) and not isinstance(batch, str) and place.lstrip("-").isdigit():
        return batch[int(place)] if -len(batch) <= int(place) < len(batch) else None
    return getattr(batch, place, None)


def _fetches_ahead(caller: Any) -> int:
    """Return how many batches ahead Accelerate or transformers' Trainer, found from the frame `caller`, fetches."""
    ahead = 0
    for frame, _ in itertools.islice(traceback.walk_stack(caller), MAX_FRAMES):
        name = frame.f_globals.get("__name__", "")
        if name == "accelerate.data_loader":
            ahead = 1
        elif name == "transformers.trainer" and frame.f_code.co_name == "get_batch_samples":
            several = frame.f_locals.get("num_batches")
            return ahead + (several - 1 if isinstance(several, int) and several > 0 else 0)
        elif not name.startswith(("flopwatch.", "torch.")):
            break
    return ahead
