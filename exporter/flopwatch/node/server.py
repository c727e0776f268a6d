"""The node exporter as a process: its sources, both listeners, and a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import uvicorn
from prometheus_client import CollectorRegistry

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.http import server as http_server
from flopwatch.http.client import client_tls
from flopwatch.http.web_config import Web
from flopwatch.ledger.api import of_this_machine, runs_router
from flopwatch.ledger.store import Store
from flopwatch.node.app import metrics_app, otlp_app
from flopwatch.node.collectors import StateFile, read_inventory
from flopwatch.node.driver_release import BY_SIGNAL, Release
from flopwatch.node.health import expectations
from flopwatch.node.health.rules import Verdict
from flopwatch.node.maintenance import Maintenance
from flopwatch.node.memory_tuning import one_heap, swept
from flopwatch.node.scrape.reader import gpu_inventory, hardware, simulated_node
from flopwatch.node.scrape.scrape import Scrape, Source
from flopwatch.node.telemetry.evidence import Witness
from flopwatch.node.telemetry.ledger_client import Embedded, Forward, Outcomes, Remote
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.settings import Address, ExporterSettings, SettingsError

log = logging.getLogger(__name__)

# More connections than 64 ranks and a few scrapers need; the rest is somebody's mistake.
MAX_CONNECTIONS = 512
SIMULATION_TICK = 1.0
RELEASE_TICK = 0.5


def run(settings: ExporterSettings) -> None:
    """Serve until SIGTERM or Ctrl-C. Raises SettingsError where these settings cannot work on this machine."""
    http_server.log_to_stderr()
    one_heap()
    with contextlib.ExitStack() as stack:
        http_server.check_token("--otlp-token-file", settings.otlp_token_file)
        http_server.check_token("--ledger-token-file", settings.ledger_token_file)
        web = None if settings.web_config is None else Web(settings.web_config)
        otlp_web = None if settings.otlp_web_config is None else Web(settings.otlp_web_config, "--otlp-web-config")
        if otlp_web is not None and otlp_web.config.users:
            raise SettingsError(
                f"--otlp-web-config {settings.otlp_web_config}: training processes show a token and no "
                "password; leave out basic_auth_users and give --otlp-token-file FILE"
            )
        if settings.ledger_ca_file is not None:
            client_tls(settings.ledger_ca_file)  # a wrong file is told now, not at the first delivery
        if settings.otlp_token_file is None and not settings.otlp_listen.loopback:
            log.warning("whoever reaches %s can push; --otlp-token-file would stop that", settings.otlp_listen)
        listeners = [
            stack.enter_context(http_server.listener("--listen", settings.listen, backlog=128)),
            stack.enter_context(http_server.listener("--otlp-listen", settings.otlp_listen, backlog=128)),
        ]
        if settings.simulate is None and not settings.sysfs.is_dir():
            raise SettingsError(f"--sysfs {settings.sysfs} is no folder; give the one where sysfs is mounted")
        settings = replace(settings, state=stack.enter_context(_state_folder(settings)))
        if settings.simulate is not None:
            stack.enter_context(_simulation(settings))
        asyncio.run(_serve(settings, listeners, web, otlp_web))


async def _serve(
    settings: ExporterSettings, listeners: list[socket.socket], web: Web | None, otlp_web: Web | None
) -> None:
    registry = CollectorRegistry()
    inventory = gpu_inventory(settings)
    witness = Witness()
    telemetry = Telemetry(settings, registry, lambda: _known_gpus(inventory), witness=witness)
    ledger = _ledger(settings, registry)
    readers = hardware(settings)
    in_memory: list[Source] = [telemetry, ledger] if isinstance(ledger, Embedded) else [telemetry]
    release = Release(settings.state, [reader for reader in readers if reader.driver])
    release.check()  # before anything opens the driver
    maintenance = Maintenance(settings.state, settings.host)
    verdict = Verdict(expectations.load(settings.expect, inventory.parent))

    def derive(samples: Sequence[Sample]) -> list[Sample]:
        witness.observe(samples)
        return verdict.derive(samples)

    scrape = Scrape(
        readers, in_memory, settings, registry, derive=derive, also=lambda: release.samples() + maintenance.samples()
    )
    forward = Forward(telemetry, ledger, memory=StateFile(settings.state / "evidence.json") if ledger else None)

    servers: list[uvicorn.Server] = []
    metrics = metrics_app(scrape, telemetry, settings, lambda: all(one.started for one in servers))
    if isinstance(ledger, Embedded):
        # What /metrics tells anybody may be read; closing a run is for those who could push its end.
        metrics.include_router(runs_router(ledger.store, lambda request: None, of_this_machine))
    otlp = otlp_app(telemetry, settings.otlp_token_file)
    for app, protection in ((metrics, web), (otlp, otlp_web)):
        servers.append(http_server.server(app if protection is None else protection.protect(app), MAX_CONNECTIONS))
        if protection is not None:
            protection.secure(servers[-1].config)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, release.request, BY_SIGNAL)
    releasing = asyncio.ensure_future(_release_when_asked(release))
    try:
        forward.start()
        running = [
            asyncio.ensure_future(one.serve([listener])) for one, listener in zip(servers, listeners, strict=True)
        ]
        while not all(one.started for one in servers) and not any(task.done() for task in running):
            await asyncio.sleep(0.01)
        addresses = [Address(*listener.getsockname()[:2]) for listener in listeners]
        log.info("listening metrics=%s otlp=%s", *addresses)
        # So that /readyz does not wait for the first scraper, and pushes are checked against the GPUs that are here.
        first = asyncio.ensure_future(scrape.collect())
        sweeping = asyncio.ensure_future(swept(first))
        await asyncio.wait([asyncio.ensure_future(stop.wait()), *running], return_when=asyncio.FIRST_COMPLETED)
        log.info("stopping")
        sweeping.cancel()
        first.cancel()
        releasing.cancel()
        for one in servers:
            one.should_exit = True
        await asyncio.gather(*running)
    finally:
        forward.stop()
        # A reader whose driver hangs takes a second to end; together they take no longer.
        closing = [threading.Thread(target=reader.close) for reader in readers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        scrape.close()
        if ledger is not None:
            ledger.close()


async def _release_when_asked(release: Release) -> None:
    while True:
        await asyncio.sleep(RELEASE_TICK)
        await asyncio.to_thread(release.check)


@contextlib.contextmanager
def _state_folder(settings: ExporterSettings) -> Iterator[Path]:
    """Give a folder that can be written; a temporary one where --state cannot, which an embedded ledger refuses."""
    try:
        settings.state.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.state) as probe:
            probe.write(b"flopwatch")  # an empty file can be made on a full disk
            probe.flush()
    except OSError as error:
        problem = f"--state {settings.state} cannot be written: {error.strerror}"
        if settings.ledger == "embedded":
            raise SettingsError(f"{problem}; --ledger embedded needs it: choose another --state DIR") from None
        log.warning("%s; going on without: inventory and Xid counts will not survive a restart", problem)
        with tempfile.TemporaryDirectory(prefix="flopwatch-") as folder:
            yield Path(folder)
    else:
        with (settings.state / "exporter.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                # Not an end: the other one may be stuck in a driver for good, which is when a monitor is needed most.
                log.warning(
                    "another exporter uses --state %s: both count and write what is kept there; end one of "
                    "them, or give each its own folder",
                    settings.state,
                )
            yield settings.state


@contextlib.contextmanager
def _simulation(settings: ExporterSettings) -> Iterator[None]:
    """Keep the simulated node of --simulate moving."""
    from flopwatch.simulate.node import SimulatedNode

    node = SimulatedNode(simulated_node(settings))
    node.create()
    ended = threading.Event()

    def tick() -> None:
        while not ended.wait(SIMULATION_TICK):
            try:
                node.tick(time.time())
            except (OSError, ValueError):
                log.exception("the simulated node stands still")

    thread = threading.Thread(target=tick, name="simulation", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=1)


def _ledger(settings: ExporterSettings, registry: CollectorRegistry) -> Embedded | Remote | None:
    if settings.ledger == "off":
        return None
    outcomes = Outcomes(registry)
    if settings.ledger == "embedded":
        store = Store(settings.state / "ledger.sqlite", silent_after=settings.silent_after, new_for=settings.new_for)
        return Embedded(store, outcomes)
    return Remote(
        settings.ledger, settings.ledger_token_file, settings.state / "spool", outcomes, ca_file=settings.ledger_ca_file
    )


def _known_gpus(inventory: Path) -> frozenset[str] | None:
    """Return the UUIDs of this node's GPUs, missing ones included; None where none was ever seen."""
    return frozenset(part["uuid"] for part in read_inventory(inventory, m.GPU_INFO).values()) or None
