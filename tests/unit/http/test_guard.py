"""Requests that only a page of another site makes are refused by every HTTP server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from flopwatch.http.guard import LOOPBACK_NAMES, guarded, hostname, own_names
from flopwatch.settings import Address


def status(method: str = "GET", names: tuple[str, ...] = LOOPBACK_NAMES, **headers: str) -> int:
    """Return the status of a guarded application that answers 204 to any request with these headers."""
    sent: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            sent.append(message["status"])

    fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope: dict[str, Any] = {"type": "http", "method": method, "headers": fields}

    async def request() -> None:
        await guarded(app, names)(scope, receive, send)

    asyncio.run(request())
    (found,) = sent
    return found


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", 204),
        ("LOCALHOST:9450", 204),
        ("127.0.0.1:9450", 204),
        ("[::1]:9450", 204),
        ("evil.example", 421),
        ("127.0.0.1.evil.example:9450", 421),
        ("[::2]", 421),
    ],
)
def test_on_loopback_only_loopback_names_are_answered(host: str, expected: int) -> None:
    assert status(host=host) == expected
    assert status(host=host, names=()) == 204


def test_a_program_that_sends_no_header_of_browsers_is_answered() -> None:
    assert status() == 204
    assert status("POST", host="127.0.0.1:9450") == 204


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_may_only_link(site: str) -> None:
    assert status(host="localhost", sec_fetch_site=site, sec_fetch_mode="no-cors") == 403
    assert status(host="localhost", sec_fetch_site=site) == 403
    assert status("POST", host="localhost", sec_fetch_site=site, sec_fetch_mode="navigate") == 403
    assert status(host="localhost", sec_fetch_site=site, sec_fetch_mode="navigate") == 204


@pytest.mark.parametrize("site", ["same-origin", "none"])
def test_own_pages_and_addresses_that_are_typed_in_are_answered(site: str) -> None:
    assert status("POST", host="localhost", sec_fetch_site=site, origin="http://localhost") == 204


@pytest.mark.parametrize(
    ("origin", "expected"),
    [("http://localhost:9450", 204), ("https://evil.example", 403), ("null", 403), ("http://localhost:3000", 403)],
)
def test_browsers_that_send_origin_only_are_judged_by_it(origin: str, expected: int) -> None:
    assert status("POST", host="localhost:9450", origin=origin) == expected


def test_only_a_loopback_address_without_authentication_has_known_names() -> None:
    assert own_names(Address("127.0.0.1", 1), authenticated=False) == (*LOOPBACK_NAMES, "127.0.0.1")
    assert own_names(Address("127.0.0.1", 1), authenticated=True) == ()
    assert own_names(Address("0.0.0.0", 1), authenticated=False) == ()


@pytest.mark.parametrize(
    ("host", "name"), [("A:1", "a"), ("[::1]:1", "::1"), ("[::1]", "::1"), ("", ""), ("[", ""), ("a", "a")]
)
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    assert hostname(host) == name
