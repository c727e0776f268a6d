"""Lengths of the samples in a batch, from tensors on the CPU. Reading a device's memory would stop the host.

An attention mask of the tokens' shape excludes padding. Samples laid end to end, as by transformers'
DataCollatorWithFlattening, begin where their `position_ids` are 0.
https://huggingface.co/docs/transformers/main_classes/data_collator
"""

from collections.abc import Sequence
from typing import Any


def lengths(ids: Any, mask: Any = None, positions: Any = None) -> Sequence[int] | None:
    """Return the number of unpadded tokens of each sample in `ids`, [batch, length]. None if the mask is on a device.

    The mask must have the shape of `ids`, and is 0 at padding. Packed samples begin where `positions` is 0.
    """
    if mask is not None:
        if mask.device.type != "cpu":
            return None
        unpadded: list[int] = mask.ne(0).sum(-1).flatten().tolist()
        return unpadded
    tokens, columns = ids.numel(), ids.shape[-1]
    if positions is not None and positions.device.type == "cpu" and positions.shape == ids.shape:
        starts: list[int] = positions.flatten().eq(0).nonzero().flatten().tolist()
        if starts[:1] == [0]:
            return [end - start for start, end in zip(starts, [*starts[1:], tokens], strict=True)]
    return [columns] * (tokens // columns) if columns else []
