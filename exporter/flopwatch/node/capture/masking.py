"""Masks, which are made-up values, for names and identities of hosts, hardware, processes and users.

UUIDs, GUIDs, MAC and IP addresses are found by shape. Serials, processes, users and home folders are found by the text
before them in a log. Host names and known serials are found as words. Equal originals have equal masks of the same
shape, so that joins still work. An identity of all zeros stays.
"""

import re
from collections.abc import Callable, Iterable

MIN_WORD = 4  # shorter words may occur in any text, and are masked only as known names

PID_MAX = 1 << 22  # no process has a higher number (proc(5), pid_max)

_HEX = "[0-9a-fA-F]"
_SHAPES: dict[str, str] = {
    "uuid": rf"{_HEX}{{8}}(?:-{_HEX}{{4}}){{3}}-{_HEX}{{12}}",
    "ipv6": rf"{_HEX}{{4}}(?::{_HEX}{{4}}){{7}}|(?=[0-9a-fA-F:]*::[0-9a-fA-F:]*{_HEX})[0-9a-fA-F:]{{3,39}}",
    "guid": rf"{_HEX}{{4}}(?::{_HEX}{{4}}){{3}}",
    "mac": rf"{_HEX}{{2}}(?::{_HEX}{{2}}){{5}}",
    "ipv4": r"\d{1,3}(?:\.\d{1,3}){3}",
    "interface": rf"enx{_HEX}{{12}}",
}
# Not within a word, a number or the mask of a name, nor within a longer identity of the same kind.
_BEFORE = rf"(?<![\w.])(?<!masked-)(?<![\W:]{_HEX}{{2}}:)(?<![\W:]{_HEX}{{4}}:)"
_AFTER = r"(?!\w|\.\w)"
_ADDRESS = "|".join(_SHAPES[kind] for kind in ("ipv6", "guid", "mac", "ipv4"))
_NO_ADDRESS = rf"(?!(?:{_ADDRESS}){_AFTER})"
_SHAPED = re.compile("|".join(f"{_BEFORE}(?P<{kind}>{shape}){_AFTER}" for kind, shape in _SHAPES.items()))

# The text before a name in a log, and the name. The name of a process may contain blanks, up to a comma.
_NAME = rf"{_NO_ADDRESS}(?!<)[^\s,;:\"'`()]+"
_INTRODUCED = re.compile(
    "|".join(
        (
            rf"\bserial[ _]?(?:number|no\b|num\b)\s*\.?\s*[:=#]?\s*{_NO_ADDRESS}(?P<serial>\w[\w-]*)",
            rf"\bpid[:= ]\s*['\"]?{_NO_ADDRESS}(?P<pid>\d+)",
            r"\bcomm: (?P<command>.+?)(?= (?:not )?tainted\b|$)",
            r"\b(?:name|comm|task|process)[:=]\s*['\"`]?(?P<process>(?!<)(?:[^\s,'\"`][^,'\"`\n]*)?[^\s,'\"`])",
            r"\b(?:process|task)\s+[`'\"](?P<quoted>[^`'\"\n]+)",
            rf"\b(?:exe|cwd|user|acct|owner|host|hostname|addr)=['\"]?(?P<name>{_NAME})",
            rf"/(?:home|Users|users)/{_NO_ADDRESS}(?P<home>[^/\s,;:\"']+)",
            r"^(?:\w{3} +\d+ [\d:]{8}|\d{4}-\d\d-\d\dT\S+) (?P<host>\S+)(?= kernel:)",
        )
    ),
    re.IGNORECASE | re.MULTILINE,
)

_MASKS: dict[str, Callable[[int], str]] = {
    "uuid": lambda n: f"00000000-0000-0000-0000-{n:012d}",
    "ipv6": lambda n: f"2001:0db8:0000:0000:0000:0000:{n >> 16:04x}:{n & 0xFFFF:04x}",
    "guid": lambda n: f"0000:0000:{n >> 16:04x}:{n & 0xFFFF:04x}",
    "mac": lambda n: f"02:00:00:00:{n >> 8 & 0xFF:02x}:{n & 0xFF:02x}",
    "ipv4": lambda n: f"198.18.{n >> 8 & 0xFF}.{n & 0xFF}",  # RFC 2544: not routed
    "interface": lambda n: f"enx02000000{n & 0xFFFF:04x}",
    "host": lambda n: f"masked-host-{n}",
    "serial": lambda n: f"{n:013d}",
    "bytes": lambda n: f"{n:032x}",
    "name": lambda n: f"masked-{n}",
    "pid": lambda n: f"{PID_MAX + n}",
}


class Masker:
    """Replacement of names and identities by masks (made-up values). Keeps the originals in memory only."""

    def __init__(self, hosts: Iterable[str] = (), words: Iterable[str] = ()) -> None:
        self._masks: dict[tuple[str, str], str] = {}
        self._words: dict[str, str] = {}
        for host in hosts:
            # The domain on its own and the name without it, for a log may show either.
            label, _, domain = host.partition(".")
            for part in (host, label, domain):
                self.word("host", part)
        for word in words:
            self.word("name", word)

    def _mask(self, kind: str, original: str) -> str:
        """Return the mask of an original of this kind, for example `uuid`. Masks and zeros are returned as they are."""
        if not original.strip("0:.-") or original in self._masks.values():
            return original
        key = (kind, original.lower())
        if key not in self._masks:
            self._masks[key] = _MASKS[kind](1 + sum(kind == other for other, _ in self._masks))
        return self._masks[key]

    def word(self, kind: str, original: str) -> str:
        """Return the mask of a name or a serial number, and replace the word in every later text."""
        mask = self._mask(kind, original)
        if len(original) >= MIN_WORD and mask != original:
            self._words[original.lower()] = mask
        return mask

    def pid(self, original: int) -> int:
        """Return the mask of a pid, a number above every real pid."""
        return int(self._mask("pid", str(original)))

    def hexadecimal(self, original: str) -> str:
        """Return the mask of an identity in hexadecimal digits, with as many digits (at most 32)."""
        return self._mask("bytes", original)[-len(original) :]

    def log(self, text: str) -> str:
        """Return log lines with everything masked that `text` finds, and names after words such as `pid=`, `user=`."""
        return self.text(_INTRODUCED.sub(self._introduced, text))

    def learn(self, log: str) -> None:
        """Find the serials and host names in a log, so that every later text has them masked."""
        for match in _INTRODUCED.finditer(log):
            if match.lastgroup in ("serial", "host"):
                self.word(match.lastgroup, match[match.lastgroup])

    def text(self, text: str) -> str:
        """Return a text with everything masked that has the shape of an identity or is a known name or serial."""
        text = _SHAPED.sub(self._shaped, text)
        if not self._words:
            return text
        words = "|".join(map(re.escape, sorted(self._words, key=len, reverse=True)))
        return re.sub(
            f"(?<![A-Za-z0-9])(0x)?({words})(?![A-Za-z0-9])",
            lambda match: (match[1] or "") + self._words[match[2].lower()],
            text,
            flags=re.IGNORECASE,
        )

    def _introduced(self, match: re.Match[str]) -> str:
        kind = match.lastgroup
        assert kind is not None
        mask = self._mask(kind if kind in _MASKS else "name", match[kind])
        start, end = (place - match.start() for place in match.span(kind))
        return match[0][:start] + mask + match[0][end:]

    def _shaped(self, match: re.Match[str]) -> str:
        kind = match.lastgroup
        assert kind is not None
        if kind == "guid":
            # Other files have the same GUID without colons.
            self._words[match[0].replace(":", "").lower()] = self._mask(kind, match[0]).replace(":", "")
        return self._mask(kind, match[0])
