"""Ordinary training script that knows nothing of flopwatch: epochs, accumulation, evaluation, checkpoints.

Its argument is the way to end: "end", or after one epoch "exit", "raise" or "interrupt". PACE is the number of 4 ms
units that each batch takes.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any


class Samples:
    """Dataset of samples of 16 tokens that take 1 ms to read, here and in workers that import this script again."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        import torch

        time.sleep(0.001)
        return {"input_ids": torch.full((16,), index % 32)}


class Slow:
    """Object that takes 0.1 s to pickle."""

    def __reduce__(self) -> tuple[Any, ...]:
        time.sleep(0.1)
        return Slow, ()


def train() -> None:
    # Imported late, so that `flopwatch run` has to wait for it before it attaches.
    import torch
    from torch.utils.data import DataLoader

    model = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 32))
    optimizer = torch.optim.AdamW(model.parameters())
    samples: Any = Samples(96)
    held_out: Any = Samples(12)
    for epoch in range(2 if sys.argv[1:] == ["end"] else 1):
        workers: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "spawn"} if epoch else {}
        for number, batch in enumerate(DataLoader(samples, batch_size=4, **workers), 1):
            loss = torch.mean(model(batch["input_ids"]) ** 2)
            loss.backward()  # type: ignore[no-untyped-call]
            time.sleep(0.004 * int(os.environ.get("PACE", "1")))
            if number % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if number == 12:
                model.eval()
                with torch.no_grad():
                    for kept in DataLoader(held_out, batch_size=4):
                        model(kept["input_ids"])
                        time.sleep(0.02)
                model.train()
        torch.save({"model": model.state_dict(), "slow": Slow()}, Path(os.environ["CHECKPOINT"]))
    print(f"loss {loss.item():.6f}")


if __name__ == "__main__":
    train()
    if sys.argv[1:] == ["exit"]:
        sys.exit(3)
    if sys.argv[1:] == ["raise"]:
        raise ValueError("of the script's own")
    if sys.argv[1:] == ["interrupt"]:
        raise KeyboardInterrupt
