"""`python -m demo`: run the whole chain on this machine, from a training job to a Slack message."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

from rich.console import Console
from rich.live import Live

from alerts import recording
from demo import summary
from demo.boards import WITHOUT
from demo.servers import ROOT, ServersError, find
from demo.stack import DemoStack, StackError, fetch
from simulator.progress import progress

SLOW_RANK, SLOW_BY = 2, 0.3
HEALTHY_SECONDS = 35.0  # before the fault
HEAL_SECONDS = 60.0  # after the Slack message
FIRST_STEP_SECONDS = 180.0
# More steps than a demo lasts. The step floor makes each rank sleep half of a step, so that two cores suffice for four.
TRAINER = {"torch": ("--steps", "1000000", "--step-floor", "0.15"), "simulated": ()}
LINE_SECONDS = 10.0  # between two lines of output without a terminal


class Story:
    """Script of the demo: a healthy run, a slow rank, the Slack message that names it, and recovery."""

    def __init__(self, stack: DemoStack, healthy: float) -> None:
        self.stack, self.healthy = stack, healthy
        self.lines: list[str] = []
        if not stack.servers.alertmanager:
            self.lines.append("0:00  Alertmanager cannot run here, so there will be no Slack message.")
        self.slowed: float | None = None
        self.notified: float | None = None
        self.healed = False

    def begin(self) -> None:
        """Replace the lines on the screen by one that reports the first step."""
        self.lines = [
            f"0:00  The first step is made. Rank {SLOW_RANK} will be slowed at {summary.clock(self.healthy)}."
        ]

    def advance(self, elapsed: float) -> None:
        """Carry out and show the next event of the script if it is due `elapsed` seconds after the start."""
        if self.slowed is None and elapsed >= self.healthy:
            self.stack.control(slow={str(SLOW_RANK): SLOW_BY})
            self.slowed = elapsed
            self._show(
                elapsed, f"Rank {SLOW_RANK} is now slowed by {100 * SLOW_BY:.0f} %. flopwatch does not know about it."
            )
        elif self.slowed is not None and self.notified is None and self.stack.receiver.of("slack"):
            self.notified = elapsed
            self._show(elapsed, f"The Slack message has arrived, {elapsed - self.slowed:.0f} s after the fault.")
        elif self.notified is not None and not self.healed and elapsed >= self.notified + HEAL_SECONDS:
            self.stack.control()
            self.healed = True
            python, node = (os.path.relpath(path) for path in (sys.executable, self.stack.node.root))
            self._show(
                elapsed,
                f"Rank {SLOW_RANK} is at full speed again. Now break something else, for example:\n"
                f"      {python} -m simulator.host {node} xid --gpu 3 --code 79",
            )

    def message(self) -> str | None:
        """Return title and text of the newest Slack message, None without a message."""
        messages = self.stack.receiver.of("slack")
        if not messages:
            return None
        attachment = messages[-1].payload["attachments"][0]
        return f"{attachment['title']}\n{attachment['text']}".rstrip()

    def _show(self, elapsed: float, text: str) -> None:
        self.lines.append(f"{summary.clock(elapsed)}  {text}")


class Signals:
    """Handler of SIGINT, SIGTERM and SIGHUP. The first signal interrupts the demo, the next one kills its processes."""

    def __init__(self, stack: DemoStack) -> None:
        self.stack, self.stopping, self.killed = stack, False, False
        self._handle(self._on_signal)

    def ignore(self) -> None:
        """Ignore all further signals, because a signal during the exit of Python would change the exit status."""
        self._handle(signal.SIG_IGN)

    def _handle(self, handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self.stopping:
            self.killed = True
            self.stack.kill()
        else:
            self.stopping = True
            raise KeyboardInterrupt


def watch(stack: DemoStack, story: Story, console: Console, urls: list[tuple[str, str]], seconds: float | None) -> None:
    """Show the run as a screen on a terminal, else as lines of text, for `seconds` or, with None, without end."""
    job = "a real PyTorch job on this CPU" if stack.train == "torch" else "a simulated job"
    shown, due = 0, 0.0
    began = time.monotonic()
    with Live(console=console, screen=True, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while (left := began + (seconds or float("inf")) - time.monotonic()) > 0:
            elapsed = time.monotonic() - began
            stack.check()
            story.advance(elapsed)
            now = summary.read(stack.prometheus, stack.run)
            if live is not None:
                title = f"flopwatch demo · {job}, {stack.ranks} ranks · {summary.clock(elapsed)}"
                live.update(summary.screen(now, title, urls, story.lines, story.message()), refresh=True)
            else:
                lines, shown = story.lines[shown:], len(story.lines)
                if elapsed >= due:
                    lines, due = [*lines, summary.line(now, elapsed)], elapsed + LINE_SECONDS
                for line in lines:
                    print(line, flush=True)
            time.sleep(min(1.0, left))


def wait_for_first_step(stack: DemoStack) -> None:
    """Wait until Prometheus has a training step. Raises StackError after FIRST_STEP_SECONDS."""
    began = time.monotonic()
    while not summary.read(stack.prometheus, stack.run).steps:
        stack.check()
        if time.monotonic() > began + FIRST_STEP_SECONDS:
            raise stack.children["training"].failure(f"made no step in {FIRST_STEP_SECONDS:.0f} s")
        time.sleep(0.25)


def links(stack: DemoStack) -> list[tuple[str, str]]:
    """Return name and URL of each page of the running demo."""
    try:
        fetch(f"{stack.prometheus.url}/graph")
        graph = "graph"
    except OSError:
        graph = "classic/graph"  # Debian's Prometheus 2
    pages = [] if stack.show is None else [(stack.show.name, stack.show.link)]
    pages += [
        ("MFU graph", f"{stack.prometheus.url}/{graph}?g0.expr={recording.RUN_MFU}&g0.tab=0"),
        ("Exporter", f"http://{stack.exporter_address}/metrics"),
    ]
    if stack.servers.alertmanager:
        pages.append(("Alertmanager", f"http://{stack.alertmanager_address}"))
    return pages


@contextmanager
def emptied(state: Path) -> Iterator[None]:
    """Empty the state folder and lock it until the block ends.

    Raises StackError if another demo uses the folder, or if it has files that are not from a demo.
    """
    try:
        state.mkdir(parents=True, exist_ok=True)
        foreign = any(state.iterdir()) and not (state / "lock").exists()
    except OSError as error:
        raise StackError(f"--state {state}: {error.strerror}") from None
    if foreign:
        raise StackError(
            f"--state {state}: the folder is not empty and not from a demo. A demo empties its folder: "
            "choose an empty or a new one"
        )
    with (state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackError(
                f"another demo runs in {state}; stop it, or choose another folder with --state DIR"
            ) from None
        for old in state.iterdir():
            if old.is_dir():
                shutil.rmtree(old)
            elif old.name != "lock":
                old.unlink()
        yield


def run(stack: DemoStack, console: Console, seconds: float | None) -> None:
    """Start the stack, show the run for `seconds`, stop the stack, and print the last summary."""
    signals = Signals(stack)
    story = Story(stack, HEALTHY_SECONDS if seconds is None else min(HEALTHY_SECONDS, 0.4 * seconds))
    print("Starting Prometheus, Alertmanager, the exporter of a simulated 8 x H100 node, the training job", flush=True)
    with stack:
        urls = links(stack)
        if stack.show is None:
            print(f"  {WITHOUT}")
        for name, url in urls:
            print(f"  {name:12}  {url}")
        print("Waiting for the first training step", flush=True)
        with suppress(KeyboardInterrupt):
            with progress("The job starts", colour=not console.no_color):
                wait_for_first_step(stack)
            story.begin()
            watch(stack, story, console, urls, seconds)
        signals.stopping = True
        try:
            last = summary.read(stack.prometheus, stack.run)
        except StackError:
            if not signals.killed:
                raise
            last = None
        print("Stopping", flush=True)
    signals.ignore()
    if not story.lines:
        print("Stopped before the first training step.")
        return
    if console.is_terminal:
        print("\n".join(story.lines))
    if last is None:
        print("A second interrupt killed Prometheus before the last summary was read.")
    else:
        console.print(summary.table(last, plain=not console.is_terminal))
    if (message := story.message()) is not None:
        print(f"The last Slack message:\n{message}")


def _seconds(text: str) -> float:
    seconds = float(text)
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return seconds


def main() -> int:
    """Read the flags, run the demo, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--train", choices=("torch", "simulated"), default="torch", help="training job (default torch)")
    parser.add_argument("--seconds", type=_seconds, help="end this long after the first training step")
    parser.add_argument(
        "--state",
        type=Path,
        default=ROOT / "demo-state",
        metavar="DIR",
        help="folder for logs and data, emptied first (default demo-state)",
    )
    parser.add_argument("--no-color", action="store_true", help="no colours, as with NO_COLOR in the environment")
    options = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110, no_color=options.no_color or None)
    try:
        with emptied(options.state.absolute()):
            with progress("Prometheus and Alertmanager", colour=not console.no_color):
                servers = find(log=lambda text: print(text, flush=True))
            if servers.why:
                print(f"Running without Alertmanager: {servers.why}")
            stack = DemoStack(
                options.state, train=options.train, trainer=TRAINER[options.train], servers=servers, shows=True
            )
            run(stack, console, options.seconds)
    except (ServersError, StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
