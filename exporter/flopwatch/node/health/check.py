"""Health check of a host for `flopwatch check`: reads the samples of its exporter or, without one, the hardware.

Output and exit status are those of a monitoring plugin (https://nagios-plugins.org/doc/guidelines.html#AEN78) or of
node-problem-detector (https://github.com/kubernetes/node-problem-detector/blob/master/docs/custom_plugin_monitor.md).
"""

import json
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

import httpx
from prometheus_client.parser import text_string_to_metric_families

from flopwatch.catalogue import BY_NAME, FLOPWATCH_BUILD_INFO, FLOPWATCH_COLLECTOR_SUCCESS, Sample
from flopwatch.http.client import client, reason, url_tls
from flopwatch.node.driver_release import Release
from flopwatch.node.health.rules import ACTIONS, BAD, DEGRADED, OK, UNKNOWN
from flopwatch.node.health.state_copy import copied
from flopwatch.node.health.verdict import Judgement
from flopwatch.node.scrape.reader import Reader, SourcesFactory, hardware, host_sources
from flopwatch.settings import ExporterSettings

SOURCES = ("nvml", "dcgm", "infiniband", "xid")  # of the verdict, which owners of GPUs do not change
MAX_BYTES = 32 << 20

NAGIOS = {OK: 0, DEGRADED: 1, BAD: 2, UNKNOWN: 3}
NPD_OK, NPD_PROBLEM, NPD_UNKNOWN = 0, 1, 2
NPD_LENGTH = 80  # bytes of a message: node-problem-detector's default max_output_length

Look = Callable[[], list[Sample]]


class NotListening(Exception):
    """Raised if no exporter listens at the URL."""


class CheckError(Exception):
    """Raised if the host cannot be judged now. Its message is the reason."""


def samples(exposition: str) -> list[Sample]:
    """Parse the samples of catalogue rows, except histograms, in the Prometheus text format. Raises ValueError."""
    found: list[Sample] = []
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            row = BY_NAME.get(sample.name)
            if row is not None and row.type != "histogram":
                # An exporter of another release may lack a label.
                labels = tuple(sample.labels.get(label, "") for label in row.labels)
                found.append((row, labels, sample.value / row.scale))
    return found


def ask(
    url: str, deadline: float, tls: ssl.SSLContext | None = None, user: str = "", password: str = ""
) -> list[Sample]:
    """Return the samples of one scrape of the exporter at `url`, which may take `deadline` seconds.

    Raises NotListening, or CheckError for other failures.
    """
    until = time.monotonic() + deadline
    body = bytearray()
    headers = {"X-Prometheus-Scrape-Timeout-Seconds": f"{deadline:g}"}
    auth = httpx.BasicAuth(user, password) if user else None
    try:
        with (
            client(tls or url_tls(url, None), timeout=deadline, headers=headers) as http,
            http.stream("GET", url, auth=auth) as answer,
        ):
            if not answer.is_success:
                wrong = "; the user or the password is wrong" if user else "; give --user and --password-file"
                hint = wrong if answer.status_code == 401 else ""
                raise CheckError(f"{url} answers {answer.status_code} {answer.reason_phrase}{hint}")
            for chunk in answer.iter_bytes():
                body += chunk
                if time.monotonic() > until:
                    raise CheckError(f"{url} has not answered within {deadline:g} s")
                if len(body) > MAX_BYTES:
                    raise CheckError(f"{url} answers with more than {MAX_BYTES} bytes")
        found = samples(body.decode())
    except (OSError, ValueError, httpx.HTTPError, httpx.InvalidURL) as error:
        cause = reason(error)
        if isinstance(cause, ConnectionRefusedError):
            raise NotListening(f"no exporter listens at {url}") from None
        raise CheckError(f"{url}: {str(cause).strip(' .')}{_hint(cause)}") from None
    # The last family of a page. Without it, a page that was cut off would look like a host with few parts.
    if not any(row is FLOPWATCH_BUILD_INFO for row, _, _ in found):
        raise CheckError(f"{url} is not a flopwatch exporter, or was cut off: there is no {FLOPWATCH_BUILD_INFO}")
    return found


def _hint(error: object) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return "; give the authority of its certificate with --ca-file"
    if isinstance(error, ssl.SSLError) and "CERTIFICATE_REQUIRED" in str(error):
        return "; it requires a certificate: --cert-file and --key-file"
    if isinstance(error, (httpx.RemoteProtocolError, ConnectionResetError)):
        return "; if it speaks TLS, give --url https://HOST:PORT/metrics"
    return ""


@contextmanager
def here(settings: ExporterSettings, deadline: float, sources: SourcesFactory = host_sources) -> Iterator[Look]:
    """Yield a function that reads this host's hardware with a copied state, each source within `deadline` seconds."""
    sources(settings)  # creates the simulated node, which is then copied
    with copied(settings) as copy:
        read = sources(copy)
        # NVML is read first and has then named its GPUs, so the others in the kernel log need no time for it.
        read = replace(read, xid=replace(read.xid, arguments={**read.xid.arguments, "strangers": "0"}))
        readers = [reader for reader in hardware(copy, read) if reader.name in SOURCES]
        release = Release(settings.state, [reader for reader in readers if reader.driver], guest=True)
        release.check()
        with ThreadPoolExecutor(len(readers)) as pool:
            try:
                yield lambda: _read(readers, deadline, pool) + release.samples()
            finally:
                list(pool.map(lambda reader: reader.close(), readers))


def _read(readers: Sequence[Reader], deadline: float, pool: ThreadPoolExecutor) -> list[Sample]:
    first, *others = readers
    readings = [first.ask(deadline), *pool.map(lambda reader: reader.ask(deadline), others)]
    found: list[Sample] = []
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for reader, reading in zip(readers, readings, strict=True):
        found += [
            sample for sample in reading.samples if not (reader.secondary and (sample[0].name, sample[1][:2]) in seen)
        ]
        seen |= {(row.name, labels[:2]) for row, labels, _ in reading.samples}
        if reading.supported:
            found.append((FLOPWATCH_COLLECTOR_SUCCESS, (reader.name,), float(reading.ok)))
    return found


def sentence(judgement: Judgement) -> str:
    """Return the worst reason and how many more there are, or for a healthy host its numbers of GPUs and ports."""
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
    """Return a report for people, one line per reason, and the exit status of `nagios`."""
    head = f"{judgement.verdict}: {judgement.gpus} GPUs, {judgement.ports} active ports"
    return "\n".join([head, *_details(judgement)]), NAGIOS[judgement.verdict]


def _details(judgement: Judgement) -> list[str]:
    return [f"{reason.verdict}: {_one_line(str(reason))} [{reason.reason}]" for reason in judgement.reasons]


def _one_line(words: str) -> str:
    """Return a text on one line, with `/` for `|`, which would start the performance data."""
    return " ".join(words.replace("|", "/").split())


def npd(judgement: Judgement, fail_on: str = BAD) -> tuple[str, int]:
    """Return a message (at most 80 bytes) and a status for node-problem-detector: 0 ok, 1 problem, 2 unknown."""
    verdict = judgement.verdict
    first = judgement.reasons[0].detail if judgement.reasons else sentence(judgement)
    message = f"{verdict}: {_one_line(first)}".encode("ascii", "replace")[:NPD_LENGTH].decode()
    if verdict in (BAD, fail_on):
        return message, NPD_PROBLEM
    return message, NPD_UNKNOWN if verdict == UNKNOWN else NPD_OK


def as_json(judgement: Judgement) -> tuple[str, int]:
    """Return the judgement as JSON, and the exit status of `nagios`."""
    content = {
        "verdict": judgement.verdict,
        "gpus": judgement.gpus,
        "ports": judgement.ports,
        "reasons": [reason._asdict() | {"what_to_do": ACTIONS[reason.action]} for reason in judgement.reasons],
    }
    return json.dumps(content, indent=2), NAGIOS[judgement.verdict]


def failed(why: str, form: str) -> tuple[str, int]:
    """Return output and exit status for a host that could not be judged. `form` is nagios, npd, json or text."""
    why = _one_line(why)
    if form == "npd":
        return f"unknown: {why}".encode("ascii", "replace")[:NPD_LENGTH].decode(), NPD_UNKNOWN
    if form == "json":
        content = json.dumps({"verdict": UNKNOWN, "gpus": None, "ports": None, "reasons": [], "why": why}, indent=2)
        return content, NAGIOS[UNKNOWN]
    return f"UNKNOWN - {why}" if form == "nagios" else f"unknown: {why}", NAGIOS[UNKNOWN]
