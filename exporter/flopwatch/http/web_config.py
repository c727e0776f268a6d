"""TLS and users of a listener: the web configuration file of Prometheus' exporters.

Format: https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md. As there, everything the
file names is taken anew when it changes, for the next connection and the next request; only TLS itself cannot be
turned on or off in a running process, and what asked who comes cannot begin to let everybody in: an editor empties a
file before it writes it. A change that cannot be used is logged, and what was there before stays.

What Python's `ssl` cannot do is refused by name: client certificates that nobody verifies, client_allowed_sans,
curve_preferences, TLS below 1.2, certificates inside the file. http2 and prefer_server_cipher_suites change nothing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import importlib
import logging
import os
import re
import secrets
import ssl
import threading
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flopwatch.settings import SettingsError

if TYPE_CHECKING:
    import uvicorn
    from yaml.nodes import Node

log = logging.getLogger(__name__)

CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
# Go's names of the suites below TLS 1.3 that it calls secure, and OpenSSL's; those of TLS 1.3 are not configurable.
_CIPHERS = {
    f"TLS_ECDHE_{key}_WITH_{go}": f"ECDHE-{key}-{openssl}"
    for key in ("RSA", "ECDSA")
    for go, openssl in (
        ("AES_128_GCM_SHA256", "AES128-GCM-SHA256"),
        ("AES_256_GCM_SHA384", "AES256-GCM-SHA384"),
        ("CHACHA20_POLY1305_SHA256", "CHACHA20-POLY1305"),
        ("AES_128_CBC_SHA", "AES128-SHA"),
        ("AES_256_CBC_SHA", "AES256-SHA"),
    )
}
_HEADERS: dict[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}
_BCRYPT = re.compile(r"\$2[aby]\$([0-9]{2})\$[./A-Za-z0-9]{53}")
# Twice the time for each more; 10 takes 50 ms.
MIN_COST, MAX_COST = 4, 16

# Passwords that wait to be hashed; one is hashed at a time, and more than this are turned away.
MAX_WAITING = 8

_UNSUPPORTED = {
    "cert": "put the certificate into a file and name it with cert_file",
    "key": "put the key into a file and name it with key_file",
    "client_ca": "put the certificates into a file and name it with client_ca_file",
    "client_allowed_sans": "Python's ssl cannot check it; sign client certificates with a CA of their own instead",
    "curve_preferences": "Python's ssl cannot set it; leave it out",
}


@dataclass(frozen=True, slots=True)
class Tls:
    """How connections are encrypted, and whether clients show certificates."""

    cert_file: Path
    key_file: Path
    client_auth: ssl.VerifyMode = ssl.CERT_NONE
    client_ca_file: Path | None = None
    min_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_2
    max_version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    ciphers: str = ""

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files that it is made of."""
        files = (self.cert_file, self.key_file, self.client_ca_file)
        return tuple(file for file in files if file is not None)

    def context(self) -> ssl.SSLContext:
        """Return what connections are made with. Raises SettingsError where the files are not what they should be."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version, context.maximum_version = self.min_version, self.max_version
        for key, file in (("cert_file", self.cert_file), ("key_file", self.key_file)):
            _readable(key, file)
        try:
            if self.ciphers:
                context.set_ciphers(self.ciphers)
            # An empty password instead of a prompt on the terminal.
            context.load_cert_chain(self.cert_file, self.key_file, password="")
        except OSError as error:
            raise SettingsError(
                f"cert_file {self.cert_file} and key_file {self.key_file} cannot be used together: "
                f"{getattr(error, 'reason', None) or error}"
            ) from None
        if self.client_ca_file is not None:
            _readable("client_ca_file", self.client_ca_file)
            try:
                context.load_verify_locations(self.client_ca_file)
            except OSError as error:
                reason = getattr(error, "reason", None) or error
                raise SettingsError(f"client_ca_file {self.client_ca_file}: {reason}") from None
        context.verify_mode = self.client_auth
        return context


@dataclass(frozen=True, slots=True)
class WebConfig:
    """What a web configuration file says."""

    tls: Tls | None = None
    users: Mapping[str, str] = field(default_factory=dict, repr=False)  # bcrypt hashes by user
    headers: tuple[tuple[str, str], ...] = ()

    def asks_who(self) -> bool:
        """Return whether not everybody may come in."""
        return bool(self.users) or (self.tls is not None and self.tls.client_auth is ssl.CERT_REQUIRED)


def parse(text: str, base: Path = Path()) -> WebConfig:
    """Return the configuration in a YAML text, file names relative to `base`. Raises SettingsError."""
    root = _Mapping("", _compose(text))
    root.only("tls_server_config", "http_server_config", "basic_auth_users", "rate_limit")
    if "rate_limit" in root:
        raise root.error("rate_limit", "is not supported; a scrape within a second of another shares its answer")
    http = root.mapping("http_server_config")
    http.only("http2", "headers")
    http.choice("http2", ("true", "false"))
    return WebConfig(
        _tls(root.mapping("tls_server_config"), base),
        _users(root.mapping("basic_auth_users")),
        _headers(http.mapping("headers")),
    )


def _tls(given: _Mapping, base: Path) -> Tls | None:
    given.only(
        "cert_file",
        "key_file",
        "client_auth_type",
        "client_ca_file",
        "min_version",
        "max_version",
        "cipher_suites",
        "prefer_server_cipher_suites",
        *_UNSUPPORTED,
    )
    for key, instead in _UNSUPPORTED.items():
        if key in given:
            raise given.error(key, f"is not supported: {instead}")
    given.choice("prefer_server_cipher_suites", ("true", "false"))
    files = {key: given.text(key) for key in ("cert_file", "key_file", "client_ca_file")}
    auth = given.choice("client_auth_type", CLIENT_AUTH) or "NoClientCert"
    lowest = VERSIONS[given.choice("min_version", VERSIONS) or "TLS12"]
    highest = VERSIONS[given.choice("max_version", VERSIONS) or "TLS13"]
    if not given.keys:
        return None
    for key in ("cert_file", "key_file"):
        if not files[key]:
            raise SettingsError(f"tls_server_config: {key} is missing")
    if lowest > highest:
        raise given.error("min_version", "is above max_version")
    if files["client_ca_file"] and auth == "NoClientCert":
        raise given.error("client_ca_file", "has no effect without client_auth_type: RequireAndVerifyClientCert")
    if not files["client_ca_file"] and auth != "NoClientCert":
        raise given.error("client_auth_type", f"{auth} needs a client_ca_file to verify with")
    return Tls(
        base / files["cert_file"],
        base / files["key_file"],
        CLIENT_AUTH[auth],
        base / files["client_ca_file"] if files["client_ca_file"] else None,
        lowest,
        highest,
        ":".join(_CIPHERS[suite] for suite in given.choices("cipher_suites", _CIPHERS)),
    )


def _users(given: _Mapping) -> dict[str, str]:
    users = {}
    for user in given.keys:
        match = _BCRYPT.fullmatch(given.text(user))
        if ":" in user or not user:
            raise given.error(user, "is no user name: it is empty or has a colon")
        if match is None:
            raise given.error(user, "has no bcrypt hash; make one with: htpasswd -nBC 10 USER")
        if not MIN_COST <= int(match[1]) <= MAX_COST:
            raise given.error(user, f"has a hash of cost {match[1]}; make one of cost {MIN_COST} to {MAX_COST}")
        users[user] = match[0]
    return users


def _headers(given: _Mapping) -> tuple[tuple[str, str], ...]:
    given.only(*_HEADERS)
    headers = []
    for name in given.keys:
        value = given.choice(name, _HEADERS[name]) if _HEADERS[name] else given.text(name)
        if not re.fullmatch(r"[\x20-\x7e]*", value):
            raise given.error(name, "is not one line of ASCII")
        headers += [(name, value)] if value else []
    return tuple(headers)


def _compose(text: str) -> Node | None:
    """Return the nodes of a YAML document, without making objects of them. Raises SettingsError."""
    try:
        import yaml
    except ImportError:
        raise SettingsError("--web-config needs PyYAML and bcrypt; install flopwatch[exporter]") from None
    try:
        return yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        # Without the words it quotes from the file, one of which may be a secret.
        problem = re.sub(r" '.{2,}'", "", str(error.problem or error.context))
        raise SettingsError(f"line {line} is not YAML: {problem}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"this is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SettingsError("this is not a web configuration: it is nested too deeply") from None


class _Mapping:
    """A YAML mapping, whose mistakes are told with key and line."""

    def __init__(self, name: str, node: Node | None) -> None:
        from yaml import MappingNode, ScalarNode

        self._name = name
        self._nodes: dict[str, Node] = {}
        if node is None or (isinstance(node, ScalarNode) and node.value in ("", "~", "null")):
            return
        if not isinstance(node, MappingNode):
            raise SettingsError(f"line {node.start_mark.line + 1}: write {name or 'the file'} as keys with values")
        for key, value in node.value:
            if not isinstance(key, ScalarNode):
                raise SettingsError(f"line {key.start_mark.line + 1}: a key is not a plain word")
            if key.value in self._nodes:
                raise self.error(str(key.value), "is there twice", value)
            self._nodes[str(key.value)] = value

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys that are given."""
        return tuple(self._nodes)

    def __contains__(self, key: str) -> bool:
        return key in self._nodes

    def error(self, key: str, problem: str, node: Node | None = None) -> SettingsError:
        """Return what to raise about a key; never with its value, which may be a secret."""
        node = self._nodes[key] if node is None else node
        where = f"{self._name}: " if self._name else ""
        return SettingsError(f"line {node.start_mark.line + 1}: {where}{key} {problem}")

    def only(self, *known: str) -> None:
        """Raise SettingsError for a key that is not one of these."""
        for key in self._nodes:
            if key not in known:
                raise self.error(key, f"is not known; here may be {', '.join(known)}")

    def mapping(self, key: str) -> _Mapping:
        """Return the mapping below a key, an empty one where there is none."""
        return _Mapping(key, self._nodes.get(key))

    def text(self, key: str) -> str:
        """Return the plain value of a key, empty where there is none."""
        from yaml import ScalarNode

        node = self._nodes.get(key)
        if node is None:
            return ""
        if not isinstance(node, ScalarNode):
            raise self.error(key, "is not a plain value")
        return str(node.value)

    def choice(self, key: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
        """Return a value that must be one of those known; empty where there is none."""
        value = self.text(key)
        if value and value not in known:
            raise self.error(key, f"must be one of {', '.join(known)}")
        return value

    def choices(self, key: str, known: Mapping[str, object]) -> list[str]:
        """Return a list of such values."""
        from yaml import ScalarNode, SequenceNode

        node = self._nodes.get(key)
        if node is None:
            return []
        if not isinstance(node, SequenceNode) or not all(isinstance(item, ScalarNode) for item in node.value):
            raise self.error(key, "is not a list of names")
        for item in node.value:
            if item.value not in known:
                raise self.error(key, f"may have {', '.join(known)}", item)
        return [str(item.value) for item in node.value]


def _readable(key: str, file: Path) -> None:
    try:
        with file.open("rb"):
            pass
    except OSError as error:
        raise SettingsError(f"{key} {file}: {error.strerror}") from None


Signature = tuple[tuple[int, int, int] | None, ...]


def _signature(files: tuple[Path, ...]) -> Signature:
    """Return what changes when one of the files is replaced or written."""
    return tuple(_stat(file) for file in files)


def _stat(file: Path) -> tuple[int, int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


# https://asgi.readthedocs.io/en/latest/specs/www.html
Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Web:
    """A web configuration file in use: `protect` an application, `secure` its server.

    Raises SettingsError, with what to change, for a file that cannot be used.
    """

    def __init__(self, file: Path, flag: str = "--web-config") -> None:
        self._name = f"{flag} {file}"
        self._file = file
        self._lock = threading.Lock()
        self._passwords = Passwords()
        self.config, self.context = self._read()

    def _read(self) -> tuple[WebConfig, ssl.SSLContext | None]:
        # What the files look like is noted before each is read, so that a change in between is not missed; and where
        # they cannot be used as well, so that this is said once.
        self._files: tuple[Path, ...] = (self._file,)
        self._seen = _signature(self._files)
        try:
            config = parse(self._file.read_text(errors="replace"), self._file.parent)
            if config.users:
                importlib.import_module("bcrypt")  # missing, it is missed at the start and not at the first password
            if config.tls is None:
                return config, None
            self._files += config.tls.files
            self._seen += _signature(config.tls.files)
            return config, config.tls.context()
        except OSError as error:
            raise SettingsError(f"{self._name}: {error.strerror}") from None
        except ImportError:
            raise SettingsError("--web-config needs PyYAML and bcrypt; install flopwatch[exporter]") from None
        except SettingsError as error:
            raise SettingsError(f"{self._name}: {error}") from None

    def refresh(self) -> None:
        """Take what changed in the files; safe in any thread."""
        with self._lock:
            if _signature(self._files) == self._seen:
                return
            try:
                config, context = self._read()
            except SettingsError as error:
                log.error("%s; what was there before stays in use", error)
                return
            if (context is None) != (self.context is None):
                log.error("%s: TLS is turned on or off by a restart only", self._name)
                return
            if self.config.asks_who() and not config.asks_who():
                log.error("%s: it would let everybody in; what was there before stays until a restart", self._name)
                return
            self.config, self.context = config, context
            log.info("%s: taken anew", self._name)

    def secure(self, config: uvicorn.Config) -> None:
        """Let a server encrypt its connections, if the file says so."""
        if self.context is None:
            return
        if not config.loaded:
            config.load()
        config.ssl = _Fresh(self)

    def protect(self, app: App, own: str | None = None) -> App:
        """Return the application behind its users, with the headers added to its answers.

        Below the path `own` it asks for a token itself, and a request has only one Authorization header.
        """

        async def protected(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            self.refresh()
            config = self.config
            send = _with_headers(send, config.headers)
            allowed: bool | None = True
            if config.users and (own is None or not str(scope["path"]).startswith(own)):
                allowed = await self._passwords.check(config.users, _authorization(scope))
            if allowed:
                await app(scope, receive, send)
            elif allowed is None:
                await _answer(send, 503, b"Too many passwords to check\n", (b"retry-after", b"1"))
            else:
                await _answer(send, 401, b"Unauthorized\n", (b"www-authenticate", b"Basic"))

        return protected


class _Fresh(ssl.SSLContext):
    """A context whose every new connection is made with the newest certificates.

    asyncio asks the context it was given for each connection's `wrap_bio`.
    """

    _web: Web

    def __new__(cls, web: Web) -> _Fresh:
        return super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)

    def __init__(self, web: Web) -> None:
        self._web = web

    def wrap_bio(self, *arguments: Any, **keywords: Any) -> ssl.SSLObject:
        """Begin a connection."""
        self._web.refresh()
        assert self._web.context is not None
        return self._web.context.wrap_bio(*arguments, **keywords)


class Passwords:
    """Compares passwords with bcrypt hashes, which takes 50 ms and more each; what was right once is remembered.

    What is remembered is a keyed digest of user, hash and password, one for each user, in memory only. A user that
    does not exist takes as long as one that does.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._right: dict[str, bytes] = {}
        self._limiter: Any = None
        self._waiting = 0

    async def check(self, users: Mapping[str, str], authorization: bytes) -> bool | None:
        """Return whether the header carries a user's password; None if too many passwords wait to be checked."""
        credentials = _credentials(authorization)
        if credentials is None:
            return False
        user, password = credentials
        stored = users.get(user)
        digest = self._digest(user, stored or "", password)
        if stored is not None and hmac.compare_digest(self._right.get(user, b""), digest):
            return True
        if self._waiting >= MAX_WAITING:
            return None
        right = await self._hash(password, stored if stored is not None else _like(users))
        if stored is None or not right:
            return False
        self._right = {known: kept for known, kept in self._right.items() if known in users} | {user: digest}
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
        # bcrypt has no more than 72 bytes of a password; this package refuses longer ones where others cut them.
        return bcrypt.checkpw(password[:72], stored.encode())
    except ValueError:
        return False


def _like(users: Mapping[str, str]) -> str:
    """Return a hash of nobody's password that takes as long to compare as those of the users."""
    return f"{next(iter(users.values()))[:7]}{'.' * 53}"


def _authorization(scope: Scope) -> bytes:
    found = [bytes(value) for name, value in scope["headers"] if name == b"authorization"]
    return found[0] if len(found) == 1 else b""


def _credentials(header: bytes) -> tuple[str, bytes] | None:
    """Return the user and the password in a Basic authorization: RFC 7617."""
    scheme, _, encoded = header.partition(b" ")
    if scheme.lower() != b"basic":
        return None
    try:
        user, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
        return (user.decode(), password) if colon else None
    except (binascii.Error, ValueError):
        return None


def _with_headers(send: Send, headers: tuple[tuple[str, str], ...]) -> Send:
    if not headers:
        return send
    added = [(name.lower().encode(), value.encode()) for name, value in headers]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return sending


async def _answer(send: Send, status: int, body: bytes, *headers: tuple[bytes, bytes]) -> None:
    length = (b"content-length", str(len(body)).encode())
    kind = (b"content-type", b"text/plain; charset=utf-8")
    await send({"type": "http.response.start", "status": status, "headers": [kind, length, *headers]})
    await send({"type": "http.response.body", "body": body})
