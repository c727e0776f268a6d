"""Dashboards of the demo, shown by a Grafana on PATH or in a container, or by flopwatch's own viewer."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from demo.servers import ROOT

IMAGE = "grafana/grafana:12.2.1"
DASHBOARDS = ROOT / "helm" / "files" / "dashboards"
PAGE = ROOT / "viewer" / "dist" / "index.html"
HOME = "flopwatch-run"
WITHOUT = "No dashboards: they need Node 20 or newer, Grafana, or a container engine. The demo uses the terminal"

Which = Callable[[str], str | None]


class DashboardViewer(NamedTuple):
    """A program that shows the dashboards. It is up once the URL `ready` answers."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    ready: str
    link: str


def find(
    address: str, prometheus: str, folder: Path, interval: float, viewer: Sequence[str], which: Which = shutil.which
) -> DashboardViewer | None:
    """Return the first program that can show the dashboards at a loopback address, None without one.

    It tries Grafana on PATH, then flopwatch's own viewer if its page is built, then Grafana in Docker or Podman.
    For Grafana, it writes provisioning files below `folder`. `viewer` is the own viewer's command, `prometheus` a
    URL, and `interval` the scrape interval in seconds.
    """
    url = f"http://{address}"
    host, _, port = address.rpartition(":")
    environ = {
        "GF_SERVER_HTTP_ADDR": host,
        "GF_SERVER_HTTP_PORT": port,
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
        "GF_ANALYTICS_CHECK_FOR_PLUGIN_UPDATES": "false",
        "GF_PLUGINS_PREINSTALL_DISABLED": "true",
    }
    link, health = f"{url}/d/{HOME}?from=now-5m&to=now&refresh=5s", f"{url}/api/health"
    if (grafana := which("grafana")) is not None:
        command, own = _grafana(grafana, folder, provisioned(folder, prometheus, interval, DASHBOARDS))
        return DashboardViewer("Grafana", command, environ | own, health, link)
    if PAGE.is_file():
        command = (*viewer, f"--prometheus={prometheus}", f"--listen={address}", f"--scrape-interval={interval:g}")
        return DashboardViewer("Boards", command, {}, f"{url}/healthz", link)
    engine = next((path for path in map(which, ("docker", "podman")) if path is not None and works(path)), None)
    if engine is not None:
        mounted = Path("/etc/grafana/flopwatch")
        provisioning = provisioned(folder, prometheus, interval, mounted)
        return DashboardViewer("Grafana", _container(engine, environ, provisioning, mounted), {}, health, link)
    return None


def _grafana(program: str, folder: Path, provisioning: Path) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the command of a Grafana on PATH, and the environment with its folders."""
    homes = ("/usr/share/grafana", str(Path(program).resolve().parents[1]))
    home = next((path for path in homes if (Path(path) / "conf" / "defaults.ini").is_file()), homes[0])
    return (program, "server", "--homepath", home), {
        "GF_PATHS_DATA": str(folder / "data"),
        "GF_PATHS_LOGS": str(folder / "log"),
        "GF_PATHS_PLUGINS": str(folder / "plugins"),
        "GF_PATHS_PROVISIONING": str(provisioning),
    }


def _container(engine: str, environ: dict[str, str], provisioning: Path, mounted: Path) -> tuple[str, ...]:
    """Return the command of a Grafana in a container, with the dashboards at `mounted`."""
    inside = "/etc/grafana/provisioning"
    variables = environ | {"GF_PATHS_PROVISIONING": inside}
    flags = [part for name, value in variables.items() for part in ("--env", f"{name}={value}")]
    volumes = [
        part
        for volume in (f"{provisioning}:{inside}:ro", f"{DASHBOARDS}:{mounted}:ro")
        for part in ("--volume", volume)
    ]
    return (engine, "run", "--rm", "--network", "host", *flags, *volumes, IMAGE)


def works(engine: str) -> bool:
    """Return whether the engine behind `docker` or `podman` answers. Often only the client is installed."""
    try:
        return subprocess.run([engine, "info"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def provisioned(folder: Path, prometheus: str, interval: float, dashboards: Path) -> Path:
    """Write the provisioning files of Grafana below `folder` and return their folder.

    `interval` is the scrape interval in seconds, and `dashboards` the folder of the dashboards as Grafana sees it.
    Source: https://grafana.com/docs/grafana/latest/administration/provisioning/
    """
    made = folder / "provisioning"
    source = {
        "name": "Prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": prometheus,
        "isDefault": True,
        "jsonData": {"timeInterval": f"{interval:g}s", "httpMethod": "POST"},
    }
    provider = {"name": "flopwatch", "type": "file", "folder": "flopwatch", "options": {"path": str(dashboards)}}
    for name, content in {
        "datasources": {"apiVersion": 1, "datasources": [source]},
        "dashboards": {"apiVersion": 1, "providers": [provider]},
    }.items():
        (made / name).mkdir(parents=True, exist_ok=True)
        (made / name / "flopwatch.yaml").write_text(json.dumps(content, indent=2))  # JSON is YAML
    return made
