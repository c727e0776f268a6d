"""Training script that gets a signal to end. It takes a folder, and one word for each local rank.

It does not import PyTorch, so that it starts at once. SIGTERM means that there is no time left. On SIGTERM, "finish"
saves and calls `finish("preempted")`, while "exit-0" and "exit-143" save and only exit. SIGUSR1 is an early warning. On
SIGUSR1, all three save after the current step and finish as preempted. "nothing" handles neither signal. The script
resumes from its last checkpoint, and trains until there is a file `stop`. LEAVE_AGAIN_AFTER is the delay in seconds
from the saved checkpoint to a second signal.
"""

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

from flopwatch.training import Run


def main() -> None:
    folder, word = Path(sys.argv[1]), sys.argv[2].split(",")[int(os.environ.get("LOCAL_RANK", 0))]
    # One run for each word, or the run that the scheduler names.
    run = Run(None if "SLURM_JOB_ID" in os.environ else word, flops_per_token=10, peak_flops=1e9, replica_ranks=1)
    saved, warned = folder / f"{run.name}-{run.rank}.checkpoint", False

    def save() -> None:
        with run.checkpoint():
            saved.write_text(str(run.position))

    def leave(number: int, frame: FrameType | None) -> None:
        save()
        if again := os.environ.pop("LEAVE_AGAIN_AFTER", ""):
            signal.signal(signal.SIGALRM, leave)
            signal.setitimer(signal.ITIMER_REAL, float(again))
        if word == "finish":
            run.finish("preempted")
        sys.exit(143 if word == "exit-143" else 0)

    def warn(number: int, frame: FrameType | None) -> None:
        nonlocal warned
        warned = True

    if word != "nothing":
        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGUSR1, warn)
    if saved.exists():
        run.restored(int(saved.read_text()))
    for number in run.batches(range(10_000)):
        time.sleep(0.01)
        run.step(tokens=4)
        if number == 10:
            (folder / f"{os.getpid()}.ready").touch()
        if warned or (folder / "stop").exists():
            break
    save()
    run.finish("preempted" if warned else "completed")


if __name__ == "__main__":
    main()
