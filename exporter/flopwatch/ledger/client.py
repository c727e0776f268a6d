"""HTTP client of a ledger's API."""

import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import msgspec

from flopwatch.http.client import client, client_tls, reason
from flopwatch.ledger.record import printable
from flopwatch.settings import SettingsError

_TIMEOUT = 30.0


class LedgerClient:
    """HTTP client of the ledger at `url`. Errors name `flags`, the command's options for URL and token file."""

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
            raise SettingsError(f"{self._url_flag} {url!r}: write http://HOST:PORT")
        self._url = url.rstrip("/")
        self._token_file = token_file
        self._tls = client_tls(ca_file)

    def runs(self) -> list[dict[str, Any]]:
        """Return one JSON object per run, with its state, attempts and goodput. Raises SettingsError."""
        return list(self._request("GET", "/v1/runs")["runs"])

    def record(self, run: str, tenant: str | None) -> dict[str, Any]:
        """Return a run's summary, buckets, attempts and incidents as one JSON object. Raises SettingsError.

        `tenant` may be None if only one tenant has a run of this name.
        """
        return self._request("GET", "/v1/runs/record", {"run": run} | ({} if tenant is None else {"tenant": tenant}))

    def close(self, run: str, tenant: str | None, status: str) -> dict[str, Any]:
        """End a run with a status, completed or stopped, and return its previous state. Raises SettingsError."""
        return self._request("POST", "/v1/runs/close", body={"run": run, "tenant": tenant, "status": status})

    def _request(
        self, method: str, path: str, query: Mapping[str, str] | None = None, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Send a request and return the JSON object in the answer. Raises SettingsError."""
        headers = {}
        if self._token_file is not None:
            try:
                headers["Authorization"] = f"Bearer {self._token_file.read_text().strip()}"
            except (OSError, ValueError) as error:
                raise SettingsError(f"{self._token_flag} {self._token_file}: {error}") from None
        try:
            with client(self._tls, timeout=_TIMEOUT, headers=headers) as http:
                response = http.request(method, f"{self._url}{path}", params=query, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self._unreachable(error) from None
        if not response.is_success:
            raise self._refused(response)
        try:
            return msgspec.json.decode(response.content, type=dict[str, Any])
        except (ValueError, RecursionError) as error:
            raise SettingsError(f"{self._url} does not answer as a ledger does: {error}") from None

    def _unreachable(self, error: Exception) -> SettingsError:
        if isinstance(cause := reason(error), ssl.SSLCertVerificationError):
            advice = f"set {self._ca_flag} to the CA that signed its certificate"
            return SettingsError(f"{self._url}: {str(cause).strip()}; {advice}")
        text = str(error) or type(error).__name__
        return SettingsError(
            f"{self._url_flag}: cannot reach a ledger at {self._url} ({text}); set {self._url_flag} to "
            "http://HOST:PORT, with port 9451 for a ledger or 9450 for an exporter with --ledger embedded"
        )

    def _refused(self, response: httpx.Response) -> SettingsError:
        code = response.status_code
        try:
            detail = printable(response.json()["detail"])
        except (ValueError, LookupError, TypeError, RecursionError):
            detail = ""
        if code == 401:
            wrong = "rejects the token" if self._token_file is not None else "requires a token"
            return SettingsError(f"{self._url} {wrong}: {detail}; set {self._token_flag} to the file with its token")
        if code == 404 and detail in ("", "Not Found"):
            return SettingsError(
                f"{self._url} is not a ledger, or one of an older flopwatch; an exporter is one with --ledger embedded"
            )
        if code in (404, 409) and detail:
            return SettingsError(detail.replace("; name the tenant", "; name the tenant with --tenant NAME"))
        return SettingsError(f"{self._url} answers {code}{detail and f': {detail}'}")
