"""Puts the viewer's page and the dashboards into wheels and source archives; the page is made by `make viewer`."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

VIEWER = "viewer/dist"
DASHBOARDS = "helm/files/dashboards"
WITHOUT = "FLOPWATCH_WITHOUT_VIEWER"


class Hook(BuildHookInterface):
    """Adds them, and builds the page where Node is and it is not built."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the folders; an editable install finds them in the checkout."""
        if version == "editable":
            return
        root = Path(self.root)
        wheel = self.target_name == "wheel"
        found = {root / DASHBOARDS: "flopwatch/boards/dashboards" if wheel else DASHBOARDS}
        if not os.environ.get(WITHOUT) and self._built(root):
            found[root / VIEWER] = "flopwatch/boards/page" if wheel else VIEWER
        build_data["force_include"] |= {str(path): target for path, target in found.items()}

    def _built(self, root: Path) -> bool:
        """Build the page if needed and return whether it exists. Without it `flopwatch boards` prints what to do."""
        if (root / VIEWER / "index.html").is_file():
            return True
        if shutil.which("npm") is None:
            self.app.display_warning("no npm here: the package is made without the page of `flopwatch boards`")
            return False
        for command in (["npm", "ci", "--no-audit", "--no-fund"], ["npm", "run", "build"]):
            subprocess.run(command, cwd=root / "viewer", check=True)
        return True
