"""Text of the ranks of a process group in a label: `0-3`, `1-29:4` with a step, `0,5`, or several of these.

Groups of a device mesh are regular, so the text is short for any number of ranks.
"""

import re
from collections.abc import Iterable
from functools import lru_cache

MAX_LENGTH = 128
# Kinds of two neighbours of a pipeline: messages to the lower and to the higher rank. Both count each message.
MESSAGES = ("pp_backward", "pp_forward")
# Words in names of groups, such as dimensions of a mesh, and their kinds. Of several kinds the coarsest counts.
_COARSEST_FIRST = ("dp", "pp", "cp", "tp", "ep")
_WORDS = dict.fromkeys(("data", "dp", "ddp", "fsdp", "replicate", "shard", "batch"), "dp")
_WORDS |= {"pipeline": "pp", "pp": "pp", "context": "cp", "cp": "cp", "sp": "cp"}
_WORDS |= {"tensor": "tp", "tp": "tp", "expert": "ep", "ep": "ep"}
_PART = re.compile(r"(\d{1,7})(?:-(\d{1,7})(?::(\d{1,7}))?)?")


def ranks_text(ranks: Iterable[int]) -> str | None:
    """Return the text of some ranks, None if it would be longer than MAX_LENGTH."""
    ordered = sorted(set(ranks))
    parts, at = [], 0
    while at < len(ordered):
        end, step = at, ordered[at + 1] - ordered[at] if at + 1 < len(ordered) else 0
        while end + 1 < len(ordered) and ordered[end + 1] - ordered[end] == step:
            end += 1
        if end - at < 2:
            parts.append(str(ordered[at]))
            at += 1
        else:
            parts.append(f"{ordered[at]}-{ordered[end]}" + (f":{step}" if step > 1 else ""))
            at = end + 1
    text = ",".join(parts)
    return text if len(text) <= MAX_LENGTH else None


def kind_of(name: str) -> str:
    """Return the kind of a group by its name, such as EXPERT_DATA_PARALLEL_GROUP or mesh_dp_shard, empty if unknown."""
    kinds = {_WORDS.get(word) for word in re.split(r"[^a-z]+", name.lower())}
    return next((kind for kind in _COARSEST_FIRST if kind in kinds), "")


def all_ranks_text(count: int) -> str:
    """Return the text of the ranks 0 to count - 1, as ranks_text does."""
    return f"0-{count - 1}" if count > 2 else ",".join(map(str, range(count)))


def ranks_of(text: str) -> tuple[int, ...]:
    """Return the ranks in a text, sorted. Raises ValueError if it is malformed."""
    ranges = _ranges(text)
    return tuple(ranges[0]) if len(ranges) == 1 else tuple(sorted(set().union(*ranges)))


def count_of(text: str) -> int:
    """Return how many ranks a text has, without listing them. Raises ValueError if it is malformed."""
    return sum(map(len, _ranges(text)))


@lru_cache(maxsize=1 << 12)
def _ranges(text: str) -> list[range]:
    ranges = []
    for part in text.split(","):
        if part.isdecimal() and len(part) < 8:
            ranges.append(range(int(part), int(part) + 1))
            continue
        found = _PART.fullmatch(part)
        if found is None:
            raise ValueError(f"{part[:40]!r} is not a rank, nor a range such as 0-3 or 1-29:4")
        first, last, step = int(found[1]), int(found[2] or found[1]), int(found[3] or 1)
        if step == 0 or last < first:
            raise ValueError(f"{part!r} is not a range of ranks")
        ranges.append(range(first, last + 1, step))
    return ranges
