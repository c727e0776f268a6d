"""Where the demo shows the dashboards: a Grafana, on PATH or in a container, or our own viewer where it is built."""

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
WITHOUT = "Node 20 or newer, a Grafana or a container engine would show the dashboards; this demo has the terminal"

Which = Callable[[str], str | None]


class Show(NamedTuple):
    """A program that shows the dashboards: its name, its command, its environment, and when it answers."""

    name: str
    command: tuple[str, ...]
    environ: Mapping[str, str]
    ready: str
    link: str


def find(
    address: str, prometheus: str, folder: Path, interval: float, viewer: Sequence[str], which: Which = shutil.which
) -> Show | None:
    """Return what shows them at an address on this machine, or None; `viewer` is the command of our own."""
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
    link = f"{url}/d/{HOME}?from=now-5m&to=now&refresh=5s"
    grafana = which("grafana")
    if grafana is not None:
        own = {
            "GF_PATHS_DATA": str(folder / "data"),
            "GF_PATHS_LOGS": str(folder / "log"),
            "GF_PATHS_PLUGINS": str(folder / "plugins"),
            "GF_PATHS_PROVISIONING": str(provisioned(folder, prometheus, interval, DASHBOARDS)),
        }
        home = next(
            (
                path
                for path in ("/usr/share/grafana", str(Path(grafana).resolve().parents[1]))
                if (Path(path) / "conf" / "defaults.ini").is_file()
            ),
            "/usr/share/grafana",
        )
        return Show("Grafana", (grafana, "server", "--homepath", home), environ | own, f"{url}/api/health", link)
    if PAGE.is_file():
        return Show(
            "Boards",
            (*viewer, f"--prometheus={prometheus}", f"--listen={address}", f"--scrape-interval={interval:g}"),
            {},
            f"{url}/healthz",
            link,
        )
    engine = next((path for path in map(which, ("docker", "podman")) if path is not None and works(path)), None)
    if engine is not None:
        mounted = Path("/etc/grafana/flopwatch")
        provisioned(folder, prometheus, interval, mounted)
        given = [
            part
            for name, value in (environ | {"GF_PATHS_PROVISIONING": "/etc/grafana/provisioning"}).items()
            for part in ("--env", f"{name}={value}")
        ]
        return Show(
            "Grafana",
            (
                engine,
                "run",
                "--rm",
                "--network",
                "host",
                *given,
                "--volume",
                f"{folder / 'provisioning'}:/etc/grafana/provisioning:ro",
                "--volume",
                f"{DASHBOARDS}:{mounted}:ro",
                IMAGE,
            ),
            {},
            f"{url}/api/health",
            link,
        )
    return None


def works(engine: str) -> bool:
    """Return whether a container engine does, as its client is often there alone."""
    try:
        return subprocess.run([engine, "info"], capture_output=True, timeout=20, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def provisioned(folder: Path, prometheus: str, interval: float, dashboards: Path) -> Path:
    """Write what Grafana is to find: https://grafana.com/docs/grafana/latest/administration/provisioning/."""
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
