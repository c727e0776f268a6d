"""Passwords of HTTP basic authentication (RFC 7617), compared with bcrypt hashes."""

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from typing import Any

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
        digest = self._digest(user, stored or "", password)
        if stored is not None and hmac.compare_digest(self._correct.get(user, b""), digest):
            return True
        if self._waiting >= MAX_WAITING:
            return None
        right = await self._hash(password, stored if stored is not None else _like(users))
        if stored is None or not right:
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

    def _digest(self, user: str, stored: str, password: bytes) -> bytes:
        text = b"\0".join((user.encode(), stored.encode(), password))
        return hmac.new(self._key, text, hashlib.sha256).digest()


def _same(password: bytes, stored: str) -> bool:
    import bcrypt

    try:
        # bcrypt uses 72 bytes of a password. This package refuses longer passwords, others truncate them.
        return bcrypt.checkpw(password[:72], stored.encode())
    except ValueError:
        return False


def _like(users: Mapping[str, str]) -> str:
    """Return a bcrypt hash that no password matches, with the cost of the first user's hash."""
    return f"{next(iter(users.values()))[:7]}{'.' * 53}"


def _credentials(header: bytes) -> tuple[str, bytes] | None:
    """Return user and password of a Basic Authorization header (RFC 7617), or None if it is malformed."""
    scheme, _, encoded = header.partition(b" ")
    if scheme.lower() != b"basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon else None
    except (binascii.Error, ValueError):
        return None
