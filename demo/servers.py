"""Find Prometheus, promtool, Alertmanager and amtool, or fetch them into a cache without root.

Programs on PATH are used first. Without them, Debian packages are fetched from the mirror of apt, unpacked and not
installed. Without a mirror, the release archives of https://github.com/prometheus are fetched and checked against their
published sha256sums.txt. This module uses the standard library only, because `make` runs it before anything is
installed.

FLOPWATCH_CACHE is the cache folder, and FLOPWATCH_DEBIAN_SUITE the Debian release of the packages. A call with a
`suite` uses the packages of that release and ignores PATH. The archive of Debian has the oldest and the newest version
to test with, in the suites OLDEST and NEWEST.
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
RELEASES = {
    "prometheus": "2.53.3",
    "alertmanager": "0.28.1",
}  # the versions in trixie, so that both sources give the same
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
BY_HAND = (
    "Put prometheus, promtool, alertmanager and amtool on PATH "
    "(Debian: apt-get install prometheus prometheus-alertmanager)."
)
Log = Callable[[str], None]


class ServersError(RuntimeError):
    """Raised if Prometheus or another program cannot be found or fetched. The message explains what to do."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Commands that start Prometheus, promtool, Alertmanager and amtool, and the origin of these programs."""

    prometheus: tuple[str, ...]
    promtool: str
    alertmanager: tuple[str, ...]  # empty if it cannot run, for the reason in `why`
    amtool: str
    origin: str
    why: str = ""


def find(environ: Mapping[str, str] = os.environ, log: Log = print, suite: str | None = None) -> Servers:
    """Return the four programs from PATH, or else from the cache, fetched if they are missing. Raises ServersError.

    With a `suite`, return the programs of that Debian release.
    """
    path = environ.get("PATH") if suite is None else ""
    prometheus, promtool, alertmanager, amtool = (
        next(filter(None, (shutil.which(name, path=path) for name in names)), None)
        for names in (("prometheus",), ("promtool",), ("alertmanager", "prometheus-alertmanager"), ("amtool",))
    )
    if prometheus and promtool and alertmanager and amtool:
        return Servers((prometheus,), promtool, (alertmanager,), amtool, "PATH")
    cache = Path(environ.get("FLOPWATCH_CACHE") or ROOT / ".cache" / "servers").absolute()
    root = _fetched(cache, suite or environ.get("FLOPWATCH_DEBIAN_SUITE") or SUITE, log, releases=suite is None)
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


def node_exporter(environ: Mapping[str, str] = os.environ, log: Log = print, suite: str | None = None) -> str:
    """Return the path of Prometheus' node_exporter, fetched if it is not on PATH. Raises ServersError.

    With a `suite`, return that of this Debian release.
    """
    return _package("prometheus-node-exporter", ("prometheus-node-exporter", "node_exporter"), environ, log, suite)


def victoria_metrics(environ: Mapping[str, str] = os.environ, log: Log = print, suite: str | None = None) -> str:
    """Return the path of single-node VictoriaMetrics, a database that accepts OTLP, fetched if it is not on PATH.

    With a `suite`, return that of this Debian release. Then vmalert, which evaluates rules, and vmalert-tool are in the
    same folder. Raises ServersError.
    """
    return _package("victoria-metrics", ("victoria-metrics", "victoria-metrics-prod"), environ, log, suite)


def docker_registry(environ: Mapping[str, str] = os.environ, log: Log = print) -> str:
    """Return the path of the reference registry of OCI artefacts, fetched if it is not on PATH. Raises ServersError."""
    return _package("docker-registry", ("docker-registry",), environ, log)


def _package(
    package: str, programs: Sequence[str], environ: Mapping[str, str], log: Log, suite: str | None = None
) -> str:
    """Return the path of the first program on PATH, else that of `programs[0]` in the unpacked Debian package.

    The package is unpacked into the cache if it is missing. Raises ServersError.
    """
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
                raise ServersError(f"apt has no Debian mirror, or the Debian keyring is missing. Put {package} on PATH")
            log(f"{package} is not on PATH: unpacking Debian {suite}'s package into {cache}")
            _fill(root, log, lambda tree: _unpack_debian(mirrors, suite, (package,), tree))
    return str(root / "usr" / "bin" / programs[0])


def with_template(root: Path) -> tuple[tuple[str, ...], str]:
    """Return the command of an unpacked Debian Alertmanager, or an empty command and the reason.

    Alertmanager exits without its default template, whose path /usr/share/prometheus/alertmanager is compiled in. So
    the command runs it in a mount namespace in which /usr/share is the unpacked folder. It keeps the network of the
    host.
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
        "the unpacked Alertmanager of Debian needs a mount namespace to find its template, and none can be created "
        "(user namespaces are disabled, and this is not root with CAP_SYS_ADMIN). Install "
        "prometheus-alertmanager, or put alertmanager on PATH."
    )


def _fetched(cache: Path, suite: str, log: Log, releases: bool) -> Path:
    """Return the cached folder that has usr/bin/{prometheus,promtool,amtool,...}, fetched if it is missing.

    The release archives are a fallback if `releases` is True. Raises ServersError.
    """
    debian, release = cache / f"debian-{suite}", cache / "release"
    with _locked(cache):
        for root in (debian, release) if releases else (debian,):
            if root.is_dir():
                return root
        failures = []
        mirrors = debian_mirrors()
        if not mirrors:
            failures.append("apt has no Debian mirror, or the Debian keyring is missing")
        else:
            missing = "Prometheus or Alertmanager is not on PATH: " if releases else ""
            log(f"{missing}unpacking Debian {suite}'s Prometheus and Alertmanager (50 MB) into {cache}")
            wanted = ("prometheus", "prometheus-alertmanager")
            try:
                _fill(debian, log, lambda tree: _unpack_debian(mirrors, suite, wanted, tree))
                return debian
            except ServersError as error:
                failures.append(str(error))
        if releases:
            log(f"{failures[-1]}: fetching the official release archives (130 MB)")
            try:
                _fill(release, log, _unpack_releases)
                return release
            except ServersError as error:
                failures.append(str(error))
    raise ServersError("could not fetch Prometheus and Alertmanager:\n  " + "\n  ".join(failures) + f"\n{BY_HAND}")


def _fill(target: Path, log: Log, unpack: Callable[[Path], object]) -> None:
    """Create the folder `target` with `unpack`, completely or not at all, in up to three tries. Raises ServersError."""
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
                log(f"  failed: {reason}; trying again in {pause} s")
                time.sleep(pause)
            else:
                tree.rename(target)
                log(f"  done in {time.monotonic() - started:.0f} s")
                return


def _reason(error: Exception) -> str:
    """Return the last line of standard error if `error` is that of a failed program, else the text of the error."""
    if isinstance(error, subprocess.CalledProcessError):
        lines = [line for line in (error.stderr or "").splitlines() if line.strip()]
        return f"{error.cmd[0]}: {lines[-1] if lines else f'exit status {error.returncode}'}"
    return str(error)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the cache folder until the block ends. Raises ServersError if the folder cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = (folder / "lock").open("w")
    except OSError as error:
        raise ServersError(
            f"the cache folder cannot be written ({error}). Set FLOPWATCH_CACHE to another folder"
        ) from error
    with handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def debian_mirrors(apt: Path = Path("/etc/apt"), keyring: Path = KEYRING) -> list[str]:
    """Return the URLs in the sources of apt that may be a Debian archive, an empty list without the Debian keyring.

    Sources can be one-line, deb822 or a mirror list. Repositories of other vendors can end in /debian, too. They are
    last in the list, and apt rejects them because their signature is not by a key of Debian.
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
            # The URL of a snapshot of the archive ends in its date.
            found = re.search(r"^[^#]*?(https?://[^\s#]+/debian(?:/\d{8}T\d{6}Z)?)/?(?:\s|$)", line)
            if found:
                mirrors[found[1]] = None
    return list(mirrors)


def _unpack_debian(mirrors: Sequence[str], suite: str, packages: Sequence[str], tree: Path) -> None:
    """Unpack Debian packages and the assets of their web pages into `tree`, without root and without services."""
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
        # Without this, apt as root changes to a user without access to this folder.
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
    """Unpack the programs of the release archive `name` at the URL `base` into `tree`.

    Raises ServersError if the archive does not have its published SHA-256.
    """
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


def pip_for(python: str, environ: Mapping[str, str] = os.environ, log: Log = print) -> None:
    """Install pip in a virtual environment whose Python has no ensurepip, as on Debian. Raises ServersError."""
    mirrors = debian_mirrors()
    by_hand = "this Python has no ensurepip. Install it (Debian: apt-get install python3-venv) and run this again."
    if not mirrors:
        raise ServersError(by_hand)
    log("This Python has no ensurepip: unpacking pip from the Debian package python3-pip-whl")
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
    """Print the paths of the programs. With `--pip PYTHON`, install pip for that Python instead."""
    try:
        if arguments[:1] == ["--pip"]:
            pip_for(arguments[1])
            return 0
        servers = find(log=lambda line: print(line, file=sys.stderr, flush=True))
    except ServersError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name in ("prometheus", "promtool", "alertmanager", "amtool"):
        words = getattr(servers, name)
        print(f"{name}: {words if isinstance(words, str) else ' '.join(words) or servers.why}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
