"""Take pictures of every dashboard in a real browser: `python -m demo.screenshots FOLDER`.

A simulated cluster (demo/cluster.py) runs until the alerts on its faults fire. Then Chromium opens every dashboard in
the viewer, at three widths, light and dark. The exit status is 1, with the reasons, if a page logs an error, a panel
fails, or a panel is empty without an explanation.
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
from demo.cluster import BAD_LINK, STRAGGLER, ClusterDemo
from demo.servers import ServersError
from demo.stack import StackError
from simulator.progress import progress
from simulator.topology import Topology

SHOWN_AFTER = 270.0  # seconds until the alerts fire
DRAW_TIMEOUT = 60.0  # seconds for all panels of a page
WIDTHS = {"wide": 1600, "half": 800, "narrow": 390}
THEMES = ("dark", "light")
# Variables of each dashboard, where the first choice is not the most interesting one.
STRAGGLING, LINK = {"run": "llama-70b"}, {"run": "video-13b"}
CHOSEN = {
    "run": STRAGGLING,
    "stragglers": STRAGGLING,
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
class PageReport:
    """Errors of one page in the browser, and its panels with their state."""

    board: str
    errors: list[str] = field(default_factory=list)
    panels: list[dict[str, str]] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Return a line for each error of the page and each panel that failed or is empty without an explanation."""
        found = [f"{self.board}: {error}" for error in self.errors]
        for panel in self.panels:
            if panel["state"] in ("error", "loading", "unseen"):
                found.append(f"{self.board}, {panel['title']}: {panel['state']}: {panel['text']}")
            elif panel["state"] == "empty" and not panel["nothing"]:
                found.append(f"{self.board}, {panel['title']}: empty, without an explanation")
        return found if self.panels else [*found, f"{self.board}: no panel"]


def chromium() -> str:
    """Return the path of Chromium or Chrome. Raises StackError if neither is on PATH."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (path := shutil.which(name)) is not None:
            return path
    raise StackError("no browser on PATH: install Chromium (Debian: apt-get install chromium)")


@contextmanager
def browser() -> Iterator[Browser]:
    """Run Chromium without its own background requests until the block ends."""
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


def look(page: Page, board: str, url: str) -> PageReport:
    """Open a dashboard in the viewer, wait until all panels are drawn, and return the panels and the browser's errors.

    Console warnings, failed requests and panels not drawn after DRAW_TIMEOUT are errors too.
    """
    report = PageReport(board)

    def on_console(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            report.errors.append(f"console {message.type}: {message.text}")

    def on_failure(request: Request) -> None:
        # A page aborts its earlier request when it sends a new one.
        if request.failure != "net::ERR_ABORTED":
            report.errors.append(f"{request.url}: {request.failure}")

    def on_response(response: Response) -> None:
        if response.status >= 400:
            report.errors.append(f"{response.url}: {response.status}")

    def on_error(error: Error) -> None:
        report.errors.append(f"uncaught: {error}")

    page.on("console", on_console)
    page.on("pageerror", on_error)
    page.on("requestfailed", on_failure)
    page.on("response", on_response)
    page.goto(url)
    try:
        page.wait_for_selector("[data-panel]", state="attached", timeout=DRAW_TIMEOUT * 1000)
        # The viewport is as high as the page, because a panel outside of it is not drawn.
        width, height = page.evaluate("[innerWidth, document.documentElement.scrollHeight]")
        page.set_viewport_size({"width": width, "height": height})
        page.wait_for_function(DRAWN, timeout=DRAW_TIMEOUT * 1000)
    except Error as error:
        report.errors.append(f"not drawn after {DRAW_TIMEOUT:.0f} s: {error}")
    page.wait_for_timeout(800)  # for the second layout, after panels are measured
    report.panels = page.evaluate(PANELS)
    return report


def address(boards: str, board: str, began: float, theme: str) -> str:
    """Return the URL of a dashboard in the viewer at `boards`, with the variables in CHOSEN.

    The time range is from Unix time `began` until now.
    """
    times = {"from": f"{began * 1000:.0f}", "to": f"{time.time() * 1000:.0f}"}
    variables = {f"var-{name}": value for name, value in CHOSEN.get(board, {}).items()}
    return f"{boards}/d/{BOARDS[board]['uid']}?" + urlencode({**times, "refresh": "", "theme": theme, **variables})


def screenshots(running: ClusterDemo, folder: Path, chosen: Sequence[str] = tuple(BOARDS)) -> list[PageReport]:
    """Save a picture of every chosen dashboard in every width and theme. Return a report per picture."""
    folder.mkdir(parents=True, exist_ok=True)
    reports = []
    with browser() as opened:
        for theme in THEMES:
            for width, pixels in WIDTHS.items():
                for board in chosen:
                    page = opened.new_page(viewport={"width": pixels, "height": 1000})
                    url = address(running.boards, board, running.began, theme)
                    report = look(page, f"{board} ({width}, {theme})", url)
                    reports.append(report)
                    page.screenshot(path=folder / f"{board}-{width}-{theme}.png", full_page=True)
                    page.close()
    return reports


def main(arguments: Sequence[str] | None = None) -> int:
    """Take the pictures and return the exit status: 1 if a page has a problem."""
    parser = argparse.ArgumentParser(
        prog="python -m demo.screenshots", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--seconds", type=float, default=SHOWN_AFTER, help="wait before the first picture (default %(default)g)"
    )
    parser.add_argument("--board", choices=BOARDS, action="append", help="take only this dashboard; can be repeated")
    given = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="flopwatch-cluster-") as state, ClusterDemo(Path(state)) as running:
            print(f"boards at {running.boards}; pictures in {given.seconds:.0f} s ...", flush=True)
            wait(running, given.seconds)
            reports = screenshots(running, given.folder, given.board or tuple(BOARDS))
    except (ServersError, StackError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    problems = [problem for report in reports for problem in report.problems]
    print("\n".join([*problems, f"{len(reports)} pictures in {given.folder}, {len(problems)} problems"]))
    return 1 if problems else 0


def wait(running: ClusterDemo, seconds: float) -> None:
    """Wait until `seconds` after the start of the cluster. Raises StackError if a process or the simulation fails."""
    with progress("The cluster runs", seconds) as advance:
        while time.time() < running.began + seconds:
            running.check()
            time.sleep(0.5)
            advance(0.5)


if __name__ == "__main__":
    sys.exit(main())
