"""Code blocks of docs/scale.md and docs/shards.md."""

from __future__ import annotations

import re

from tests.support import ROOT

PAGE = "".join((ROOT / "docs" / name).read_text() for name in ("scale.md", "shards.md"))


SNIPPETS: list[str] = re.findall(r"^```yaml\n(# .*?)^```", PAGE, re.M | re.S)


def snippet(name: str) -> str:
    """Return the first file on the page whose first line begins so."""
    return next(text for text in SNIPPETS if text.startswith(f"# {name}"))
