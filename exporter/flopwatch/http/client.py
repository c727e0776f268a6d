"""HTTP client between flopwatch processes: ignores proxies, follows no redirect, verifies server certificates."""

import functools
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flopwatch.settings import SettingsError

if TYPE_CHECKING:
    import httpx


def client_tls(ca_file: Path | None, cert_file: Path | None = None, key_file: Path | None = None) -> ssl.SSLContext:
    """Return a client's TLS context that trusts `ca_file`, or else the system's CAs. Raises SettingsError."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except OSError as error:
        files = ", ".join(str(file) for file in (ca_file, cert_file, key_file) if file is not None)
        raise SettingsError(f"cannot use {files}: {error.strerror or error}") from None
    return context


_system_tls = functools.cache(lambda: client_tls(None))


def url_tls(url: str, ca_file: Path | None) -> ssl.SSLContext:
    """Return the client's TLS context for a URL. For http:// it is empty, because loading CAs takes time."""
    return client_tls(ca_file) if url.startswith("https:") else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def client(
    tls: ssl.SSLContext | None = None, *, timeout: float, headers: Mapping[str, str] | None = None
) -> "httpx.Client":
    """Return an HTTP client for a `with` statement. `timeout` in seconds bounds each read and write.

    Requests raise httpx.HTTPError, or httpx.InvalidURL for a wrong URL. A redirect is returned as the response, because
    following it would send the token to another host.
    """
    import httpx  # not before the first request: saves an exporter without a remote ledger 3 MiB

    return httpx.Client(
        verify=_system_tls() if tls is None else tls,
        timeout=timeout,
        headers={"Accept-Encoding": "identity", **(headers or {})},
        trust_env=False,
        follow_redirects=False,
    )


def read(response: "httpx.Response", limit: int) -> bytes:
    """Return at most `limit` bytes of the body of a streamed response."""
    content = bytearray()
    for chunk in response.iter_bytes():
        content += chunk
        if len(content) >= limit:
            break
    return bytes(content[:limit])


def reason(error: BaseException) -> BaseException:
    """Return the OSError, such as that of a socket or of OpenSSL, behind an httpx error, or else the httpx error."""
    cause = error.__cause__ or error.__context__
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or cause.__context__
    return error if cause is None else cause
