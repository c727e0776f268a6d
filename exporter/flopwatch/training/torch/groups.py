"""Process groups of the collectives that this thread waits for on the host: their kind and their ranks.

`Work` and the tensors of functional collectives do not name their group. So the methods of ProcessGroup that start
operations, and two helpers of torch.distributed._functional_collectives, are replaced by functions that note it.
Sends and receives of a pipeline are a group of two neighbours, because a pipeline has no collectives.
https://docs.pytorch.org/docs/stable/distributed.html
"""

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed

from flopwatch.catalogue.ranks import ranks_text
from flopwatch.training.process.parallel import DIMENSIONS
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
# Words in the descriptions of Megatron's groups and of the dimensions of a mesh, and their kinds. Of several kinds, as
# in EXPERT_DATA_PARALLEL_GROUP or mesh_dp_shard_cp, the coarsest counts.
COARSEST_FIRST = ("dp", "pp", "cp", "tp", "ep")
WORDS = {"tensor": "tp", "context": "cp", "expert": "ep", "pipeline": "pp", "data": "dp"} | DIMENSIONS
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
                yield owner, name, self._noting(getattr(owner, name), self._of_collective)
        for name in TO_ONE:
            yield owner, name, self._noting(getattr(owner, name), self._of_pair)
        for name in ("_resolve_group", "_resolve_group_name"):
            if hasattr(functional, name):
                yield functional, name, self._resolving(getattr(functional, name))
        yield functional, "_maybe_wrap_tensor", self._wrapping(functional._maybe_wrap_tensor)

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
        described = {WORDS.get(word) for word in str(getattr(group, "group_desc", "")).lower().split("_")}
        if kind := next((kind for kind in COARSEST_FIRST if kind in described), ""):
            return kind
        if size == recorder.world_size:
            return WHOLE_JOB
        place = recorder.parallel
        of_size = (
            [] if place is None else [kind for kind in ("tp", "cp", "ep", "pp", "dp") if _fits(place, kind, group)]
        )
        return of_size[0] if len(of_size) == 1 else UNKNOWN

    def _of_collective(self, group: Any, *_: Any, **__: Any) -> Group | None:
        return self.of_group(group)

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

    def _noting(self, original: Callable[..., Any], group_of: Callable[..., Group | None]) -> Callable[..., Any]:
        recorder = self._recorder

        @functools.wraps(original)
        def noting(group: Any, *args: Any, **kwargs: Any) -> Any:
            work = original(group, *args, **kwargs)
            if recorder.measuring and work is not None:
                try:
                    self._works[work] = group_of(group, *args, **kwargs)
                except Exception as error:
                    recorder.failed("watch", error)
            return work

        return noting

    def _resolving(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder
        c10d: Any = torch.distributed.distributed_c10d
        by_name = c10d._resolve_process_group

        @functools.wraps(original)
        def resolving(*args: Any, **kwargs: Any) -> Any:
            found = original(*args, **kwargs)
            if not torch.compiler.is_compiling() and recorder.measuring:
                try:
                    self._resolved = self.of_group(by_name(found) if isinstance(found, str) else found)
                except Exception as error:
                    recorder.failed("watch", error)
            return found

        return resolving

    def _wrapping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        recorder = self._recorder

        @functools.wraps(original)
        def wrapping(tensor: Any) -> Any:
            if not torch.compiler.is_compiling() and recorder.measuring:
                try:
                    if len(self._tensors) >= _MAX_PENDING:
                        self._tensors.clear()
                    self._tensors[tensor.data_ptr()] = self._resolved
                except Exception as error:
                    recorder.failed("watch", error)
            return original(tensor)

        return wrapping


def _fits(place: Any, kind: str, group: Any) -> bool:
    """Return whether a rank's coordinate of this kind is its place in a process group of several ranks."""
    own: object = getattr(place, kind)
    return own == (group.rank(), group.size()) and group.size() > 1
