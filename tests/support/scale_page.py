"""Code blocks of docs/scale.md."""

from __future__ import annotations

import re

from tests.support import ROOT

PAGE = (ROOT / "docs" / "scale.md").read_text()


SNIPPETS: list[str] = re.findall(r"^```yaml\n(# .*?)^```", PAGE, re.M | re.S)


def snippet(name: str) -> str:
    """Return the first file on the page whose first line begins so."""
    return next(text for text in SNIPPETS if text.startswith(f"# {name}"))
