"""Short training script for the tutorials: an embedding that predicts a class."""

import time
from typing import Any

import torch

model = torch.nn.Sequential(torch.nn.Embedding(256, 64), torch.nn.Flatten(), torch.nn.Linear(64 * 16, 256))
optimizer = torch.optim.AdamW(model.parameters())
samples: Any = [{"input_ids": torch.full((16,), index % 256), "target": index % 256} for index in range(1024)]
for _ in range(4):
    for batch in torch.utils.data.DataLoader(samples, batch_size=8):
        loss = torch.nn.functional.cross_entropy(model(batch["input_ids"]), batch["target"])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
