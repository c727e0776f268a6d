"""Section `identity`: losses of a training with the hook and without it, which must be equal to the bit."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch

from bench.card.jobs import Model, device_of, polled, pushing
from bench.card.report import Report, shortened

STEPS = 200
KINDS = ("eager", "checkpointing", "accumulation", "amp", "compile")
COMPILED = {"compile": "default", "reduce_overhead": "reduce-overhead"}  # modes of torch.compile
ACCUMULATED = 3
LENGTH, BATCH = 32, 4

Losses = list[float]


def section(device: str, seconds: float, report: Report, steps: int = STEPS, kinds: tuple[str, ...] = KINDS) -> None:
    """Train each kind of loop twice without the hook and once with it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS deterministic
    on = device_of(device)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for kind in kinds:
        try:
            plain = [losses(kind, on, steps, hooked=False) for _ in range(2)]
        except Exception as error:
            report.info(kind, f"does not train without the hook either: {str(error).partition(chr(10))[0]}")
            continue
        compare(kind, plain[0], plain[1], losses(kind, on, steps, hooked=True), report)


def compare(kind: str, plain: Losses, again: Losses, hooked: Losses, report: Report) -> None:
    """Report whether the losses with the hook are those without it. Where two plain trainings differ, this is INFO."""
    differ = [step for step, (one, other) in enumerate(zip(plain, hooked, strict=True)) if one != other]
    if plain != again:
        report.info(kind, f"two trainings without the hook differ; with it, {len(differ)} steps do")
        return
    measured = f"steps {shortened(differ, 3)} differ" if differ else f"{len(plain)} steps, last loss {plain[-1]!r}"
    report.check(kind, not differ, measured, "equal losses with and without the hook")


def losses(kind: str, device: torch.device, steps: int, hooked: bool) -> Losses:
    """Return the loss of each step of one kind of loop."""
    torch.manual_seed(0)
    model = Model().to(device)
    model.checkpointing = kind == "checkpointing"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    forward: Callable[[torch.Tensor], Any] = torch.compile(model, mode=COMPILED[kind]) if kind in COMPILED else model
    draw = torch.Generator().manual_seed(1)
    run = pushing(model=forward) if hooked else None
    found: list[torch.Tensor] = []
    with polled(run) if run is not None else contextlib.nullcontext():
        for _ in range(steps):
            for _ in range(ACCUMULATED if kind == "accumulation" else 1):
                tokens = torch.randint(256, (BATCH, LENGTH), generator=draw).to(device)
                with torch.autocast(device.type, torch.bfloat16, enabled=kind == "amp"):
                    loss = forward(tokens)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach().clone())  # a CUDA graph writes the next loss to the same place
            if run is not None:
                run.step(tokens=BATCH * LENGTH)
        answer = [float(loss.item()) for loss in found]
    if run is not None:
        run.finish()
    return answer
