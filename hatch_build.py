"""Puts the dashboards and, if `make viewer` has built it, the viewer's page into wheels and source archives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VIEWER = "viewer/dist"
DASHBOARDS = "helm/files/dashboards"


class Hook(BuildHookInterface):
    """Adds both folders. It builds nothing, so that an installation needs no Node, compiler or network."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folders; an editable install finds them in the checkout."""
        if version == "editable":
            return
        root = Path(self.root)
        wheel = self.target_name == "wheel"
        found = {root / DASHBOARDS: "flopwatch/boards/dashboards" if wheel else DASHBOARDS}
        if (root / VIEWER / "index.html").is_file():
            found[root / VIEWER] = "flopwatch/boards/page" if wheel else VIEWER
        build_data["force_include"] |= {str(path): target for path, target in found.items()}
