"""Look at every dashboard in a real browser: `python -m demo.screenshots FOLDER`.

A simulated cluster (demo/cluster.py) is left alone until its troubles show; then Chromium opens every board in the
viewer, at two widths, light and dark. Ends with status 1 and says why if a page complains, a panel fails, or a panel is
empty that does not say why it may be.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlencode

from playwright.sync_api import Browser, ConsoleMessage, Error, Page, Request, Response, sync_playwright

from dashboards.__main__ import BOARDS
from demo.cluster import BAD_LINK, STRAGGLER, Running
from demo.servers import ServersError
from demo.stack import StackError
from simulator.topology import Topology

SEEN_AFTER = 270.0  # seconds: by then the alerts fire
PATIENCE = 60.0  # seconds until all panels of a page are drawn
WIDTHS = {"wide": 1600, "narrow": 720}
THEMES = ("dark", "light")
# What each board is opened on, where the first choice is not the most interesting one.
LATE, LINK = {"run": "llama-70b"}, {"run": "video-13b"}
CHOSEN = {
    "run": LATE,
    "stragglers": LATE,
    "goodput": LINK,
    "fabric": {"host": Topology.host(BAD_LINK[0])},
    "node": {"host": Topology.host(STRAGGLER[0])},
    "gpu": {"host": Topology.host(STRAGGLER[0]), "uuid": Topology.gpu(*STRAGGLER)},
    "rack": {"rack": Topology(64).rack(STRAGGLER[0])},
}
DRAWN = """() => {
  const panels = [...document.querySelectorAll('[data-panel]')];
  return panels.length > 0 && panels.every((one) => !['loading', 'unseen'].includes(one.dataset.state));
}"""
PANELS = """() => [...document.querySelectorAll('[data-panel]')].map((one) => (
  {title: one.dataset.panel, type: one.dataset.type, state: one.dataset.state, nothing: one.dataset.nothing ?? '',
   text: one.innerText.slice(0, 300)}))"""


@dataclass
class Looked:
    """What a browser saw of one page: its complaints, and its panels with their state."""

    board: str
    complaints: list[str] = field(default_factory=list)
    panels: list[dict[str, str]] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Return what is wrong, in words."""
        found = [f"{self.board}: {complaint}" for complaint in self.complaints]
        for panel in self.panels:
            if panel["state"] in ("error", "loading", "unseen"):
                found.append(f"{self.board}, {panel['title']}: {panel['state']}: {panel['text']}")
            elif panel["state"] == "empty" and not panel["nothing"]:
                found.append(f"{self.board}, {panel['title']}: empty, and does not say why it may be")
        return found if self.panels else [*found, f"{self.board}: no panel"]


def chromium() -> str:
    """Return the browser of this machine. Raises StackError."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    raise StackError("no browser here: install Chromium (Debian: apt-get install chromium)")


@contextmanager
def browser() -> Iterator[Browser]:
    """Run a browser that talks to nobody by itself."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=chromium(),
            args=[
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ],
        )
        try:
            yield started
        finally:
            started.close()


def look(page: Page, board: str, url: str) -> Looked:
    """Open a page and return what came of it, once everything is drawn."""
    looked = Looked(board)

    def said(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            looked.complaints.append(f"console {message.type}: {message.text}")

    def failed(request: Request) -> None:
        # A page that asks anew lets go of what it asked before.
        if request.failure != "net::ERR_ABORTED":
            looked.complaints.append(f"{request.url}: {request.failure}")

    def answered(response: Response) -> None:
        if response.status >= 400:
            looked.complaints.append(f"{response.url}: {response.status}")

    def raised(error: Error) -> None:
        looked.complaints.append(f"uncaught: {error}")

    page.on("console", said)
    page.on("pageerror", raised)
    page.on("requestfailed", failed)
    page.on("response", answered)
    page.goto(url)
    try:
        page.wait_for_selector("[data-panel]", state="attached", timeout=PATIENCE * 1000)
        # As high as the page, because a panel out of sight waits.
        width, height = page.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_function(DRAWN, timeout=PATIENCE * 1000)
    except Error as error:
        looked.complaints.append(f"not drawn after {PATIENCE:.0f} s: {error}")
    page.wait_for_timeout(800)  # what is measured is laid out once more
    looked.panels = page.evaluate(PANELS)
    return looked


def address(boards: str, board: str, began: float, theme: str) -> str:
    """Return where a board is, on what is worth seeing of it."""
    times = {"from": f"{began * 1000:.0f}", "to": f"{time.time() * 1000:.0f}"}
    variables = {f"var-{name}": value for name, value in CHOSEN.get(board, {}).items()}
    return f"{boards}/d/{BOARDS[board]['uid']}?" + urlencode({**times, "refresh": "", "theme": theme, **variables})


def screenshots(running: Running, folder: Path, chosen: Sequence[str] = tuple(BOARDS)) -> list[Looked]:
    """Open every board in every form and keep pictures of them."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    with browser() as opened:
        for theme in THEMES:
            for width, pixels in WIDTHS.items():
                for board in chosen:
                    page = opened.new_page(viewport={"width": pixels, "height": 1000})
                    url = address(running.boards, board, running.began, theme)
                    looked = look(page, f"{board} ({width}, {theme})", url)
                    found.append(looked)
                    page.screenshot(path=folder / f"{board}-{width}-{theme}.png", full_page=True)
                    page.close()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Make them all; 1 if something is wrong with one."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.screenshots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=SEEN_AFTER, help="to wait before (default %(default)g)")
    parser.add_argument("--board", choices=BOARDS, action="append", help="this one only")
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="flopwatch-cluster-") as state, Running(Path(state)) as running:
            print(f"boards at {running.boards}; pictures in {given.seconds:.0f} s ...", flush=True)
            wait(running, given.seconds)
            found = screenshots(running, given.folder, given.board or tuple(BOARDS))
    except (ServersError, StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    problems = [problem for looked in found for problem in looked.problems]
    print("\n".join([*problems, f"{len(found)} pictures in {given.folder}, {len(problems)} problems"]))
    return 1 if problems else 0


def wait(running: Running, seconds: float) -> None:
    """Let the cluster live until so long after its start. Raises StackError if a part of it fails."""
    while time.time() < running.began + seconds:
        running.check()
        time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
