"""Train a small byte-level language model on CPU, under torchrun, with the training hook in it.

    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 4 --max-restarts 3 examples/train_lm.py --out /tmp/lm

The text is the source of the interpreter's own standard library, so nothing is downloaded. Lines for flopwatch are
marked `# flopwatch`. The rest is an ordinary DistributedDataParallel loop with checkpoints and resume, and with
disturbances for tests and demos: a slow rank, a rank that dies, and an independent log of events.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread a rank: read when torch is imported

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from flopwatch.flops import Transformer  # flopwatch
from flopwatch.training import Run  # flopwatch

LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY, BATCH = 2, 128, 4, 128, 256, 8
TOKENS_PER_RANK = BATCH * CONTEXT
STEPS_BETWEEN_STOP_CHECKS = 10

FLOPS_PER_TOKEN = Transformer(
    layers=LAYERS,
    width=WIDTH,
    heads=HEADS,
    mlp_width=4 * WIDTH,  # flopwatch
    vocabulary=VOCABULARY,
).flops_per_token(CONTEXT)


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and MLP to `x`, of shape batch x length x WIDTH."""
        batch, length, _ = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(seen.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    """A decoder-only transformer over bytes that returns the loss of predicting each next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy in nats. Inputs and targets are bytes of shape batch x length."""
        x = self.token(inputs) + self.position(torch.arange(inputs.shape[1]))
        logits = self.head(self.norm(self.blocks(x)))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def store(rank: int, attempt: int) -> Store:
    """Return the store through which ranks find each other: torchrun's, or a local one for a single process.

    torchrun keeps its store over restarts, with the addresses of dead ranks. A new rank could read those addresses and
    fail (https://github.com/pytorch/pytorch/issues/135712), so each attempt has its own keys.
    """
    if "MASTER_ADDR" not in os.environ:
        return HashStore()
    served = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    shared = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=rank == 0 and not served)
    return PrefixStore(f"attempt {attempt}", shared)


def standard_library() -> Tensor:
    """Return the source text of the interpreter's standard library, about 12 MB, as bytes."""
    root = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(set(subfolders) - {"test", "tests", "idlelib", "site-packages", "dist-packages"})
        for name in sorted(name for name in names if name.endswith(".py")):
            text += Path(folder, name).read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8)


def batches(text: Tensor, steps: range, rank: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each step's inputs and targets. They depend on step and rank alone, so a resumed run continues exactly."""
    for step in steps:
        generator = torch.Generator().manual_seed(step << 16 | rank)
        starts = torch.randint(len(text) - CONTEXT, (BATCH, 1), generator=generator)
        tokens = text[starts + torch.arange(CONTEXT + 1)].long()
        yield tokens[:, :-1], tokens[:, 1:]


def measured_peak(local_ranks: int) -> float:
    """Return the FLOP/s available to one rank: the best matmul of one thread, times the cores per rank (at most 1).

    Only rank 0 measures while the others wait, so that its thread has a core to itself. With 4 ranks on 2 cores, each
    rank has half a core. Without that factor, the ranks' peaks would add up to twice that of the machine.
    """
    rate = torch.zeros(1, dtype=torch.float64)
    dist.barrier()
    if dist.get_rank() == 0:
        size = 512
        left, right = torch.rand(size, size), torch.rand(size, size)
        durations = []
        for _ in range(100):
            begin = time.perf_counter()
            torch.mm(left, right)
            durations.append(time.perf_counter() - begin)
        rate[0] = 2 * size**3 / min(durations)
    dist.broadcast(rate, 0)
    return rate.item() * min(1.0, len(os.sched_getaffinity(0)) / local_ranks)


def agreed(decision: str | None) -> str | None:
    """Return rank 0's decision on every rank, so that no rank enters a collective alone."""
    decisions = [decision]
    dist.broadcast_object_list(decisions, 0)
    return decisions[0]


class Checkpoint:
    """Last state of model and optimizer, in one file that is replaced atomically."""

    def __init__(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.path, self.model, self.optimizer = path, model, optimizer

    def save(self, step: int) -> None:
        """Write the state after `step`. Returns once the file is durable."""
        draft = self.path.with_suffix(".part")
        with draft.open("wb") as file:
            torch.save({"step": step, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
            os.fsync(file.fileno())
        draft.replace(self.path)

    def load(self) -> int:
        """Restore the state and return its step."""
        state = torch.load(self.path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        return int(state["step"])


class Log:
    """Log of events as JSON lines, written by rank 0 only and independent of flopwatch."""

    def __init__(self, path: Path | None, attempt: int) -> None:
        self.file = None if path is None else path.open("a", buffering=1)
        self.attempt = attempt

    def write(self, event: str, **fields: Any) -> None:
        """Append one line. It has reached the kernel at return, so killing the process cannot lose it."""
        if self.file is not None:
            self.file.write(json.dumps({"event": event, "time": time.time(), "attempt": self.attempt, **fields}) + "\n")


class Faults:
    """Disturbances set by flags, or at run time by the control file. Keys of the file replace those of the flags.

    Example: {"slow": {"2": 0.3}, "die": {"1": 500}, "stop": true}. Rank 2 computes 30 % longer, rank 1 is killed in
    step 500 of a first attempt, and the run stops.
    """

    def __init__(self, flags: argparse.Namespace, rank: int) -> None:
        self.control: Path | None = flags.control
        self.rank, self.seen = str(rank), (0, 0)
        self.flags: dict[str, Any] = {
            "slow": {str(flags.slow_rank): flags.slow_by},
            "die": {} if flags.die_at_step is None else {str(flags.die_rank): flags.die_at_step},
            "stop": False,
        }
        self.wanted = self.flags

    def read(self) -> None:
        """Read the control file if it has changed. A half-written file is read at the next step."""
        if self.control is None:
            return
        try:
            status = self.control.stat()
            if (stamp := (status.st_mtime_ns, status.st_size)) != self.seen:
                self.wanted = {**self.flags, **json.loads(self.control.read_text())}
                self.seen = stamp
        except (FileNotFoundError, json.JSONDecodeError):
            pass

    @property
    def slow(self) -> float:
        """Return the delay of this rank, as a share of its own compute time."""
        return float(self.wanted["slow"].get(self.rank, 0.0))

    def dies_in(self, step: int, first_step: int) -> bool:
        """Return whether this rank must die in `step`. `first_step` is the first step of its process."""
        at = self.wanted["die"].get(self.rank)
        return at is not None and first_step <= at <= step


def process_started() -> float:
    """Return when this process started, as Unix time (proc_pid_stat(5), field 22)."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Train a small language model on CPU, watched by flopwatch.")
    parser.add_argument("--steps", type=int, default=300, help="steps of the whole run")
    parser.add_argument("--seconds", type=float, help="stop this long after the first step of this attempt")
    parser.add_argument("--checkpoint-every", type=int, default=50, metavar="STEPS")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(tempfile.gettempdir(), "flopwatch-train-lm"),
        metavar="DIR",
        help="checkpoint and pids; an existing checkpoint is resumed",
    )
    parser.add_argument("--log-file", type=Path, metavar="FILE", help="append JSON lines of what happened")
    parser.add_argument(
        "--gpu-uuids",
        type=lambda text: text.split(","),
        metavar="UUID,...",
        help="declare one GPU for each local rank (else FLOPWATCH_GPU_UUID)",
    )
    parser.add_argument("--slow-rank", type=int)
    parser.add_argument("--slow-by", type=float, default=0.3, help="share of its own compute time")
    parser.add_argument("--die-rank", type=int, default=0)
    parser.add_argument("--die-at-step", type=int, help="the rank kills itself in this step, on the first attempt only")
    parser.add_argument("--control", type=Path, metavar="FILE", help="JSON that switches faults while it runs")
    parser.add_argument("--step-floor", type=float, default=0.0, metavar="SECONDS", help="least compute time of a step")
    return parser.parse_args()


def main() -> None:
    """Train the model, from the last checkpoint if there is one."""
    args = arguments()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank, local_world = int(os.environ.get("LOCAL_RANK", 0)), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    (args.out / "pids").mkdir(parents=True, exist_ok=True)
    (args.out / "pids" / str(rank)).write_text(str(os.getpid()))

    if world == local_world:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: no other interface is needed
    dist.init_process_group("gloo", store=store(rank, attempt), rank=rank, world_size=world)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = standard_library()
    model = DistributedDataParallel(LanguageModel())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    checkpoint = Checkpoint(args.out / "checkpoint.pt", model.module, optimizer)
    faults = Faults(args, rank)
    log = Log(args.log_file if rank == 0 else None, attempt)

    # What a rank computes ends with its last gradient; the rest of backward() is waiting for the other ranks.
    last_gradient = 0.0

    def note_gradient(_: Tensor) -> None:
        nonlocal last_gradient
        last_gradient = time.perf_counter()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(note_gradient)  # type: ignore[no-untyped-call]

    peak = measured_peak(local_world)
    name = os.environ.get("FLOPWATCH_RUN", "train-lm")
    run = Run(
        name,
        model=model,
        flops_per_token=FLOPS_PER_TOKEN,
        dtype="fp32",  # flopwatch
        peak_flops=peak,
        peak_source="measured",
        gpu_uuid=args.gpu_uuids[local_rank] if args.gpu_uuids else None,
    )
    log.write(
        "start",
        run=name,
        pid=os.getpid(),
        process_started=process_started(),
        world_size=world,
        tokens_per_step=world * TOKENS_PER_RANK,
        flops_per_token=FLOPS_PER_TOKEN,
        peak_flops_per_second=peak,
    )

    step = committed = 0
    if checkpoint.path.exists():
        with run.activity("checkpoint_restore"):  # flopwatch
            step = committed = checkpoint.load()
        run.restored(step=step, tokens=step * TOKENS_PER_RANK)  # flopwatch
        log.write("restored", step=step)
    first_step = step + 1

    def save() -> None:
        nonlocal committed
        log.write("checkpoint_begin", step=step)
        with run.checkpoint():  # flopwatch
            if rank == 0:
                checkpoint.save(step)
            dist.barrier()
        log.write("checkpoint_end", step=step)
        committed = step

    began = step_start = time.time()
    compute, status = 0.0, "completed"
    for inputs, targets in run.batches(batches(text, range(first_step, args.steps + 1), rank)):  # flopwatch
        faults.read()
        forward_begin = time.perf_counter()
        loss = model(inputs, targets)
        forward = time.perf_counter() - forward_begin
        if attempt == 0 and faults.dies_in(step + 1, first_step):
            os.kill(os.getpid(), signal.SIGKILL)
        # Here and not after backward(), so that the other ranks wait for this one in the gradients' all-reduce.
        time.sleep(max(args.step_floor - compute, 0.0) + faults.slow * max(args.step_floor, compute))
        backward_begin = time.perf_counter()
        loss.backward()
        compute = forward + last_gradient - backward_begin
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        run.step(tokens=TOKENS_PER_RANK, loss=loss.item())  # flopwatch
        step_end = time.time()
        log.write("step", step=step, start=step_start, end=step_end, tokens=world * TOKENS_PER_RANK, loss=loss.item())
        step_start = step_end
        if rank == 0 and step % 50 == 0:
            seconds = (step_end - began) / (step - first_step + 1)
            print(f"step {step}  loss {loss.item():.3f}  {seconds:.3f} s a step", flush=True)
        if step % args.checkpoint_every == 0:
            save()
            step_start = time.time()
        if step % STEPS_BETWEEN_STOP_CHECKS == 0:
            late = args.seconds is not None and time.time() - began >= args.seconds
            if (verdict := agreed("stopped" if faults.wanted["stop"] else "completed" if late else None)) is not None:
                status = verdict
                break
    if committed < step:
        save()
    log.write("finish", step=step, status=status)
    run.finish(status)  # flopwatch
    dist.barrier()  # without this and the next line a rank that exits first now and then aborts the others
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
