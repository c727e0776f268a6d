"""One look at a node for `flopwatch check`: through the exporter that runs on it, else at the hardware itself.

What is printed and the exit status are those of a monitoring plugin
(https://nagios-plugins.org/doc/guidelines.html#AEN78) or of a node-problem-detector custom plugin
(https://github.com/kubernetes/node-problem-detector/blob/master/docs/custom_plugin_monitor.md).
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from prometheus_client.parser import text_string_to_metric_families

from flopwatch.catalogue import BY_NAME, FLOPWATCH_BUILD_INFO, FLOPWATCH_COLLECTOR_SUCCESS, Sample
from flopwatch.http.client import opener
from flopwatch.node.driver_release import Release
from flopwatch.node.health.rules import ACTIONS, BAD, DEGRADED, OK, UNKNOWN, Judgement
from flopwatch.node.health.state_copy import copied
from flopwatch.node.scrape.reader import Reader, SourcesFactory, hardware, host_sources
from flopwatch.settings import ExporterSettings

# The sources that a verdict is made of; who owns a GPU is not part of it.
SOURCES = ("nvml", "dcgm", "infiniband", "xid")
MAX_BYTES = 32 << 20

NAGIOS = {OK: 0, DEGRADED: 1, BAD: 2, UNKNOWN: 3}
NPD_OK, NPD_PROBLEM, NPD_UNKNOWN = 0, 1, 2
# What node-problem-detector takes of a message unless it is told otherwise (max_output_length).
NPD_LENGTH = 80

Look = Callable[[], list[Sample]]


class NobodyListens(Exception):
    """No exporter listens at the address."""


class CannotTell(Exception):
    """The node cannot be judged now; the text says why."""


def samples(exposition: str) -> list[Sample]:
    """Return the samples of the Prometheus text format that are of catalogue rows. Raises ValueError."""
    found: list[Sample] = []
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            row = BY_NAME.get(sample.name)
            if row is not None and row.type != "histogram":
                # Another release's exporter may not have every label.
                labels = tuple(sample.labels.get(label, "") for label in row.labels)
                found.append((row, labels, sample.value / row.scale))
    return found


def ask(
    url: str, deadline: float, tls: ssl.SSLContext | None = None, user: str = "", password: str = ""
) -> list[Sample]:
    """Return what an exporter says within `deadline` seconds. Raises NobodyListens and CannotTell."""
    until = time.monotonic() + deadline
    body = bytearray()
    try:
        request = urllib.request.Request(url, headers={"X-Prometheus-Scrape-Timeout-Seconds": f"{deadline:g}"})
        if user:
            credentials = base64.b64encode(f"{user}:{password}".encode()).decode()
            request.add_header("Authorization", f"Basic {credentials}")
        with opener(tls).open(request, timeout=deadline) as response:
            while chunk := response.read1(1 << 16):
                body += chunk
                if time.monotonic() > until:
                    raise CannotTell(f"{url} has not answered within {deadline:g} s")
                if len(body) > MAX_BYTES:
                    raise CannotTell(f"{url} answers with more than {MAX_BYTES} bytes")
        found = samples(body.decode())
    except urllib.error.HTTPError as error:
        with error:
            hint = (
                ""
                if error.code != 401
                else ("; the user or the password is wrong" if user else "; give --user and --password-file")
            )
            raise CannotTell(f"{url} answers {error.code} {error.reason}{hint}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ConnectionRefusedError):
            raise NobodyListens(f"nobody listens at {url}") from None
        raise CannotTell(f"{url}: {str(reason).strip()}{_hint(reason)}") from None
    # What is said last, so that half a page is not taken for a node with half its parts.
    if not any(row is FLOPWATCH_BUILD_INFO for row, _, _ in found):
        raise CannotTell(f"{url} is no flopwatch exporter, or was cut off: there is no {FLOPWATCH_BUILD_INFO}")
    return found


def _hint(reason: object) -> str:
    """Return what to do about a connection that did not come about."""
    if isinstance(reason, ssl.SSLCertVerificationError):
        return "; --ca-file says who signed its certificate"
    if isinstance(reason, ssl.SSLError) and "CERTIFICATE_REQUIRED" in str(reason):
        return "; it asks for a certificate: --cert-file and --key-file"
    if isinstance(reason, (http.client.HTTPException, ConnectionResetError)):
        return "; if it speaks TLS, give --url https://HOST:PORT/metrics"
    return ""


@contextmanager
def here(settings: ExporterSettings, deadline: float, sources: SourcesFactory = host_sources) -> Iterator[Look]:
    """Give a function that reads the hardware itself, each source within `deadline` seconds; it writes no state."""
    sources(settings)  # creates the simulated node, which is then copied
    with copied(settings) as beside:
        readers = [reader for reader in hardware(beside, sources(beside)) if reader.name in SOURCES]
        release = Release(settings.state, [reader for reader in readers if reader.driver], guest=True)
        release.check()
        with ThreadPoolExecutor(len(readers)) as pool:
            try:
                yield lambda: _read(readers, deadline, pool) + release.samples()
            finally:
                list(pool.map(lambda reader: reader.close(), readers))


def _read(readers: Sequence[Reader], deadline: float, pool: ThreadPoolExecutor) -> list[Sample]:
    # The first one finds the GPUs that the others name.
    first, *others = readers
    readings = [first.ask(deadline), *pool.map(lambda reader: reader.ask(deadline), others)]
    found: list[Sample] = []
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for reader, reading in zip(readers, readings, strict=True):
        own = {(row.name, labels[:2]) for row, labels, _ in reading.samples}
        found += [
            sample for sample in reading.samples if not (reader.secondary and (sample[0].name, sample[1][:2]) in seen)
        ]
        seen |= own
        if reading.supported:
            found.append((FLOPWATCH_COLLECTOR_SUCCESS, (reader.name,), float(reading.ok)))
    return found


def sentence(judgement: Judgement) -> str:
    """Return the worst reason and how many more there are, or what is there."""
    if not judgement.reasons:
        return f"{judgement.gpus} GPUs, {judgement.ports} active ports"
    more = len(judgement.reasons) - 1
    return f"{judgement.reasons[0]}{f'; and {more} more' if more else ''}"


def nagios(judgement: Judgement, verbose: bool = False) -> tuple[str, int]:
    """Return a monitoring plugin's output and exit status: 0 ok, 1 degraded, 2 bad, 3 unknown."""
    verdict = judgement.verdict
    line = f"{verdict.upper()} - {_one_line(sentence(judgement))} | gpus={judgement.gpus} ports={judgement.ports}"
    return "\n".join([line, *(_details(judgement) if verbose else ())]), NAGIOS[verdict]


def text(judgement: Judgement) -> tuple[str, int]:
    """Return the same for people: a line, and one for each reason."""
    head = f"{judgement.verdict}: {judgement.gpus} GPUs, {judgement.ports} active ports"
    return "\n".join([head, *_details(judgement)]), NAGIOS[judgement.verdict]


def _details(judgement: Judgement) -> list[str]:
    return [f"{reason.verdict}: {_one_line(str(reason))} [{reason.reason}]" for reason in judgement.reasons]


def _one_line(words: str) -> str:
    """Return a text in which nothing ends the line or begins the performance data."""
    return " ".join(words.replace("|", "/").split())


def npd(judgement: Judgement, fail_on: str = BAD) -> tuple[str, int]:
    """Return node-problem-detector's: a message of 80 bytes; 1 from this verdict on, 2 where it cannot be told."""
    verdict = judgement.verdict
    first = judgement.reasons[0].detail if judgement.reasons else sentence(judgement)
    message = f"{verdict}: {_one_line(first)}".encode("ascii", "replace")[:NPD_LENGTH].decode()
    if verdict in (BAD, fail_on):
        return message, NPD_PROBLEM
    return message, NPD_UNKNOWN if verdict == UNKNOWN else NPD_OK


def as_json(judgement: Judgement) -> tuple[str, int]:
    """Return everything, for programs, with the exit status of `nagios`."""
    content = {
        "verdict": judgement.verdict,
        "gpus": judgement.gpus,
        "ports": judgement.ports,
        "reasons": [reason._asdict() | {"what_to_do": ACTIONS[reason.action]} for reason in judgement.reasons],
    }
    return json.dumps(content, indent=2), NAGIOS[judgement.verdict]


def cannot_tell(why: str, form: str) -> tuple[str, int]:
    """Return the output and exit status of a check that came to nothing."""
    why = _one_line(why)
    if form == "npd":
        return f"unknown: {why}".encode("ascii", "replace")[:NPD_LENGTH].decode(), NPD_UNKNOWN
    if form == "json":
        content = json.dumps({"verdict": UNKNOWN, "gpus": None, "ports": None, "reasons": [], "why": why}, indent=2)
        return content, NAGIOS[UNKNOWN]
    return f"UNKNOWN - {why}" if form == "nagios" else f"unknown: {why}", NAGIOS[UNKNOWN]
