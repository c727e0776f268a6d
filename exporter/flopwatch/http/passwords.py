"""Passwords of HTTP basic authentication (RFC 7617), compared with bcrypt hashes."""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Any

import bcrypt

MAX_WAITING = 8  # passwords; hashes are computed one at a time, and further passwords are refused


class Passwords:
    """Check of passwords against bcrypt hashes, with a cache, because one hash takes 50 ms or more.

    The cache has a keyed digest of each user's last password, in memory only. Unknown users take as long as known ones.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._correct: dict[str, bytes] = {}
        self._limiter: Any = None
        self._waiting = 0

    async def check(self, users: Mapping[str, str], authorization: bytes) -> bool | None:
        """Return whether an Authorization header has a user's password, or None if too many passwords wait."""
        credentials = _credentials(authorization)
        if credentials is None:
            return False
        user, password = credentials
        stored = users.get(user)
        text = b"\0".join((user.encode(), (stored or "").encode(), password))
        digest = hmac.new(self._key, text, hashlib.sha256).digest()
        if stored is not None and hmac.compare_digest(self._correct.get(user, b""), digest):
            return True
        if self._waiting >= MAX_WAITING:
            return None
        # A hash that no password matches, with the cost of the first user's, takes as long as a known user's.
        none = f"{next(iter(users.values()))[:7]}{'.' * 53}"
        if not await self._hash(password, none if stored is None else stored) or stored is None:
            return False
        self._correct = {name: cached for name, cached in self._correct.items() if name in users} | {user: digest}
        return True

    async def _hash(self, password: bytes, stored: str) -> bool:
        import anyio
        from anyio import to_thread

        if self._limiter is None:
            self._limiter = anyio.CapacityLimiter(1)
        self._waiting += 1
        try:
            return await to_thread.run_sync(_same, password, stored, limiter=self._limiter)
        finally:
            self._waiting -= 1


def _same(password: bytes, stored: str) -> bool:
    try:
        # bcrypt uses 72 bytes of a password. This package refuses longer passwords, others truncate them.
        return bcrypt.checkpw(password[:72], stored.encode())
    except ValueError:
        return False


def _credentials(header: bytes) -> tuple[str, bytes] | None:
    """Return user and password of a Basic Authorization header (RFC 7617), or None if it is malformed."""
    scheme, _, encoded = header.partition(b" ")
    if scheme.lower() != b"basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon else None
    except ValueError:
        return None
