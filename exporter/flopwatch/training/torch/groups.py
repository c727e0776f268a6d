"""Process groups of the collectives that this thread waits for on the host: their kind and their ranks.

`Work` and the tensors of functional collectives do not name their group. So the methods of ProcessGroup that start
operations, and two helpers of torch.distributed._functional_collectives, are replaced by functions that note it.
Sends and receives of a pipeline are a group of two neighbours, because a pipeline has no collectives. They are counted
by direction, because NCCL's sequence numbers do not distinguish directions.
https://docs.pytorch.org/docs/stable/distributed.html
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed

from flopwatch.catalogue.ranks import MESSAGES, kind_of, ranks_text
from flopwatch.training.recorder import Recorder
from flopwatch.training.totals import WHOLE_JOB, Group

OPERATIONS = (
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced", "all_gather_single"),
    *("all_gather_single_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base"),
    *("all_to_all_single", "barrier", "broadcast", "gather", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "_reduce_scatter_base", "scatter"),
    *("_end_coalescing", "recv_anysource"),
)
TO_ONE = ("send", "recv")
PIPELINE, UNKNOWN = "pp", "group"
_MAX_PENDING = 1024  # tensors whose collective was never waited for


def functional_collectives() -> Any:
    """Return the module of collectives that torch.compile traces. PyTorch may have been built without it."""
    from torch.distributed import _functional_collectives

    return _functional_collectives


class Groups:
    """Kinds and ranks of the process groups of one run, and the groups of operations that are not waited for yet."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._known: weakref.WeakKeyDictionary[Any, Group | None] = weakref.WeakKeyDictionary()
        self._pairs: weakref.WeakKeyDictionary[Any, dict[int, Group | None]] = weakref.WeakKeyDictionary()
        self._works: weakref.WeakKeyDictionary[Any, Group | None] = weakref.WeakKeyDictionary()
        self._tensors: dict[int, Group | None] = {}  # by address
        self._resolved: Group | None = None  # group of the last functional collective

    def replacements(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yield owner, name and substitute of each function that has to be replaced."""
        owner, functional = torch.distributed.ProcessGroup, functional_collectives()
        for name in OPERATIONS:
            if hasattr(owner, name):
                yield owner, name, self._then(getattr(owner, name), self._note)
        for name in TO_ONE:
            yield owner, name, self._then(getattr(owner, name), self._note_pair)
        for name in ("_resolve_group", "_resolve_group_name"):
            if hasattr(functional, name):
                yield functional, name, self._then(getattr(functional, name), self._resolve)
        yield functional, "_maybe_wrap_tensor", self._then(functional._maybe_wrap_tensor, self._keep)

    def counters(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yield likewise what counts sends and receives, on any device."""
        owner = torch.distributed.ProcessGroup
        for name in TO_ONE:
            yield owner, name, self._counting(getattr(owner, name), sends=name == "send")

    def of_work(self, work: object) -> Group | None:
        """Return the group of a Work, None if it is unknown."""
        return self._works.get(work)

    def of_tensor(self, tensor: torch.Tensor) -> Group | None:
        """Return the group of the functional collective that fills a tensor, None if it is unknown."""
        return self._tensors.pop(tensor.data_ptr(), None)

    def of_group(self, group: Any) -> Group | None:
        """Return kind and ranks of a process group, None if it has no text for its ranks."""
        if group not in self._known:
            ranks = torch.distributed.get_process_group_ranks(group)
            text = ranks_text(ranks)
            self._known[group] = None if text is None else (self._kind(group, len(ranks)), text)
        return self._known[group]

    def _kind(self, group: Any, size: int) -> str:
        recorder = self._recorder
        for kind, own in recorder.process_groups:
            if own is group:
                return kind
        if kind := kind_of(str(getattr(group, "group_desc", ""))):
            return kind
        if size == recorder.totals.world_size:
            return WHOLE_JOB
        if recorder.parallel is None or group.size() == 1:
            return UNKNOWN
        place = group.rank(), group.size()
        fitting = [kind for kind in ("tp", "cp", "ep", "pp", "dp") if getattr(recorder.parallel, kind) == place]
        return fitting[0] if len(fitting) == 1 else UNKNOWN

    def _of_pair(self, group: Any, tensors: object, peer: int, *_: Any, **__: Any) -> Group | None:
        whole = self.of_group(group)
        if whole is None or whole[0] not in (PIPELINE, WHOLE_JOB, UNKNOWN):
            return whole  # such as a ring of a context parallel group
        pairs = self._pairs.setdefault(group, {})
        if peer not in pairs:
            ranks = torch.distributed.get_process_group_ranks(group)
            text = ranks_text((ranks[group.rank()], ranks[peer]))
            pairs[peer] = None if text is None else (PIPELINE, text)
        return pairs[peer]

    def _counting(self, original: Callable[..., Any], *, sends: bool) -> Callable[..., Any]:
        def count(group: Any, tensors: object, peer: int, *_: Any, **__: Any) -> None:
            pair = self._of_pair(group, tensors, peer)
            if pair is not None and pair[0] == PIPELINE:
                self._recorder.messages[MESSAGES[(group.rank() < peer) == sends], pair[1]] += 1

        @functools.wraps(original)
        def counting(*args: Any, **kwargs: Any) -> Any:
            try:
                count(*args, **kwargs)
            except Exception as error:
                self._recorder.failed("watch", error)
            return original(*args, **kwargs)

        return counting

    def _then(self, original: Callable[..., Any], act: Callable[..., None]) -> Callable[..., Any]:
        """Return a function like `original` that calls `act` with its result and arguments, unless it is compiled."""
        recorder = self._recorder

        @functools.wraps(original)
        def calling(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not torch.compiler.is_compiling() and recorder.measuring:
                try:  # reporting() takes 1 us, which is too much for each collective
                    act(result, *args, **kwargs)
                except Exception as error:
                    recorder.failed("watch", error)
            return result

        return calling

    def _note(self, work: Any, group: Any, *_: object, **__: object) -> None:
        if work is not None:
            self._works[work] = self.of_group(group)

    def _note_pair(self, work: Any, *args: Any, **kwargs: Any) -> None:
        if work is not None:
            self._works[work] = self._of_pair(*args, **kwargs)

    def _resolve(self, found: Any, *_: object, **__: object) -> None:
        c10d: Any = torch.distributed.distributed_c10d
        self._resolved = self.of_group(c10d._resolve_process_group(found) if isinstance(found, str) else found)

    def _keep(self, _: object, tensor: Any) -> None:
        if len(self._tensors) >= _MAX_PENDING:
            self._tensors.clear()
        self._tensors[tensor.data_ptr()] = self._resolved
