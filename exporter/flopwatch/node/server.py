"""The exporter process: starts reader processes, telemetry, ledger and both HTTP servers, and ends them cleanly."""

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flopwatch import catalogue as m
from flopwatch.catalogue import Sample
from flopwatch.http import server as http_server
from flopwatch.http.client import client_tls
from flopwatch.http.guard import guarded, own_names
from flopwatch.node.app import metrics_app, otlp_app, small_pushes
from flopwatch.node.collectors import StateFile, read_inventory, read_runtime
from flopwatch.node.driver_release import BY_SIGNAL, Release
from flopwatch.node.health import expectations
from flopwatch.node.health.verdict import Verdict
from flopwatch.node.maintenance import Maintenance
from flopwatch.node.memory_tuning import fork, one_heap, swept
from flopwatch.node.scrape.reader import HostSources, SourcesFactory, gpu_inventory, gpu_runtime, hardware, host_sources
from flopwatch.node.scrape.scrape import Registry, Scrape
from flopwatch.node.telemetry.evidence import EVIDENCE_STATE, EvidenceLog
from flopwatch.node.telemetry.ledger_client import Embedded, Forward, Outcomes, Remote
from flopwatch.node.telemetry.ranks import Telemetry
from flopwatch.node.telemetry.ras import RAS_STATE, Ras
from flopwatch.settings import Address, ExporterSettings, SettingsError

if TYPE_CHECKING:
    from flopwatch.http.web_config import Web
    from flopwatch.node.telemetry.inspector import Inspector

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 512  # far more than 64 ranks and a few scrapers need
SIMULATION_TICK, CHECK_EVERY = 1.0, 5.0  # seconds between two moves of a simulated node, and two calls of `tick`


def run(settings: ExporterSettings, sources: SourcesFactory = host_sources) -> None:
    """Run the exporter until SIGTERM or Ctrl-C. Raises SettingsError if these settings cannot work on this host."""
    http_server.log_to_stderr()
    one_heap()
    with contextlib.ExitStack() as stack:
        web, otlp_web = _checked(settings)
        listeners = [
            stack.enter_context(http_server.listener("--listen", settings.listen, backlog=128)),
            stack.enter_context(http_server.listener("--otlp-listen", settings.otlp_listen, backlog=128)),
        ]
        if settings.simulate is None and not settings.sysfs.is_dir():
            raise SettingsError(f"--sysfs {settings.sysfs}: not a folder. Give the one where sysfs is mounted")
        settings = replace(settings, state=stack.enter_context(_state_folder(settings)))
        host = sources(settings)
        exporter = _Exporter(settings, host, web, otlp_web)
        if host.tick is not None:
            stack.enter_context(_ticking("simulation", host.tick, SIMULATION_TICK))
        with _ticking("ranks and driver release", exporter.tick, CHECK_EVERY):
            asyncio.run(exporter.serve(listeners))


def _checked(settings: ExporterSettings) -> tuple[Web | None, Web | None]:
    """Return the web configurations of both listeners, if given. Raises SettingsError if a file of a flag is wrong."""
    http_server.check_token("--otlp-token-file", settings.otlp_token_file)
    http_server.check_token("--ledger-token-file", settings.ledger_token_file)
    web, otlp_web = _web("--web-config", settings.web_config), _web("--otlp-web-config", settings.otlp_web_config)
    if otlp_web is not None and otlp_web.config.basic_auth_users:
        raise SettingsError(
            f"--otlp-web-config {settings.otlp_web_config}: training processes send a token and no "
            "password; leave out basic_auth_users and give --otlp-token-file FILE"
        )
    if settings.ledger_ca_file is not None:
        client_tls(settings.ledger_ca_file)  # fails now instead of at the first delivery
    if settings.otlp_token_file is None and not settings.otlp_listen.loopback:
        log.warning(
            "OTLP listener %s accepts pushes without authentication; set --otlp-token-file", settings.otlp_listen
        )
    return web, otlp_web


def _web(flag: str, file: Path | None) -> Web | None:
    if file is None:
        return None
    from flopwatch.http.web_config import Web  # its models are memory that an exporter without such a file can save

    return Web(file, flag)


class _Exporter:
    def __init__(self, settings: ExporterSettings, sources: HostSources, web: Web | None, otlp_web: Web | None) -> None:
        self._readers = hardware(settings, sources)
        fork(self._readers)
        registry = Registry()
        inventory, _ = gpus = gpu_inventory(settings), gpu_runtime(settings)
        self._known = _known_gpus(*gpus)
        evidence, known = EvidenceLog(), lambda: self._known or _known_gpus(*gpus)
        ras = None
        if settings.ras != "off" and settings.ledger != "off":
            ras = Ras(Address.parse(settings.ras), registry, StateFile(settings.state / RAS_STATE))
        inspector = _inspector(settings, registry)
        self._telemetry = Telemetry(settings, registry, known, evidence_log=evidence, ras=ras, inspector=inspector)
        self._ledger = _ledger(settings, registry)
        self._release = Release(settings.state, [reader for reader in self._readers if reader.driver])
        self._release.check()  # before anything opens the driver
        maintenance = Maintenance(settings.state, settings.host)
        verdict = Verdict(expectations.load(settings.expect, inventory.parent))

        def derive(samples: Sequence[Sample]) -> list[Sample]:
            self._known = _known_gpus(*gpus)  # the readers have just written these files
            if self._ledger is not None:
                evidence.observe(samples)
            return verdict.derive(samples)

        self._scrape = Scrape(
            self._readers,
            [self._telemetry, self._ledger] if isinstance(self._ledger, Embedded) else [self._telemetry],
            settings,
            registry,
            derive=derive,
            also=lambda: self._release.samples() + maintenance.samples(),
        )
        kept = StateFile(settings.state / EVIDENCE_STATE)
        self._forward = Forward(self._telemetry, self._ledger, memory=kept, read=self._read) if self._ledger else None
        self._servers: list[http_server.Server] = []
        metrics = metrics_app(self._scrape, self._telemetry, settings, self._listening)
        if isinstance(self._ledger, Embedded):
            from fastapi import FastAPI  # likewise memory

            from flopwatch.ledger.api import of_this_machine, runs_router

            # Reading is public, as on /metrics; only clients that can push the end of a run may close it.
            runs = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
            runs.include_router(runs_router(self._ledger.store, lambda request: None, of_this_machine))
            metrics.mount("/", runs)
        otlp = otlp_app(self._telemetry, settings.otlp_token_file)
        for app, protection, address, token in (
            (metrics, web, settings.listen, None),
            (otlp, otlp_web, settings.otlp_listen, settings.otlp_token_file),
        ):
            names = own_names(address, authenticated=protection is not None or token is not None)
            served = guarded(app if protection is None else protection.protect(app), names)
            direct = small_pushes(self._telemetry, token, names) if app is otlp and protection is None else None
            server = http_server.server(served, MAX_CONNECTIONS, direct)
            self._servers.append(server)
            if protection is not None:
                protection.secure(server.config)

    def tick(self, _: float) -> None:
        """Check the ranks, unless a ledger's client does. Start or end a release of the driver if requested."""
        try:
            if self._forward is None:  # a rank of a container that ends before this is served until its timeout
                self._telemetry.check()
                self._telemetry.discard()
        finally:
            self._release.check()

    def _read(self) -> None:
        asyncio.run_coroutine_threadsafe(self._scrape.collect(), self._loop)

    def _listening(self) -> bool:
        return all(server.started for server in self._servers)

    async def serve(self, listeners: Sequence[socket.socket]) -> None:
        loop = self._loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        loop.add_signal_handler(signal.SIGUSR1, self._release.request, BY_SIGNAL)
        try:
            if self._forward is not None:
                self._forward.start()
            pairs = zip(self._servers, listeners, strict=True)
            running = [asyncio.ensure_future(server.serve([listener])) for server, listener in pairs]
            while not self._listening() and not any(task.done() for task in running):
                await asyncio.sleep(0.01)
            addresses = [Address(*listener.getsockname()[:2]) for listener in listeners]
            log.info("listening metrics=%s otlp=%s", *addresses)
            # The first read makes /readyz independent of scrapers, and pushes are checked against the GPUs it finds.
            first = asyncio.ensure_future(self._scrape.collect())
            sweeping = asyncio.ensure_future(swept(first))
            await asyncio.wait([asyncio.ensure_future(stop.wait()), *running], return_when=asyncio.FIRST_COMPLETED)
            log.info("stopping")
            for task in (sweeping, first):
                task.cancel()
            for server in self._servers:
                server.end()
            await asyncio.gather(*running)
        finally:
            self._close()

    def _close(self) -> None:
        if self._forward is not None:
            self._forward.stop()
        # A reader with a hung driver takes a second to end; in parallel, all of them take no longer.
        closing = [threading.Thread(target=reader.close) for reader in self._readers]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()
        self._scrape.close()
        if isinstance(self._ledger, Embedded):
            self._ledger.close()


@contextlib.contextmanager
def _state_folder(settings: ExporterSettings) -> Iterator[Path]:
    """Yield --state if it is writable, else a temporary folder or, with an embedded ledger, raise SettingsError."""
    try:
        settings.state.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.state) as probe:
            probe.write(b"flopwatch")  # an empty file can be made on a full disk
            probe.flush()
    except OSError as error:
        problem = f"--state {settings.state} cannot be written: {error.strerror}"
        if settings.ledger == "embedded":
            raise SettingsError(f"{problem}; --ledger embedded needs it: choose another --state DIR") from None
        log.warning("%s: inventory and Xid counts will not survive a restart", problem)
        with tempfile.TemporaryDirectory(prefix="flopwatch-") as folder:
            yield Path(folder)
    else:
        with (settings.state / "exporter.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                # No error: the other one may be stuck in a driver for good, and then this one is needed most.
                log.warning("another exporter uses --state %s: end it, or give each its own folder", settings.state)
            yield settings.state


@contextlib.contextmanager
def _ticking(task: str, tick: Callable[[float], None], every: float) -> Iterator[None]:
    """Call `tick` with the Unix time every `every` seconds in a thread until the block ends, and log its errors."""
    ended = threading.Event()

    def loop() -> None:
        while not ended.wait(every):
            try:
                tick(time.time())
            except Exception:
                log.exception("periodic task failed task=%s", task)

    thread = threading.Thread(target=loop, name="tick", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=1)


def _inspector(settings: ExporterSettings, registry: Registry) -> Inspector | None:
    if not settings.inspector or settings.ledger == "off":
        return None
    from flopwatch.node.telemetry.inspector import INSPECTOR_STATE, Inspector  # likewise memory

    folder = None if settings.inspector == "otlp" else Path(settings.inspector)
    return Inspector(folder, settings.host, registry, StateFile(settings.state / INSPECTOR_STATE))


def _ledger(settings: ExporterSettings, registry: Registry) -> Embedded | Remote | None:
    if settings.ledger == "off":
        return None
    outcomes = Outcomes(registry)
    if settings.ledger == "embedded":
        from flopwatch.ledger.store import Store  # memory that an exporter without a ledger can save

        store = Store(settings.state / "ledger.sqlite", silent_after=settings.silent_after, new_for=settings.new_for)
        return Embedded(store, outcomes)
    return Remote(
        settings.ledger, settings.ledger_token_file, settings.state / "spool", outcomes, ca_file=settings.ledger_ca_file
    )


def _known_gpus(inventory: Path, runtime: Path) -> dict[str, str]:
    """Return the GPU's UUID by its own UUID and by those of its MIG slices. Missing GPUs are included."""
    known = {part["uuid"]: part["uuid"] for part in read_inventory(inventory, m.GPU_INFO).values()}
    slices = {str(mig.get("uuid")): uuid for uuid, about in read_runtime(runtime).items() for mig in about["mig"]}
    return {**known, **{mig: uuid for mig, uuid in slices.items() if uuid in known}}
