"""`flopwatch ledger list | show | close | export`: asks a ledger that runs, and prints for people, JSON or CSV.

Names in the answers are other people's: what a terminal or a spreadsheet would act on is made harmless.
"""

from __future__ import annotations

import csv
import http.client
import io
import json
import math
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from flopwatch.http.client import client_tls, opener
from flopwatch.ledger.accounting import BUCKETS
from flopwatch.ledger.replay import block
from flopwatch.settings import SettingsError

_TIMEOUT = 30.0
_LONGEST = 256 << 20  # bytes of an answer
_SHOWN = 10  # of the last attempts and incidents


class LedgerError(SettingsError):
    """The ledger cannot be asked, or has no answer; the message says why, and what to change."""


class Client:
    """A ledger at a URL; `flags` are what the user gave URL and token with."""

    def __init__(
        self,
        url: str,
        token_file: Path | None = None,
        flags: tuple[str, str] = ("--url", "--token-file"),
        ca_file: Path | None = None,
    ) -> None:
        self._url_flag, self._token_flag = flags
        self._ca_flag = self._token_flag.replace("token", "ca")
        if not url.startswith(("http://", "https://")):
            raise LedgerError(f"{self._url_flag} {url!r}: write http://HOST:PORT")
        self._url = url.rstrip("/")
        self._token_file = token_file
        self._opener = opener(None if ca_file is None else client_tls(ca_file))

    def runs(self) -> list[dict[str, Any]]:
        """Return a few figures of each run."""
        return list(self._ask("/v1/runs")["runs"])

    def record(self, run: str, tenant: str | None) -> dict[str, Any]:
        """Return the whole record of a run."""
        return self._ask("/v1/runs/record", query={"run": run} | ({} if tenant is None else {"tenant": tenant}))

    def close(self, run: str, tenant: str | None, status: str) -> dict[str, Any]:
        """End a run, and return what it was before."""
        return self._ask("/v1/runs/close", body={"run": run, "tenant": tenant, "status": status})

    def _ask(
        self, path: str, query: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        if self._token_file is not None:
            try:
                headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
            except (OSError, ValueError) as error:
                raise LedgerError(f"{self._token_flag} {self._token_file}: {error}") from None
        try:
            request = urllib.request.Request(
                f"{self._url}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else ""),
                None if body is None else json.dumps(body).encode(),
                headers,
            )
            with self._opener.open(request, timeout=_TIMEOUT) as response:
                answer = json.loads(response.read(_LONGEST))
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code, error.read(4096)) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", None) or error
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise LedgerError(
                    f"{self._url}: {str(reason).strip()}; {self._ca_flag} FILE says who signed its certificate"
                ) from None
            raise LedgerError(
                f"no ledger answers at {self._url}: {reason}; give its address with {self._url_flag} http://HOST:PORT "
                "(9451 of a ledger of its own, 9450 of an exporter with --ledger embedded)"
            ) from None
        except ValueError as error:
            raise LedgerError(f"{self._url} does not answer as a ledger does: {error}") from None
        if not isinstance(answer, dict):
            raise LedgerError(f"{self._url} does not answer as a ledger does")
        return answer

    def _refused(self, code: int, body: bytes) -> LedgerError:
        try:
            detail = str(json.loads(body)["detail"])
        except (ValueError, LookupError, TypeError):
            detail = ""
        if code == 401:
            wrong = "does not take the token" if self._token_file is not None else "wants a token"
            return LedgerError(f"{self._url} {wrong}: {plain(detail)}; {self._token_flag} FILE holds the ledger's")
        if code == 404 and detail in ("", "Not Found"):
            return LedgerError(
                f"{self._url} is no ledger, or one of an older flopwatch; an exporter is one with --ledger embedded"
            )
        if code in (404, 409) and detail:
            return LedgerError(plain(detail).replace("; say whose", "; say whose with --tenant NAME"))
        return LedgerError(f"{self._url} answers {code}{detail and f': {plain(detail)}'}")


def plain(text: object) -> str:
    """Return a text without what a terminal acts on."""
    return "".join(character if character.isprintable() else "?" for character in str(text))


def runs_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return a line per run, for people."""
    if not runs:
        return "no runs"
    several = any(run["tenant"] for run in runs)
    lines = [[*(["tenant"] if several else []), "run", "state", "attempts", "step", "goodput", "wall clock", "heard"]]
    for run in sorted(runs, key=lambda run: (run["tenant"], run["run"])):
        lines.append(
            [
                *([plain(run["tenant"])] if several else []),
                plain(run["run"]),
                run["state"] + (", two at once" if run["conflict"] else ""),
                str(run["attempts"]),
                _number(run["high_water_step"]),
                _ratio(run["goodput"]),
                _duration(run["wall_seconds"]),
                f"{_duration(run['silent_seconds'])} ago",
            ]
        )
    return _columns(lines)


def run_table(record: Mapping[str, Any]) -> str:
    """Return a run for people: where its time went, its last attempts and incidents."""
    name = f"{plain(record['tenant'])}/{record['run']}" if record["tenant"] else record["run"]
    summary = record["summary"]
    parts = [block(plain(name), {**summary, "buckets": record["buckets"]})]
    facts = [
        ("started", _time(record["start"])),
        ("step", _number(summary["high_water_step"])),
        (
            "last durable checkpoint",
            f"step {_number(summary['committed_step'])}, heard of {_time(summary['committed_timestamp'])}",
        ),
    ]
    if summary["recoveries"]:
        mean = summary["recovery_seconds"] / summary["recoveries"]
        facts.append(("mean time to recovery", f"{_duration(mean)}, of {summary['recoveries']}"))
    if summary["conflict"]:
        facts.append(("conflict", "two attempts report under this name; the one that started later is accounted for"))
    parts[0] += "".join(f"\n  {title}: {text}" for title, text in facts)
    causes = {one["attempt_number"]: one for one in record["incidents"] if one["kind"] == "end"}
    attempts = record["attempts"]
    if attempts:
        lines = [["attempt", "begin", "lasted", "ended", "steps", "GPUs", "nodes", "down after", "cause"]]
        for one in attempts[-_SHOWN:]:
            over = one["end"] if one["end"] is not None else record["at"]
            lines.append(
                [
                    f"{one['number']} {plain(one['attempt'])[:40]}",
                    _time(one["begin"]),
                    _duration(over - one["begin"]),
                    one["status"] or "-",
                    f"{_number(one['first_step'])} to {_number(one['last_step'])}",
                    _number(one["gpus"]),
                    str(one["nodes"]),
                    _duration(one["down_seconds"]),
                    _cause(causes.get(one["number"])),
                ]
            )
        before = len(attempts) + record["attempts_left_out"] - len(lines) + 1
        parts.append(_columns(lines) + (f"\n({before} before these)" if before else ""))
    losses = []
    for one in record["incidents"][-_SHOWN:]:
        lost = f"{one['gpu_seconds'] / 3600:.2f} GPU-hours lost{'' if one['settled'] else ' so far'}"
        losses.append(f"attempt {one['attempt_number']} {_what(one)}: {_cause(one)}, {lost}; {plain(one['why'])}")
    if losses:
        parts.append("\n".join(losses))
    return "\n\n".join(parts)


def attempts_csv(record: Mapping[str, Any]) -> str:
    """Return a row per attempt."""
    buckets = [bucket for bucket in BUCKETS if bucket not in ("down", "queue")]
    facts = (
        "number",
        "attempt",
        "begin",
        "end",
        "status",
        "first_step",
        "last_step",
        "committed_step",
        "gpus",
        "nodes",
    )
    after = ("down_seconds", "down_gpu_seconds", "recovery_seconds")
    blame = ("cause", "confidence", "host", "gpu", "port")
    output = io.StringIO()
    writer = csv.writer(output, lineterminator="\n")
    writer.writerow(
        [
            "tenant",
            "run",
            *facts,
            *(f"{bucket}_seconds" for bucket in buckets),
            "gpu_seconds",
            *after,
            *(f"incident_{name}" for name in blame),
            "incident_gpu_seconds",
            "slow_gpu_seconds",
            "stall_gpu_seconds",
        ]
    )
    incidents = {one["attempt_number"]: one for one in record["incidents"] if one["kind"] == "end"}
    for one in record["attempts"]:
        incident = incidents.get(one["number"], {})
        row = [
            record["tenant"],
            record["run"],
            *(one[name] for name in facts),
            *(one["seconds"].get(bucket, 0.0) for bucket in buckets),
            sum(one["gpu_seconds"].values()),
            *(one[name] for name in after),
            *(incident.get(name) for name in (*blame, "gpu_seconds")),
            *(
                math.fsum(
                    loss["gpu_seconds"]
                    for loss in record["incidents"]
                    if (loss["kind"], loss["attempt_number"]) == (kind, one["number"])
                )
                for kind in ("slow", "stall")
            ),
        ]
        writer.writerow(map(_cell, row))
    return output.getvalue()


def _cell(value: object) -> object:
    """Return a cell that no spreadsheet takes for a formula (https://owasp.org/www-community/attacks/CSV_Injection)."""
    if not isinstance(value, str):
        return value
    text = plain(value)
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text


def _what(incident: Mapping[str, Any]) -> str:
    """Return what happened, as for "attempt 3 ..."."""
    if incident["kind"] == "end":
        return str(incident["status"])
    since = f"{_duration(incident['ended'] - incident['began'])} from {_time(incident['began'])} on"
    return f"was slow for {since}" if incident["kind"] == "slow" else f"stood still for {since}"


def _cause(incident: Mapping[str, Any] | None) -> str:
    if incident is None:
        return ""
    place = " ".join(incident[name] for name in ("host", "gpu", "port") if incident[name])
    sure = "" if incident["confidence"] in ("certain", "none") else f" ({incident['confidence']})"
    return plain(f"{incident['cause']}{sure}{f' on {place}' if place else ''}")


def _columns(lines: Iterable[Sequence[str]]) -> str:
    rows = list(lines)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.15g}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _time(value: float | None) -> str:
    if value is None:
        return "-"
    try:
        return f"{datetime.fromtimestamp(value, timezone.utc):%Y-%m-%d %H:%M:%S}Z"
    except (OverflowError, ValueError, OSError):
        return f"{value:.0f}"


def _duration(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
