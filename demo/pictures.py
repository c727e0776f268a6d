"""Take the pictures of docs/: `python -m demo.pictures docs`.

The demo runs in a terminal until its message has arrived. Then a simulated cluster (demo/cluster.py) runs until its
alerts fire, Chromium opens two dashboards, and `flopwatch report` writes the report of the run that was restarted.
"""

from __future__ import annotations

import argparse
import fcntl
import io
import os
import pty
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Browser
from rich.console import Console
from rich.text import Text

from demo.cluster import ClusterDemo
from demo.screenshots import LINK, SHOWN_AFTER, address, browser, look, wait
from demo.servers import ServersError
from demo.stack import StackError

ROWS, COLUMNS = 34, 110  # of the terminal in which the demo runs
DEMO_SECONDS = 100
HOME, END = "\x1b[H", "\x1b[?1049l"  # begin a frame of the demo's screen, leave the screen
BOARD_WIDTH, PICTURE_WIDTH = 1600, 1000  # pixels of the page, and of its picture
BOARD_HEIGHTS = {"run": 1600, "stragglers": 1200}  # pixels from the top of the page
REPORT = {"width": 1100, "height": 1140}


def demo_frame(output: str) -> str:
    """Return the last frame of the demo's screen with the message. Raises StackError if no frame has it."""
    frames = [frame for frame in output.partition(END)[0].split(HOME) if "[FIRING]" in frame]
    if not frames:
        raise StackError(f"no message within {DEMO_SECONDS} s of the demo:\n{output[-2000:]}")
    return frames[-1].rstrip()


def run_demo(state: Path) -> str:
    """Run the demo with a simulated job in a terminal of its own, and return what it wrote."""
    control, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("4H", ROWS, COLUMNS, 0, 0))
    command = [sys.executable, "-m", "demo", "--train=simulated", f"--seconds={DEMO_SECONDS}", f"--state={state}"]
    written = bytearray()
    with subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env={**os.environ, "TERM": "xterm-256color"}
    ):
        os.close(terminal)
        try:
            while part := os.read(control, 65536):
                written += part
        except OSError:  # EIO: the demo has closed its end
            pass
        finally:
            os.close(control)
    return written.decode(errors="replace").replace("\r\n", "\n")


def take_demo(opened: Browser, frame: str, path: Path) -> None:
    """Save a picture of one frame of a terminal."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO())
    text = Text.from_ansi(frame)
    text.rstrip()  # the empty lines of the screen
    console.print(text, end="")
    style = "body {background: #fff} pre {display: inline-block; padding: 8px; font: 14px/17px monospace}"
    page = opened.new_page()
    page.set_content(
        f"<style>{style}</style>" + console.export_html(inline_styles=True, code_format="<pre>{code}</pre>")
    )
    page.locator("pre").screenshot(path=path)
    page.close()


def take_board(opened: Browser, running: ClusterDemo, board: str, path: Path) -> None:
    """Save a picture of the top of a dashboard. Raises StackError if the page has a problem."""
    page = opened.new_page(
        viewport={"width": BOARD_WIDTH, "height": 1000}, device_scale_factor=PICTURE_WIDTH / BOARD_WIDTH
    )
    report = look(page, board, address(running.boards, board, running.began, "light"))
    if report.problems:
        raise StackError("\n".join(report.problems))
    page.screenshot(path=path, clip={"x": 0, "y": 0, "width": BOARD_WIDTH, "height": BOARD_HEIGHTS[board]})
    page.close()


def take_report(opened: Browser, running: ClusterDemo, folder: Path, path: Path) -> None:
    """Save a picture of the top of the report of the run that was restarted."""
    written = folder / "report.html"
    command = [sys.executable, "-m", "flopwatch", "report", LINK["run"], f"--prometheus={running.prometheus.url}"]
    subprocess.run([*command, "--price=2.50", f"--out={written}"], check=True)
    page = opened.new_page(viewport={"width": REPORT["width"], "height": REPORT["height"]})
    page.goto(f"file://{quote(str(written))}")
    page.screenshot(path=path)
    page.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the pictures and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m demo.pictures", description=__doc__)
    parser.add_argument("folder", type=Path)
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="flopwatch-pictures-") as name, browser() as opened:
            state = Path(name)
            take_demo(opened, demo_frame(run_demo(state / "demo")), given.folder / "demo.png")
            (state / "cluster").mkdir()
            with ClusterDemo(state / "cluster") as running:
                wait(running, SHOWN_AFTER)
                for board in BOARD_HEIGHTS:
                    take_board(opened, running, board, given.folder / f"{board}.png")
                take_report(opened, running, state, given.folder / "report.png")
    except (ServersError, StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"pictures in {given.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
