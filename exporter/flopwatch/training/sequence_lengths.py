"""How long the samples in a batch are, as far as the CPU knows: what is on a device would have to be waited for.

Padding is what an attention mask of the batch's own shape leaves out. Samples laid end to end, as transformers'
DataCollatorWithFlattening does, show where their `position_ids` begin at 0 again.
https://huggingface.co/docs/transformers/main_classes/data_collator
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def lengths(ids: Any, mask: Any = None, positions: Any = None) -> Sequence[int] | None:
    """Return the lengths of the samples in a tensor of tokens, padding left out; None if only a device knows.

    The mask has the tokens' shape; positions that have another are no positions of these tokens.
    """
    if mask is not None:
        if mask.device.type != "cpu":
            return None
        found: list[int] = mask.ne(0).sum(-1).flatten().tolist()
        return found
    tokens, columns = ids.numel(), ids.shape[-1]
    if positions is not None and positions.device.type == "cpu" and positions.shape == ids.shape:
        starts: list[int] = positions.flatten().eq(0).nonzero().flatten().tolist()
        if starts[:1] == [0]:
            return [end - start for start, end in zip(starts, [*starts[1:], tokens], strict=True)]
    return [columns] * (tokens // columns) if columns else []
