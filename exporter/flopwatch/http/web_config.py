"""TLS and authentication of a listener: the web configuration file of Prometheus' exporters.

Format: https://github.com/prometheus/exporter-toolkit/blob/master/docs/web-configuration.md. As in these exporters, the
file and the files it names are reloaded when they change, at the next connection or request. A reload never turns TLS
on or off and never disables authentication, because editors truncate a file before writing it. Options that Python's
`ssl` lacks are errors. http2 and prefer_server_cipher_suites have no effect.
"""

import logging
import os
import re
import ssl
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yaml.nodes import MappingNode, Node, SequenceNode

from flopwatch.catalogue.xid import read_table
from flopwatch.http.passwords import Passwords
from flopwatch.settings import SettingsError

if TYPE_CHECKING:
    import uvicorn
    from pydantic_core import ErrorDetails

log = logging.getLogger(__name__)

Loc = tuple[int | str, ...]  # keys and indices from the root of the file to a value

CLIENT_AUTH = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}
VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
# OpenSSL's names of the secure suites below TLS 1.3, by Go's names. Suites of TLS 1.3 are not configurable.
_CIPHERS = {row["go"]: row["openssl"] for row in read_table("tls_cipher_suites.csv")}
_HEADERS: dict[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-Content-Type-Options": ("nosniff",),
    "X-XSS-Protection": (),
    "Strict-Transport-Security": (),
}
_BCRYPT = re.compile(r"\$2[aby]\$([0-9]{2})\$[./A-Za-z0-9]{53}")
MIN_COST, MAX_COST = 4, 16  # of a bcrypt hash; each step doubles its time, and a cost of 10 takes 50 ms
MAX_DEPTH = 3  # of keys and indices


_NOTHING = ("", "~", "null")  # null in YAML, or a key without a value
_Flag = Literal["", "true", "false"]


class _Section(BaseModel):
    """Section of the file. `unsupported` maps each key that flopwatch rejects to the advice at the error's end."""

    model_config = ConfigDict(defer_build=True)
    unsupported: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, value: Any) -> Any:
        value = {} if value in _NOTHING else value
        for key in value if isinstance(value, dict) else ():
            if key in cls.unsupported:
                raise _wrong(key, f"is not supported{cls.unsupported[key]}")
            if key not in cls.model_fields:
                raise _wrong(key, f"is not known; here may be {', '.join((*cls.model_fields, *cls.unsupported))}")
        return value


# A file name, which starts at the folder of the web configuration file.
_File = Annotated[str, AfterValidator(lambda name, info: str(info.context / name) if name else "")]


class Tls(_Section):
    """TLS settings of a listener, with the verification of client certificates. An empty section means no TLS."""

    unsupported = {
        "cert": ": put the certificate into a file and name it with cert_file",
        "key": ": put the key into a file and name it with key_file",
        "client_ca": ": put the certificates into a file and name it with client_ca_file",
        "client_allowed_sans": ": Python's ssl cannot check it; "
        "sign client certificates with a CA of their own instead",
        "curve_preferences": ": Python's ssl cannot set it; leave it out",
    }
    cert_file: _File = ""
    key_file: _File = ""
    client_auth_type: Literal["", "NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = ""
    client_ca_file: _File = ""
    min_version: Literal["", "TLS12", "TLS13"] = ""
    max_version: Literal["", "TLS12", "TLS13"] = ""
    cipher_suites: list[str] = []
    prefer_server_cipher_suites: _Flag = ""

    @model_validator(mode="after")
    def _consistent(self) -> "Tls":
        if not _CIPHERS.keys() >= set(self.cipher_suites):
            raise _wrong("cipher_suites", f"may have {', '.join(_CIPHERS)}")
        for key in ("cert_file", "key_file") if self.model_fields_set else ():
            if not getattr(self, key):
                raise ValueError(f"{key} is missing")
        auth = self.client_auth_type or "NoClientCert"
        if (self.min_version or "TLS12") > (self.max_version or "TLS13"):
            raise _wrong("min_version", "is above max_version")
        if self.client_ca_file and auth == "NoClientCert":
            raise _wrong("client_ca_file", "has no effect without client_auth_type: RequireAndVerifyClientCert")
        if not self.client_ca_file and auth != "NoClientCert":
            raise _wrong("client_auth_type", f"{auth} needs a client_ca_file to verify with")
        return self

    @property
    def files(self) -> tuple[Path, ...]:
        """Return the files with certificates and keys: certificate, key and, if given, the clients' CA."""
        return tuple(Path(file) for file in (self.cert_file, self.key_file, self.client_ca_file) if file)

    def context(self) -> ssl.SSLContext:
        """Return the listener's TLS context. Raises SettingsError if a file cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSIONS[self.min_version or "TLS12"]
        context.maximum_version = VERSIONS[self.max_version or "TLS13"]
        for key, file in zip(("cert_file", "key_file", "client_ca_file"), self.files, strict=False):
            try:
                file.open("rb").close()
            except OSError as error:
                raise SettingsError(f"{key} {file}: {error.strerror}") from None
        try:
            if self.cipher_suites:
                context.set_ciphers(":".join(_CIPHERS[suite] for suite in self.cipher_suites))
            # An empty password instead of a prompt on the terminal.
            context.load_cert_chain(self.cert_file, self.key_file, password="")
        except OSError as error:
            raise SettingsError(
                f"cert_file {self.cert_file} and key_file {self.key_file} cannot be used together: "
                f"{getattr(error, 'reason', None) or error}"
            ) from None
        if self.client_ca_file:
            try:
                context.load_verify_locations(self.client_ca_file)
            except OSError as error:
                reason = getattr(error, "reason", None) or error
                raise SettingsError(f"client_ca_file {self.client_ca_file}: {reason}") from None
        context.verify_mode = CLIENT_AUTH[self.client_auth_type or "NoClientCert"]
        return context


def _checked_users(users: dict[str, str]) -> dict[str, str]:
    for user, stored in users.items():
        match = _BCRYPT.fullmatch(stored)
        if ":" in user or not user:
            raise _wrong(user, "is no user name: it is empty or has a colon")
        if match is None:
            raise _wrong(user, "has no bcrypt hash; make one with: htpasswd -nBC 10 USER")
        if not MIN_COST <= int(match[1]) <= MAX_COST:
            raise _wrong(user, f"has a hash of cost {match[1]}; make one of cost {MIN_COST} to {MAX_COST}")
    return users


def _checked_headers(headers: dict[str, str]) -> dict[str, str]:
    for name, value in headers.items():
        if name not in _HEADERS:
            raise _wrong(name, f"is not known; here may be {', '.join(_HEADERS)}")
        if value and _HEADERS[name] and value not in _HEADERS[name]:
            raise _wrong(name, f"must be one of {', '.join(_HEADERS[name])}")
        if not re.fullmatch(r"[\x20-\x7e]*", value):
            raise _wrong(name, "is not one line of ASCII")
    return {name: value for name, value in headers.items() if value}


_EMPTY = BeforeValidator(lambda value: {} if value in _NOTHING else value)


class _HttpSection(_Section):
    http2: _Flag = ""
    headers: Annotated[dict[str, str], _EMPTY, AfterValidator(_checked_headers)] = {}


class WebConfig(_Section):
    """Content of a web configuration file: TLS, response headers, and bcrypt hashes by user."""

    unsupported = {"rate_limit": "; a scrape within a second of another shares its answer"}
    tls_server_config: Tls = Tls()
    http_server_config: _HttpSection = _HttpSection()
    basic_auth_users: Annotated[dict[str, str], _EMPTY, AfterValidator(_checked_users)] = Field(default={}, repr=False)

    def requires_auth(self) -> bool:
        """Return whether clients need a password or a certificate."""
        return bool(self.basic_auth_users) or self.tls_server_config.client_auth_type == "RequireAndVerifyClientCert"


_PROBLEMS = {"list_type": "is not a list of names", "string_type": "is not a plain value"}


def _wrong(key: str, problem: str) -> PydanticCustomError:
    return PydanticCustomError("key", "{problem}", {"key": key, "problem": problem})


def parse(text: str, base: Path = Path()) -> WebConfig:
    """Return the configuration in a YAML text. Relative file names start at `base`. Raises SettingsError."""
    lines: dict[Loc, int] = {}
    content = _plain(_compose(text), (), lines)
    try:
        return WebConfig.model_validate(content, context=base)
    except ValidationError as error:
        raise SettingsError(_message(error.errors()[0], lines)) from None


def _message(error: "ErrorDetails", lines: Mapping[Loc, int]) -> str:
    """Return a validation error's text with line and key, without the value, because it may be a secret."""
    context, loc, kind = error.get("ctx", {}), error["loc"], error["type"]
    problem = _PROBLEMS.get(kind, str(context.get("error", "")))
    if kind == "key":
        loc, problem = (*loc, context["key"]), context["problem"]
    elif kind == "literal_error":
        problem = "must be one of " + ", ".join(re.findall(r"'(\w+)'", context["expected"]))
    elif isinstance(loc[-1:][0] if loc else "", int):
        problem = _PROBLEMS["list_type"]
    *sections, key = [str(part) for part in loc if isinstance(part, str)] or ["the file"]
    if kind in ("dict_type", "model_type"):
        return f"line {lines[loc]}: write {key} as keys with values"
    if problem.endswith("is missing"):
        return f"{key}: {problem}"
    return f"line {lines[loc]}: {''.join(f'{name}: ' for name in sections[-1:])}{key} {problem}"


def _compose(text: str) -> Node | None:
    """Return the root node of a YAML document, without constructing Python objects. Raises SettingsError."""
    try:
        return yaml.compose(text, Loader=yaml.BaseLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        # Remove the words that the error quotes from the file, because one of them may be a secret.
        problem = re.sub(r" '.{2,}'", "", str(error.problem or error.context))
        raise SettingsError(f"line {line} is not YAML: {problem}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"this is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SettingsError("this is not a web configuration: it is nested too deeply") from None


def _plain(node: Node | None, loc: Loc, lines: dict[Loc, int]) -> Any:
    """Return a YAML node as strings, lists and dictionaries, and add each line to `lines`. Raises SettingsError."""
    lines[loc] = 1 if node is None else node.start_mark.line + 1
    if len(loc) > MAX_DEPTH:  # an alias may refer to a node that contains it
        raise SettingsError(f"line {lines[loc]}: this is nested too deeply")
    if isinstance(node, SequenceNode):
        return [_plain(item, (*loc, index), lines) for index, item in enumerate(node.value)]
    if not isinstance(node, MappingNode):
        return "" if node is None else str(node.value)
    content: dict[str, Any] = {}
    for key, value in node.value:
        line, name = value.start_mark.line + 1, key.value
        if not isinstance(name, str):
            raise SettingsError(f"line {key.start_mark.line + 1}: a key is not a plain word")
        if name in content:
            raise SettingsError(f"line {line}: {''.join(f'{part}: ' for part in loc[-1:])}{name} is there twice")
        content[name] = _plain(value, (*loc, name), lines)
    return content


def _signature(file: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when the file is replaced or written, None if there is no file."""
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


class Web:
    """Web configuration in use. `protect` adds passwords and headers, `secure` TLS. Creation raises SettingsError."""

    def __init__(self, file: Path, flag: str = "--web-config") -> None:
        self._name = f"{flag} {file}"
        self._file = file
        self._lock = threading.Lock()
        self._passwords = Passwords()
        self.config, self.context = self._read()

    def _read(self) -> tuple[WebConfig, ssl.SSLContext | None]:
        # Signatures are taken before files are read, so that no change is missed. An unusable file is logged once.
        self._seen = {self._file: _signature(self._file)}
        try:
            config = parse(self._file.read_text(errors="replace"), self._file.parent)
            tls = config.tls_server_config
            self._seen |= {file: _signature(file) for file in tls.files}
            return config, tls.context() if tls.files else None
        except OSError as error:
            raise SettingsError(f"{self._name}: {error.strerror}") from None
        except SettingsError as error:
            raise SettingsError(f"{self._name}: {error}") from None

    def refresh(self) -> None:
        """Reload the files if they changed. Thread-safe.

        Keep the old settings, and log why, if the new ones are invalid, switch TLS on or off or disable authentication.
        """
        with self._lock:
            if all(_signature(file) == seen for file, seen in self._seen.items()):
                return
            try:
                config, context = self._read()
            except SettingsError as error:
                log.error("reload ignored: %s", error)
                return
            if (context is None) != (self.context is None):
                log.error("reload ignored: %s would turn TLS on or off, which needs a restart", self._name)
                return
            if self.config.requires_auth() and not config.requires_auth():
                log.error("reload ignored: %s would disable authentication; restart to apply", self._name)
                return
            self.config, self.context = config, context
            log.info("reloaded %s", self._name)

    def secure(self, config: "uvicorn.Config") -> None:
        """Add TLS to a uvicorn server if the file configures TLS."""
        if self.context is None:
            return
        if not config.loaded:
            config.load()
        config.ssl = context = ReloadingSSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.web = self

    def protect(self, app: ASGIApp, own: str | None = None) -> ASGIApp:
        """Return an application that requires a password and adds the configured headers to responses.

        Paths that begin with `own` need no password, because the application requires a token in the same header there.
        """

        async def protected(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http":
                await app(scope, receive, send)
                return
            self.refresh()
            send, users = _with_headers(send, self.config.http_server_config.headers), self.config.basic_auth_users
            allowed: bool | None = True
            if users and (own is None or not str(scope["path"]).startswith(own)):
                given = [bytes(value) for name, value in scope["headers"] if name == b"authorization"]
                allowed = await self._passwords.check(users, given[0] if len(given) == 1 else b"")
            if allowed:
                await app(scope, receive, send)
            elif allowed is None:
                busy = PlainTextResponse("Too many passwords to check\n", 503, {"retry-after": "1"})
                await busy(scope, receive, send)
            else:
                await PlainTextResponse("Unauthorized\n", 401, {"www-authenticate": "Basic"})(scope, receive, send)

        return protected


class ReloadingSSLContext(ssl.SSLContext):
    """TLS context with the current certificates for each connection, because asyncio calls `wrap_bio` for each."""

    web: Web

    def wrap_bio(self, *arguments: Any, **keywords: Any) -> ssl.SSLObject:
        """Return the TLS object of a new connection, after changed files were reloaded."""
        self.web.refresh()
        assert self.web.context is not None
        return self.web.context.wrap_bio(*arguments, **keywords)


def _with_headers(send: Send, headers: Mapping[str, str]) -> Send:
    if not headers:
        return send
    added = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), *added]
        await send(message)

    return sending
