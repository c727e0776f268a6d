"""MkDocs hook: add pages that are stored outside docs/ and rewrite links that leave it.

GitHub reads the same files, so links are relative to the file they are in, for example `../alerts/runbooks/GpuHot.md`.
In the site, a link to a file that is a page leads to the page. A link to any other file of the repository leads to
the repository if FLOPWATCH_REPOSITORY_URL is set, and is plain text if not. A link to a missing file is left alone, so
that `mkdocs build --strict` reports it.
API: https://www.mkdocs.org/dev-guide/plugins/#events
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
RUNBOOKS = ROOT / "alerts" / "runbooks"
DECISIONS = ROOT / "docs" / "adr"

# Files outside docs/ and where the site has them.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "RELEASE.md": "releasing.md",
    "SECURITY.md": "reporting-a-vulnerability.md",
}
# The README has the same purpose as the site's front page.
STANDS_FOR = {"README.md": "index.md"}

_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1 *$", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])+)\]\(((?![a-z]+:|#|/)[^)\s#]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List every runbook and every decision record in the navigation, after the pages that mkdocs.yml names."""
    for section in config.nav or []:
        for title, entries in section.items() if isinstance(section, dict) else ():
            if title == "Runbooks":
                entries.extend(f"runbooks/{path.name}" for path in sorted(RUNBOOKS.glob("*.md")))
            elif title == "Decisions":
                entries.extend(f"adr/{path.name}" for path in sorted(DECISIONS.glob("[0-9]*.md")))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the runbooks and the pages at the root of the repository."""
    outside = {f"runbooks/{path.name}": path for path in RUNBOOKS.glob("*.md")}
    outside |= {page: ROOT / name for name, page in PAGES.items()}
    for page, path in outside.items():
        files.append(File.generated(config, page, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page to files of the repository, except in code blocks."""
    source = page.file.abs_src_path
    if source is None:
        return markdown
    pages = {Path(file.abs_src_path).resolve(): file.src_uri for file in files if file.abs_src_path}
    pages |= {ROOT / name: page_of for name, page_of in STANDS_FOR.items()}
    repository = str(config.extra["repository"]).rstrip("/")

    def rewrite(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = Path(os.path.normpath(Path(source).parent / target))
        if path in pages:
            if path.name in STANDS_FOR:
                anchor = ""  # The front page has other sections.
            return f"[{text}]({posixpath.relpath(pages[path], posixpath.dirname(page.file.src_uri) or '.')}{anchor})"
        if not path.exists() or not path.is_relative_to(ROOT):
            return link[0]
        if not repository:
            return text
        kind = "tree" if path.is_dir() else "blob"
        return f"[{text}]({repository}/{kind}/main/{path.relative_to(ROOT).as_posix()}{anchor})"

    return _outside_code(markdown, lambda part: _LINK.sub(rewrite, part))


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    """Apply `change` to the text between fenced code blocks."""
    parts, begin = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [change(markdown[begin : fence.start()]), fence[0]]
        begin = fence.end()
    return "".join([*parts, change(markdown[begin:])])
