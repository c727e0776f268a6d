"""How one process of ours asks another over HTTP: by no proxy, and over TLS only whom a known authority vouches for."""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from flopwatch.settings import SettingsError

if TYPE_CHECKING:
    import httpx


def client(
    tls: ssl.SSLContext | None = None, *, timeout: float, headers: Mapping[str, str] | None = None
) -> httpx.Client:
    """Return an HTTP client that ignores the environment and follows no redirects; `timeout` is in seconds."""
    import httpx

    return httpx.Client(verify=tls or client_tls(None), trust_env=False, timeout=timeout, headers=headers)


def client_tls(ca_file: Path | None, cert_file: Path | None = None, key_file: Path | None = None) -> ssl.SSLContext:
    """Return how a server behind TLS is asked; without a CA file the system's authorities. Raises SettingsError."""
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file)
    except OSError as error:
        files = ", ".join(str(file) for file in (ca_file, cert_file, key_file) if file is not None)
        raise SettingsError(f"cannot use {files}: {error.strerror or error}") from None
    return context


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for the error that it is: the token would go along, to whatever host it names."""

    def redirect_request(self, *_: object) -> None:
        return None


def opener(tls: ssl.SSLContext | None = None) -> urllib.request.OpenerDirector:
    """Return what asks; a proxy from the environment would only hide who is inside the cluster."""
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=tls), _NoRedirect()
    )
