"""Find Prometheus, promtool, Alertmanager and amtool, or fetch them into a cache without root.

In this order: programs on PATH; Debian's packages from the mirror this machine's apt uses, unpacked and never
installed; the release archives of https://github.com/prometheus, checked against the sha256sums.txt that is
published beside each of them. Standard library only: `make` runs this before anything is installed.

FLOPWATCH_CACHE names the cache folder, FLOPWATCH_DEBIAN_SUITE the Debian release whose packages are taken. Who names
a suite in a call gets that one's packages, whatever is on PATH: Debian's archive holds the oldest and the newest
version there is to test with (OLDEST, NEWEST), and its index says which these are today.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SUITE = "trixie"
OLDEST, NEWEST = "bookworm", "sid"
RELEASES = {"prometheus": "2.53.3", "alertmanager": "0.28.1"}  # what trixie has, so that both ways run the same
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
BY_HAND = (
    "Put prometheus, promtool, alertmanager and amtool on PATH "
    "(Debian: apt-get install prometheus prometheus-alertmanager)."
)
Say = Callable[[str], None]


class ServersError(RuntimeError):
    """Prometheus or Alertmanager cannot be had here; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Command words that start each program, and where they come from."""

    prometheus: tuple[str, ...]
    promtool: str
    alertmanager: tuple[str, ...]  # empty where it cannot run; `why` says why
    amtool: str
    origin: str
    why: str = ""


def find(environ: Mapping[str, str] = os.environ, say: Say = print, suite: str | None = None) -> Servers:
    """Return the programs, fetched first if PATH lacks one; those of a named suite always. Raises ServersError."""
    path = environ.get("PATH") if suite is None else ""
    prometheus, promtool, alertmanager, amtool = (
        next(filter(None, (shutil.which(name, path=path) for name in names)), None)
        for names in (("prometheus",), ("promtool",), ("alertmanager", "prometheus-alertmanager"), ("amtool",))
    )
    if prometheus and promtool and alertmanager and amtool:
        return Servers((prometheus,), promtool, (alertmanager,), amtool, "PATH")
    cache = Path(environ.get("FLOPWATCH_CACHE") or ROOT / ".cache" / "servers").absolute()
    root = _fetched(cache, suite or environ.get("FLOPWATCH_DEBIAN_SUITE") or SUITE, say, releases=suite is None)
    program = root / "usr" / "bin"
    if (program / "alertmanager").exists():
        command: tuple[str, ...] = (str(program / "alertmanager"),)
        why = ""
    else:
        command, why = with_template(root)
    web = root / "usr" / "share" / "prometheus" / "web"
    assets = (f"--web.local-assets={web}/",) if web.is_dir() else ()
    return Servers(
        (str(program / "prometheus"), *assets),
        str(program / "promtool"),
        command,
        str(program / "amtool"),
        str(root),
        why,
    )


def node_exporter(environ: Mapping[str, str] = os.environ, say: Say = print) -> str:
    """Return Prometheus' node_exporter. Raises ServersError."""
    return _package("prometheus-node-exporter", ("prometheus-node-exporter", "node_exporter"), environ, say)


def victoria_metrics(environ: Mapping[str, str] = os.environ, say: Say = print, suite: str | None = None) -> str:
    """Return VictoriaMetrics, a time-series database that takes OTLP, on one node. Raises ServersError.

    vmalert, which evaluates rules, and vmalert-tool lie beside that of a named suite.
    """
    return _package("victoria-metrics", ("victoria-metrics", "victoria-metrics-prod"), environ, say, suite)


def _package(
    package: str, programs: Sequence[str], environ: Mapping[str, str], say: Say, suite: str | None = None
) -> str:
    """Return the first of these programs on PATH, else the Debian package's first, unpacked into the cache."""
    for name in programs:
        if suite is None and (program := shutil.which(name, path=environ.get("PATH"))):
            return program
    suite = suite or environ.get("FLOPWATCH_DEBIAN_SUITE") or SUITE
    cache = Path(environ.get("FLOPWATCH_CACHE") or ROOT / ".cache" / "servers").absolute()
    root = cache / f"{package.removeprefix('prometheus-')}-{suite}"
    with _locked(cache):
        if not root.is_dir():
            mirrors = debian_mirrors()
            if not mirrors:
                raise ServersError(f"this machine has no Debian mirror and keyring; put {package} on PATH")
            say(f"{package} is not on PATH: unpacking Debian {suite}'s package into {cache}")
            _fill(root, say, lambda tree: _unpack_debian(mirrors, suite, (package,), tree))
    return str(root / "usr" / "bin" / programs[0])


def with_template(root: Path) -> tuple[tuple[str, ...], str]:
    """Return the words that start Debian's unpacked Alertmanager, or none and the reason.

    The path of its default template, /usr/share/prometheus/alertmanager, is compiled in and it exits without that
    file. A mount namespace of its own shows it the unpacked /usr/share; its network stays this machine's.
    """
    program = str(root / "usr" / "bin" / "prometheus-alertmanager")
    if Path("/usr/share/prometheus/alertmanager/default.tmpl").exists():
        return (program,), ""
    namespaces = ("-m", "-rm") if os.geteuid() == 0 else ("-rm",)
    script = 'mount --bind "$0" /usr/share && exec "$@"'
    for flag in namespaces:
        command = ("unshare", flag, "sh", "-c", script, str(root / "usr" / "share"), program)
        try:
            if subprocess.run([*command, "--version"], capture_output=True, timeout=30).returncode == 0:
                return command, ""
        except (OSError, subprocess.TimeoutExpired):
            pass
    return (), (
        "Debian's unpacked Alertmanager needs a mount namespace to find its template, and none can be made "
        "here (user namespaces are closed, and this is not root with CAP_SYS_ADMIN). Install "
        "prometheus-alertmanager, or put alertmanager on PATH."
    )


def _fetched(cache: Path, suite: str, say: Say, releases: bool) -> Path:
    """Return the folder that holds usr/bin/{prometheus,promtool,amtool,...}, filling it if it is not there.

    The release archives, if they will do, are there for who takes any version.
    """
    debian, release = cache / f"debian-{suite}", cache / "release"
    with _locked(cache):
        for root in (debian, release) if releases else (debian,):
            if root.is_dir():
                return root
        failures = []
        mirrors = debian_mirrors()
        if not mirrors:
            failures.append("this machine has no Debian mirror and keyring")
        else:
            missing = "Prometheus or Alertmanager is not on PATH: " if releases else ""
            say(f"{missing}unpacking Debian {suite}'s Prometheus and Alertmanager (50 MB) into {cache}")
            wanted = ("prometheus", "prometheus-alertmanager")
            try:
                _fill(debian, say, lambda tree: _unpack_debian(mirrors, suite, wanted, tree))
                return debian
            except ServersError as error:
                failures.append(str(error))
        if releases:
            say(f"{failures[-1]}: taking the official release archives (130 MB)")
            try:
                _fill(release, say, _unpack_releases)
                return release
            except ServersError as error:
                failures.append(str(error))
    raise ServersError("could not fetch Prometheus and Alertmanager:\n  " + "\n  ".join(failures) + f"\n{BY_HAND}")


def _fill(target: Path, say: Say, unpack: Callable[[Path], object]) -> None:
    """Make `target` with `unpack`, whole or not at all, in three tries: mirrors and lines are flaky."""
    started = time.monotonic()
    for pause in (2, 5, None):
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as scratch:
            tree = Path(scratch) / "root"
            try:
                unpack(tree)
            except (OSError, subprocess.SubprocessError, tarfile.TarError, ServersError) as error:
                reason = _reason(error)
                if pause is None:
                    raise ServersError(reason) from error
                say(f"  failed: {reason}; trying again in {pause} s")
                time.sleep(pause)
            else:
                tree.rename(target)
                say(f"  done in {time.monotonic() - started:.0f} s")
                return


def _reason(error: Exception) -> str:
    """Return the last line a program or the system said about a failure."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
        return f"{error.cmd[0]}: {lines[-1] if lines else f'exit status {error.returncode}'}"
    return str(error)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time fill the cache."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "lock").open("w")
    except OSError as error:
        raise ServersError(f"the cache folder cannot be written ({error}); set FLOPWATCH_CACHE to another") from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def debian_mirrors(apt: Path = Path("/etc/apt"), keyring: Path = KEYRING) -> list[str]:
    """Return what may be Debian's archive in apt's sources (one-line, deb822, or a mirror list); none without its key.

    Other vendors' repositories end in /debian too; they come after Debian's own file, and the key tells them apart.
    """
    if not keyring.exists():
        return []
    files = [*apt.glob("sources.list"), *apt.glob("sources.list.d/*"), *apt.glob("mirrors/*")]
    files.sort(key=lambda file: (not file.name.startswith(("debian", "sources.list")), file))
    mirrors: dict[str, None] = {}
    for file in files:
        if file.suffix not in (".list", ".sources") or not os.access(file, os.R_OK):
            continue
        for line in file.read_text(errors="replace").splitlines():
            # A snapshot of the archive ends in its date.
            found = re.search(r"^[^#]*?(https?://[^\s#]+/debian(?:/\d{8}T\d{6}Z)?)/?(?:\s|$)", line)
            if found:
                mirrors[found[1]] = None
    return list(mirrors)


def _unpack_debian(mirrors: Sequence[str], suite: str, packages: Sequence[str], tree: Path) -> None:
    """Unpack Debian packages, and the small ones their web pages link to, into `tree`: no root, no services."""
    work = tree.parent
    for folder in ("lists/partial", "cache/archives/partial", "debs"):
        (work / folder).mkdir(parents=True, exist_ok=True)
    tree.mkdir()
    sources = work / "sources.list"
    options = {
        "Dir::Etc::sourcelist": sources,
        "Dir::Etc::sourceparts": "-",
        "Dir::State::status": "/dev/null",
        "Dir::State::lists": work / "lists",
        "Dir::Cache": work / "cache",
        "Acquire::Languages": "none",
        # As root apt would drop to a user who may not enter this folder.
        "APT::Sandbox::User": "root",
    }
    flags = ["-qq", *(f"-o{key}={value}" for key, value in options.items())]

    def run(*command: str) -> str:
        return subprocess.run(command, cwd=work / "debs", check=True, capture_output=True, text=True).stdout

    for mirror in mirrors:
        sources.write_text(f"deb [signed-by={KEYRING}] {mirror} {suite} main\n")
        try:
            run("apt-get", *flags, "-oAPT::Update::Error-Mode=any", "update")
            break
        except subprocess.CalledProcessError:
            if mirror == mirrors[-1]:
                raise
    depends = run(
        "apt-cache",
        *flags,
        "depends",
        "--recurse",
        "--no-recommends",
        "--no-suggests",
        "--no-conflicts",
        "--no-breaks",
        "--no-replaces",
        "--no-enhances",
        *packages,
    )
    extra = {name for name in depends.split() if re.fullmatch(r"promtool|(libjs|fonts)-[a-z0-9.+-]+", name)}
    run("apt-get", *flags, "download", *packages, *sorted(extra))
    for package in sorted((work / "debs").glob("*.deb")):
        run("dpkg-deb", "-x", str(package), str(tree))


def _unpack_releases(tree: Path) -> None:
    for name, version in RELEASES.items():
        unpack_release(f"https://github.com/prometheus/{name}/releases/download/v{version}", f"{name}-{version}", tree)


def unpack_release(base: str, name: str, tree: Path) -> None:
    """Take the programs out of the release archive `name` at `base`, once its SHA-256 is the published one."""
    machine = {"x86_64": "amd64", "aarch64": "arm64", "armv7l": "armv7"}.get(platform.machine(), platform.machine())
    archive = f"{name}.linux-{machine}.tar.gz"
    content = _download(f"{base}/{archive}")
    published = re.search(
        rf"^([0-9a-f]{{64}})  \*?{re.escape(archive)}$", _download(f"{base}/sha256sums.txt").decode(), re.MULTILINE
    )
    if published is None or published[1] != hashlib.sha256(content).hexdigest():
        raise ServersError(f"{archive} does not have its published SHA-256")
    program = tree / "usr" / "bin"
    program.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(content)) as archived:
        for member in archived.getmembers():
            file = Path(member.name).name
            if member.isfile() and file in ("prometheus", "promtool", "alertmanager", "amtool"):
                data = archived.extractfile(member)
                assert data is not None
                (program / file).write_bytes(data.read())
                (program / file).chmod(0o755)


def _download(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=60) as reply:
        content: bytes = reply.read()
        return content


def pip_for(python: str, environ: Mapping[str, str] = os.environ, say: Say = print) -> None:
    """Give a virtual environment pip where Python came without it, as Debian's does. Raises ServersError."""
    mirrors = debian_mirrors()
    by_hand = "this Python has no ensurepip. Install it (Debian: apt-get install python3-venv) and run this again."
    if not mirrors:
        raise ServersError(by_hand)
    say("This Python has no ensurepip: taking pip from Debian's package python3-pip-whl")
    cache = Path(environ.get("FLOPWATCH_CACHE") or ROOT / ".cache" / "servers").absolute()
    with _locked(cache), tempfile.TemporaryDirectory(dir=cache, prefix=".part-") as scratch:
        tree = Path(scratch) / "root"
        try:
            _unpack_debian(mirrors, environ.get("FLOPWATCH_DEBIAN_SUITE") or SUITE, ("python3-pip-whl",), tree)
            wheel = next((tree / "usr" / "share" / "python-wheels").glob("pip-*.whl"))
            subprocess.run([python, str(wheel / "pip"), "install", "-q", str(wheel)], check=True)
        except (OSError, subprocess.SubprocessError, StopIteration) as error:
            raise ServersError(f"{_reason(error)}; {by_hand}") from error


def main(arguments: Sequence[str]) -> int:
    """Print where the programs are; with `--pip PYTHON`, give that Python pip instead."""
    try:
        if arguments[:1] == ["--pip"]:
            pip_for(arguments[1])
            return 0
        servers = find(say=lambda line: print(line, file=sys.stderr, flush=True))
    except ServersError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name in ("prometheus", "promtool", "alertmanager", "amtool"):
        words = getattr(servers, name)
        print(f"{name}: {words if isinstance(words, str) else ' '.join(words) or servers.why}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
