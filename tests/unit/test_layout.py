"""The house keeps its shape: no circle among modules, small files and classes, one name for one class."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import ROOT


def test_no_module_of_the_viewer_imports_itself_through_others() -> None:
    folder = ROOT / "viewer" / "src"
    files = {file.relative_to(folder): file for suffix in ("*.ts", "*.tsx") for file in folder.rglob(suffix)}

    def imported(file: Path) -> set[Path]:
        found = set()
        for name in re.findall(r"from '(\.[^']*)'", files[file].read_text(encoding="utf-8")):
            base = (files[file].parent / name).resolve().relative_to(folder.resolve())
            candidates = (base.with_name(f"{base.name}.ts"), base.with_name(f"{base.name}.tsx"), base / "index.ts")
            found |= {candidate for candidate in candidates if candidate in files}
        return found

    edges = {file: imported(file) for file in files}
    assert sum(map(len, edges.values())) > 20
    while leaves := {file for file, below in edges.items() if not below}:
        edges = {file: below - leaves for file, below in edges.items() if file not in leaves}
    assert edges == {}, "a circle, or what imports one"
