"""Every dashboard in a real browser, over a real Prometheus that scrapes a simulated cluster of 64 nodes.

`make versions` opens them over VictoriaMetrics as well, to which that Prometheus sends what it has.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

from dashboards.__main__ import BOARDS
from demo.boards import PAGE
from demo.cluster import BAD_LINK, STRAGGLER, ClusterDemo
from demo.screenshots import CHOSEN, PageReport, address, browser, look
from demo.servers import ServersError
from demo.stack import Child, StackError, fetch, free_ports
from simulator.topology import Topology
from tests.support.databases import VICTORIA, victoria
from tests.support.machine import node_builds, until

pytestmark = [
    pytest.mark.long,
    pytest.mark.alone,
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PAGE.is_file() and not node_builds(), reason="no Node 20 for `make viewer`"),
]

ALERTS = {"TrainingStraggler", "InfinibandLinkErrors", "GpuThermalThrottling"}
HOSTILE = '<img src=x onerror="window.taken=1"><script>window.taken=1</script>'
CUT_TITLES = """() => [...document.querySelectorAll('.panel h2')]
  .filter((title) => title.scrollWidth > title.clientWidth + 1 || title.scrollHeight > title.clientHeight + 4)
  .map((title) => title.innerText)"""
LATE = f"rank {8 * STRAGGLER[0] + STRAGGLER[1]} on {Topology.host(STRAGGLER[0])}"


@pytest.fixture(scope="module")
def opened() -> Iterator[Browser]:
    try:
        with browser() as started:
            yield started
    except StackError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return the URLs of the oldest and newest VictoriaMetrics there are, by suite, where `make versions` runs this."""
    folder, found = tmp_path_factory.mktemp("stores"), {}
    with ExitStack() as stack:
        for suite in VICTORIA if os.environ.get("FLOPWATCH_VERSIONS") else ():
            with suppress(ServersError):
                url, runs = victoria(suite, folder)
                stack.enter_context(runs)
                found[suite] = url
        yield found


@pytest.fixture(scope="module", autouse=True)
def living(opened: Browser, stores: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterDemo]:
    """Return the cluster from its start on. Tests that do not need its alerts run until they fire."""
    with ClusterDemo(
        tmp_path_factory.mktemp("cluster"), remote_write=[f"{url}/api/v1/write" for url in stores.values()]
    ) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def running(living: ClusterDemo) -> ClusterDemo:
    """Return the cluster when its alerts fire."""

    def alerts_fire() -> bool:
        living.check()
        firing = living.prometheus.query('ALERTS{alertstate="firing"}')
        return {labels["alertname"] for labels, _ in firing} >= ALERTS

    until(alerts_fire, 400.0)
    return living


@pytest.fixture
def page(opened: Browser) -> Iterator[Page]:
    made = opened.new_page(viewport={"width": 1600, "height": 1000})
    yield made
    made.close()


class Hostile:
    """A Prometheus all of whose labels are markup."""

    def __init__(self) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
                names = (
                    "run",
                    "host",
                    "rank",
                    "bucket",
                    "alertname",
                    "severity",
                    "cause",
                    "reason",
                    "instance",
                    "uuid",
                    "gpu",
                    "device",
                    "port",
                    "model",
                    "state",
                    "rail",
                    "status",
                    "kind",
                    "xid",
                )
                metric = dict.fromkeys(names, HOSTILE)
                at = float(form["time" if "time" in form else "end"][0])
                over = "query_range" in self.path
                result = {"metric": metric, **({"values": [[at, "1"]]} if over else {"value": [at, "1"]})}
                self._say({"resultType": "matrix" if over else "vector", "result": [result]})

            def do_GET(self) -> None:
                self._say([HOSTILE])

            def _say(self, data: object) -> None:
                body = json.dumps({"status": "success", "data": data}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def boards_over(prometheus: str, folder: Path, *flags: str) -> Iterator[str]:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    child = Child(
        "boards",
        [
            sys.executable,
            "-m",
            "flopwatch",
            "boards",
            f"--prometheus={prometheus}",
            f"--listen=127.0.0.1:{port}",
            *flags,
        ],
        os.environ,
        folder / "log",
    )
    try:
        until(lambda: _answers(child, url))
        yield url
    finally:
        child.stop()


@contextmanager
def boards_over_hostile(folder: Path, *flags: str) -> Iterator[str]:
    prometheus = Hostile()
    threading.Thread(target=prometheus.server.serve_forever, daemon=True).start()
    try:
        with boards_over(prometheus.url, folder, *flags) as url:
            yield url
    finally:
        prometheus.server.shutdown()
        prometheus.server.server_close()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with boards_over_hostile(tmp_path_factory.mktemp("hostile")) as url:
        yield url


def _answers(child: Child, url: str) -> bool:
    child.check()
    try:
        fetch(f"{url}/healthz")
    except OSError:
        return False
    return True


@pytest.mark.parametrize("board", BOARDS)
def test_markup_in_a_name_is_text(hostile: str, page: Page, board: str) -> None:
    looked = look(page, board, f"{hostile}/d/{BOARDS[board]['uid']}?from=now-5m&to=now&refresh=")
    assert [panel for panel in looked.panels if panel["state"] == "error"] == []
    assert page.evaluate("window.taken") is None
    assert page.locator("img[src=x]").count() == 0
    # It is there, as text: the test would see nothing where nothing is shown.
    assert HOSTILE[:8] in page.evaluate("document.body.innerText")


def test_a_foreign_dashboard_shows_supported_panels_and_names_the_others(tmp_path: Path, page: Page) -> None:
    shapes: dict[str, dict[str, Any]] = {
        "Load of $node": {"targets": [{"refId": "A", "expr": "up", "legendFormat": "$node {{kind}}"}]},
        "Named": {
            "type": "stat",
            "targets": [{"refId": "A", "expr": "up"}],
            "fieldConfig": {"overrides": [], "defaults": {"displayName": "kind is ${__field.labels.kind}"}},
        },
        "Reckoned": {"targets": [{"refId": "A", "expr": "up"}, {"refId": "B", "type": "math", "expression": "$A * 2"}]},
        "Buckets": {"type": "heatmap", "targets": [{"refId": "A", "expr": "up", "format": "heatmap"}]},
    }
    options = {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "color": {},
        "reduceOptions": {"calcs": ["lastNotNull"]},
        "tooltip": {"mode": "multi"},
        "textMode": "value_and_name",
    }
    panels = [
        {
            "id": i,
            "type": "timeseries",
            "title": title,
            "gridPos": {"x": 6 * i, "y": 0, "w": 6, "h": 8},
            "options": options,
            **shape,
        }
        for i, (title, shape) in enumerate(shapes.items())
    ]
    (tmp_path / "theirs.json").write_text(
        json.dumps(
            {
                "uid": "theirs",
                "title": "Theirs",
                "panels": panels,
                "time": {"from": "now-5m", "to": "now"},
                "templating": {"list": [{"type": "textbox", "name": "node", "query": "node 7"}]},
                "annotations": {
                    "list": [{"name": "built in", "iconColor": "red", "target": {"type": "dashboard", "limit": 100}}]
                },
            }
        )
    )
    with boards_over_hostile(tmp_path, f"--dashboards={tmp_path}") as url:
        looked = look(page, "theirs", f"{url}/d/theirs")
        assert {panel["title"]: panel["state"] for panel in looked.panels} == {
            "Load of $node": "ok",
            "Named": "ok",
            "Reckoned": "error",
            "Buckets": "error",
        }
        load, named, reckoned, buckets = (page.locator(f'[data-panel="{title}"]') for title in shapes)
        expect(load).to_contain_text("Load of node 7")
        expect(load.locator('[data-testid*="VizLegend series"]')).to_have_text(f"node 7 {HOSTILE}")
        expect(named).to_contain_text(f"kind is {HOSTILE}")
        expect(reckoned).to_contain_text("only queries of Prometheus are asked here")
        expect(buckets).to_contain_text("a heatmap of buckets is not drawn here")
        assert page.evaluate("window.taken") is None
        page.goto(f"{url}/d/theirs?from=99999999999999999&to=now")
        expect(load).to_have_attribute("data-state", "error")
        page.goto(f"{url}/d/theirs?from=now-5m&to=now")
        expect(load).to_have_attribute("data-state", "ok")


def test_times_are_in_the_zone_of_the_address(living: ClusterDemo, page: Page) -> None:
    url = f"{living.boards}/d/{BOARDS['fleet']['uid']}?from=1800000000000&to=1800003600000&refresh=&timezone="
    for zone, shown in (("utc", "2027-01-15 08:00:00"), ("Asia/Tokyo", "2027-01-15 17:00:00")):
        page.goto(url + zone)
        expect(page.locator("header")).to_contain_text(f"{shown} to")
    page.goto(url + "Nowhere/Land")
    expect(page.locator("header")).to_contain_text("2027-01-15")


@pytest.mark.parametrize("board", BOARDS)
@pytest.mark.parametrize(("width", "theme"), [(1600, "dark"), (800, "light"), (390, "dark")])
def test_every_panel_is_drawn_or_gives_the_reason_it_is_empty(
    running: ClusterDemo, page: Page, board: str, width: int, theme: str
) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or ""))
    page.set_viewport_size({"width": width, "height": 1000})
    looked = look(page, board, address(running.boards, board, running.began, theme))
    assert looked.problems == []
    assert page.evaluate(CUT_TITLES) == []
    assert len(looked.panels) == sum(panel["type"] != "row" for panel in BOARDS[board]["panels"])
    assert any("query=" in text for text in asked)
    assert not [text for text in asked if re.search(r"%24(?!\d)", text)], "a variable has no value"


def test_panels_show_the_faults_of_the_cluster(running: ClusterDemo, page: Page) -> None:
    look(page, "stragglers", address(running.boards, "stragglers", running.began, "dark"))
    expect(page.locator('[data-panel="Straggler"]')).to_contain_text(LATE)
    look(page, "fleet", address(running.boards, "fleet", running.began, "dark"))
    alerts = page.locator('[data-panel="Findings"]')
    for text in (*ALERTS, Topology.host(BAD_LINK[0])):
        expect(alerts).to_contain_text(text)


def test_a_run_s_board_begins_with_rank_host_gpu_cause_and_cost_above_the_fold(
    running: ClusterDemo, page: Page
) -> None:
    page.set_viewport_size({"width": 1600, "height": 900})
    page.goto(address(running.boards, "run", running.began, "light"))
    expect(page.locator('[data-panel="Verdict"]')).to_contain_text(
        re.compile(
            rf"{LATE.capitalize()} costs \d+ % of each step: GPU {STRAGGLER[1]} throttles by heat. \$\d+ an hour."
        )
    )
    for title in ("Verdict", "State", "Cost", "Suspects", "Firing alerts on the run"):
        panel = page.locator(f'[data-panel="{title}"]')
        expect(panel).to_have_attribute("data-state", "ok")
        box = panel.bounding_box()
        assert box is not None
        assert box["y"] + box["height"] <= 900, title
    # As critical and as warning it is one incident.
    alerts = (
        page.locator('[data-panel="Firing alerts on the run"]').get_by_role("row").filter(has_text="TrainingStraggler")
    )
    expect(alerts).to_have_count(1)
    expect(alerts).to_contain_text("critical")
    expect(alerts).to_contain_text(Topology.host(STRAGGLER[0]))


def test_the_index_shows_the_alerts_of_each_board_from_the_whole_to_its_parts(running: ClusterDemo, page: Page) -> None:
    page.goto(f"{running.boards}/")
    cards = page.locator("[data-board]")
    expect(cards).to_have_count(len(BOARDS))
    assert [card.get_attribute("data-board") for card in cards.all()] == [board["uid"] for board in BOARDS.values()]
    for board, state in (("run", "1 critical"), ("fabric", "warning"), ("gpu", "warning"), ("monitor", "no alert")):
        expect(page.locator(f'[data-board="{BOARDS[board]["uid"]}"]')).to_contain_text(state)
    page.goto(f"{running.boards}/d/unknown")
    expect(page.locator("body")).to_contain_text("no dashboard unknown")
    expect(cards).to_have_count(len(BOARDS))


def test_a_panel_is_shown_alone_explored_and_saved_and_the_tab_has_the_run(
    running: ClusterDemo, page: Page, tmp_path: Path
) -> None:
    page.goto(address(running.boards, "run", running.began, "dark"))
    expect(page).to_have_title("llama-70b · Training run · flopwatch")
    panel = page.locator('[data-panel="Goodput and ETTR"]')
    panel.scroll_into_view_if_needed()
    expect(panel).to_have_attribute("data-state", "ok")
    panel.hover()
    page.keyboard.press("v")
    expect(page.locator("[data-panel]")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(page.locator('[data-panel="Verdict"]')).to_be_visible()
    panel.scroll_into_view_if_needed()
    panel.hover()
    page.keyboard.press("e")
    query = page.locator("textarea").first
    expect(query).to_have_value(re.compile("run:run_goodput:ratio"))
    query.fill("vector(42)")
    page.get_by_role("button", name="Run queries").click()
    panel.hover()
    panel.get_by_role("button", name="Menu").click()
    with page.expect_download() as download:
        page.get_by_role("menuitem", name="CSV").click()
    download.value.save_as(tmp_path / "panel.csv")
    lines = (tmp_path / "panel.csv").read_text().splitlines()
    assert lines[0] == "Time,goodput,ETTR"
    assert {line.split(",")[1] for line in lines[1:]} == {"42"}
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("Keyboard shortcuts")


def test_a_price_that_is_not_a_number_is_not_taken(running: ClusterDemo, page: Page) -> None:
    page.goto(address(running.boards, "run", running.began, "dark"))
    price = page.get_by_label("$ per GPU-hour")
    price.fill("abc")
    price.press("Enter")
    expect(price).to_have_attribute("title", "a number is expected")
    assert "abc" not in page.url
    price.fill("5")
    price.press("Enter")
    expect(page).to_have_url(re.compile("var-price=5"))


def test_variables_with_several_values_patterns_and_repeated_panels(
    running: ClusterDemo, page: Page, tmp_path: Path
) -> None:
    panel: dict[str, Any] = {
        "type": "stat",
        "options": {"reduceOptions": {"calcs": ["lastNotNull"]}, "textMode": "value", "graphMode": "none"},
        "fieldConfig": {"defaults": {}, "overrides": []},
    }
    targets = [{"refId": "A", "expr": 'sum(run_gpus{run=~"$name-.*"})', "instant": True}]
    every = panel | {"id": 1, "title": "All of $name", "gridPos": {"x": 0, "y": 9, "w": 24, "h": 4}, "targets": targets}
    each = panel | {"id": 2, "title": "Each $name", "gridPos": {"x": 0, "y": 0, "w": 12, "h": 4}, "targets": targets}
    row = {
        "id": 3,
        "type": "row",
        "title": "Row of $name",
        "repeat": "name",
        "gridPos": {"x": 0, "y": 20, "w": 24, "h": 1},
    }
    below = panel | {"id": 4, "title": "Below", "gridPos": {"x": 0, "y": 21, "w": 12, "h": 4}, "targets": targets}
    names = {"type": "query", "name": "name", "query": "label_values(run_gpus, run)", "multi": True, "includeAll": True}
    board = {
        "uid": "theirs",
        "title": "Theirs",
        "panels": [each | {"repeat": "name"}, every, row, below],
        "templating": {"list": [names | {"regex": "/^(llama|video)-/"}]},
    }
    (tmp_path / "theirs.json").write_text(json.dumps(board))
    with boards_over(running.prometheus.url, tmp_path, f"--dashboards={tmp_path}") as url:
        page.goto(f"{url}/d/theirs?from=now-5m&to=now&refresh=&var-name=llama&var-name=video")
        for title, texts in (
            ("Each $name", [r"Each llama\s*256", r"Each video\s*128"]),
            ("All of $name", [r"All of llama \+ video\s*384"]),
            ("Below", [r"256", r"128"]),
        ):
            expect(page.locator(f'[data-panel="{title}"]')).to_have_text([re.compile(text) for text in texts])
        expect(page.locator("h2.heading")).to_have_text([re.compile("Row of llama"), re.compile("Row of video")])
        page.goto(f"{url}/d/theirs?from=now-5m&to=now&refresh=&var-name=%24__all")
        expect(page.locator('[data-panel="Each $name"]')).to_have_count(2)
        page.goto(f"{url}/d/theirs?from=now-5m&to=now&refresh=&var-name=video")
        expect(page.locator('[data-panel="All of $name"]')).to_have_text(re.compile("128"))


def test_links_lead_from_a_run_to_its_late_rank_s_card_and_keep_time_and_variables(
    running: ClusterDemo, page: Page
) -> None:
    look(page, "run", address(running.boards, "run", running.began, "light") + "&timezone=utc")
    before = parse_qs(urlsplit(page.url).query)
    card = Topology.gpu(*STRAGGLER)
    page.locator('[data-panel="Suspects"]').get_by_role("link", name=f"{STRAGGLER[1]}", exact=True).click()
    expect(page).to_have_title(re.compile("GPU"))
    after = parse_qs(urlsplit(page.url).query)
    assert after["var-uuid"] == [card]
    assert after["var-host"] == [Topology.host(STRAGGLER[0])]
    for name in ("from", "to", "timezone"):
        assert after[name] == before[name], name
    expect(page.locator('[data-panel="GPU"]')).to_contain_text("NVIDIA H100")


def test_a_choice_is_in_the_address_and_asked_for(running: ClusterDemo, page: Page) -> None:
    look(page, "run", address(running.boards, "run", running.began, "dark"))
    page.get_by_label("Run", exact=True).click()
    page.get_by_role("option", name="ablation-4").click()
    expect(page).to_have_url(re.compile("var-run=ablation-4"))
    expect(page.locator('[data-panel="State"]')).to_contain_text("running")
    page.go_back()
    expect(page).to_have_url(re.compile(f"var-run={CHOSEN['run']['run']}"))


def test_another_node_has_other_cards(running: ClusterDemo, page: Page) -> None:
    look(page, "gpu", address(running.boards, "gpu", running.began, "dark"))
    page.get_by_label("Node", exact=True).click()
    page.get_by_role("option", name="node-0007").click()
    expect(page).to_have_url(re.compile("var-host=node-0007"))
    expect(page).to_have_url(re.compile(f"var-uuid=({'|'.join(Topology.gpu(7, gpu) for gpu in range(8))})"))
    expect(page.locator('[data-panel="GPU"]')).to_contain_text("node-0007")


def test_default_values_are_in_the_address_too(running: ClusterDemo, page: Page) -> None:
    look(page, "run", f"{running.boards}/d/{BOARDS['run']['uid']}?from=now-2m&to=now&refresh=nonsense")
    expect(page).to_have_url(re.compile("var-run=ablation-4"))


def test_a_panel_out_of_sight_is_not_asked_about_until_it_is_seen(running: ClusterDemo, page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.post_data or ""))
    page.set_viewport_size({"width": 1600, "height": 400})
    page.goto(address(running.boards, "node", running.began, "dark"))
    every = page.locator("[data-panel]")
    drawn = re.compile("^(ok|empty)$")
    expect(every.first).to_have_attribute("data-state", drawn, timeout=60_000)
    loading = page.locator('[data-state="loading"]')
    expect(loading).to_have_count(0)
    expect(every.last).to_have_attribute("data-state", "unseen")
    before = len(asked)
    every.last.scroll_into_view_if_needed()
    expect(every.last).to_have_attribute("data-state", drawn)
    expect(loading).to_have_count(0)
    assert len(asked) > before
    before = len(asked)
    page.evaluate("scrollTo(0, 0)")
    every.last.scroll_into_view_if_needed()
    page.wait_for_timeout(500)
    assert len(asked) == before, "what is known is not asked again"


def test_a_click_on_the_legend_leaves_one_line_and_another_all(running: ClusterDemo, page: Page) -> None:
    look(page, "fleet", address(running.boards, "fleet", running.began, "dark"))
    panel = page.locator('[data-panel="MFU of the largest runs"]')
    one, other = (panel.locator(f'[data-testid$="{run}"]') for run in ("llama-70b", "video-13b"))
    shown = one.evaluate("label => getComputedStyle(label).color")
    one.get_by_role("button").click()
    expect(other).not_to_have_css("color", shown)
    expect(one).to_have_css("color", shown)
    one.get_by_role("button").click()
    expect(other).to_have_css("color", shown)
    one.get_by_role("button").click(modifiers=["Control"])
    expect(one).not_to_have_css("color", shown)
    expect(other).to_have_css("color", shown)


def test_the_page_needs_nothing_from_elsewhere(running: ClusterDemo, page: Page) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    look(page, "fleet", address(running.boards, "fleet", running.began, "dark"))
    assert {urlsplit(url).netloc for url in asked if not url.startswith("data:")} == {urlsplit(running.boards).netloc}


@pytest.mark.skipif(not os.environ.get("FLOPWATCH_VERSIONS"), reason="`make versions` runs it")
def test_every_panel_is_drawn_over_victoria_metrics_too(
    running: ClusterDemo, stores: dict[str, str], opened: Browser, tmp_path: Path
) -> None:
    if len(stores) < len(VICTORIA):
        pytest.skip("not every version can be had here")
    with ExitStack() as stack:
        page = opened.new_page(viewport={"width": 1600, "height": 1000})
        stack.callback(page.close)
        every = f"--scrape-interval={15 / running.pace:g}"
        urls = []
        for suite, store in stores.items():
            (tmp_path / suite).mkdir()
            urls.append(stack.enter_context(boards_over(store, tmp_path / suite, every)))
        for board in BOARDS:
            there = look(page, board, address(running.boards, board, running.began, "dark"))

            def all_drawn(url: str, board: str = board, there: PageReport = there) -> bool:
                here = look(page, board, address(url, board, running.began, "dark"))
                assert here.problems == []
                # Of a counter that begins above 0 it has an increase where Prometheus has none.
                return empty(here) <= empty(there)

            for url in urls:
                until(partial(all_drawn, url), 30.0)  # a new series is visible later (docs/compatibility.md)


def empty(looked: PageReport) -> set[str]:
    return {panel["title"] for panel in looked.panels if panel["state"] == "empty"}
