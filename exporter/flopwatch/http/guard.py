"""Protection of the HTTP servers against pages of other sites in a browser that can reach them.

A page may send requests anywhere, and with a name that it points at this server (DNS rebinding) it may also read the
responses. Programs such as Prometheus and the hook send none of the headers that only browsers send.
https://developer.mozilla.org/docs/Web/HTTP/Reference/Headers/Sec-Fetch-Site
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any

from starlette.responses import PlainTextResponse

from flopwatch.settings import Address

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[..., Any], Callable[..., Any]], Awaitable[None]]

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def own_names(address: Address, authenticated: bool) -> tuple[str, ...]:
    """Return the names under which clients may request a server at `address`. Empty: any name.

    Only a loopback address has known names. Authentication protects any name: another site's page has no credentials.
    """
    return (*LOOPBACK_NAMES, address.host) if address.loopback and not authenticated else ()


def guarded(app: App, names: Collection[str] = ()) -> App:
    """Return `app` without requests that a page of another site made, or whose Host header is not one of `names`."""

    async def guard(scope: Scope, receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        refused = None
        if scope["type"] == "http":
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
            refused = refusal(scope["method"], headers, names)
        if refused is None:
            await app(scope, receive, send)
        else:
            status, reason = refused
            await PlainTextResponse(f"{reason}\n", status)(scope, receive, send)

    return guard


def hostname(host: str) -> str:
    """Return the name in a Host header, in lower case and without port and brackets."""
    name = host[: host.index("]") + 1] if host.startswith("[") and "]" in host else host.partition(":")[0]
    return name.strip("[]").lower()


def refuses(method: str, headers: Mapping[str, str], names: Collection[str]) -> bool:
    """Return whether `guarded` refuses a request with this method and these headers, whose names are in lower case."""
    return refusal(method, headers, names) is not None


def refusal(method: str, headers: Mapping[str, str], names: Collection[str]) -> tuple[int, str] | None:
    """Return status and reason with which to refuse a request, or None. Names of headers are in lower case."""
    host = headers.get("host", "")
    if names and host and hostname(host) not in names:
        return 421, f"this server answers to {' or '.join(sorted(names))}, not to {host}"
    site = headers.get("sec-fetch-site", "")
    link = method == "GET" and headers.get("sec-fetch-mode") == "navigate"
    if site in ("cross-site", "same-site") and not link:
        return 403, "pages of other sites may not send requests to this server"
    # Browsers of before 2023 send Origin only.
    origin = headers.get("origin", "")
    if not site and origin and origin.partition("://")[2] != host:
        return 403, f"pages of {origin} may not send requests to this server"
    return None
