"""Ordinary training script: FSDP2 under gloo, distributed checkpoints, resumed by however many ranks there are.

It takes the folder of the checkpoints and the step at which training ends, and knows nothing of flopwatch.
"""

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    folder, until = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    if folder.exists():
        weights, states = get_state_dict(model, optimizer)
        progress = torch.zeros(1)
        load({"model": weights, "optimizer": states, "progress": progress}, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
        step = int(progress)
    loader = DataLoader(TensorDataset(torch.randn(4 * until, 8)), batch_size=4)
    for (batch,) in loader:
        torch.mean(model(batch) ** 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step == until:
            break
    weights, states = get_state_dict(model, optimizer)
    saved: Any = async_save(
        {"model": weights, "optimizer": states, "progress": torch.tensor([float(step)])}, checkpoint_id=folder
    )
    getattr(saved, "upload_completion", saved).result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
