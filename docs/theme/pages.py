"""Pages of the site that are files elsewhere in the repository. A hook of MkDocs, which changes links to and from them."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parents[1]
SITE = {
    DOCS.parent / "CHANGELOG.md": "changelog.md",
    DOCS.parent / "benchmarks" / "RESULTS.md": "results.md",
    DOCS.parent / "benchmarks" / "LOG.md": "log.md",
    DOCS.parent / "benchmarks" / "pareto.png": "images/pareto.png",
}
"""File -> its path in the site."""


def relinked(text: str, source: Path, page: str) -> str:
    """Return a text with the links that its file has as the links that its page needs.

    source: the file. page: path of the page in the site. Links to files that are not in the site stay, and fail the build.
    """

    def link(found: re.Match[str]) -> str:
        file, mark, anchor = found[1].partition("#")
        target = (source.parent / file).resolve()
        if not file or re.match(r"[a-z]+:", file) or not (target in SITE or target.is_relative_to(DOCS)):
            return found[0]
        there = SITE.get(target) or target.relative_to(DOCS).as_posix()
        return f"]({posixpath.relpath(there, posixpath.dirname(page) or '.')}{mark}{anchor})"

    return re.sub(r"\]\(([^)\s]+)\)", link, text)


def on_files(files: Files, config: Any) -> Files:
    """Add the pages."""
    for source, page in SITE.items():
        if source.suffix == ".md":
            text = relinked(source.read_text(encoding="utf-8"), source, page)
            files.append(File.generated(config, page, content=text))
        else:
            files.append(File.generated(config, page, abs_src_path=str(source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Change the links of a page that is a file of docs/."""
    source = page.file.abs_src_path
    return markdown if source is None else relinked(markdown, Path(source), page.file.src_uri)
