"""The documentation as a site: pages from other folders, and links between them and docs/."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HOOK = runpy.run_path(str(ROOT / "docs" / "theme" / "pages.py"))
GUIDE, CHANGELOG, RESULTS = (ROOT / name for name in ("docs/how-to/gpu.md", "CHANGELOG.md", "benchmarks/RESULTS.md"))


@pytest.mark.parametrize(
    ("page", "inside", "links", "wanted"),
    [
        (CHANGELOG, "changelog.md", "[a](docs/how-to/gpu.md#x)", "[a](how-to/gpu.md#x)"),
        (RESULTS, "results.md", "[a](LOG.md) ![b](pareto.png)", "[a](log.md) ![b](images/pareto.png)"),
        (GUIDE, "how-to/gpu.md", "[a](../../benchmarks/RESULTS.md#b)", "[a](../results.md#b)"),
        *(
            (GUIDE, "how-to/gpu.md", link, link)
            for link in ("[a](https://example.org/x)", "[a](#x)", "[a](../start/serve.md)", "[a](../../src/none.py)")
        ),
    ],
)
def test_links_of_pages_from_other_folders_lead_into_the_site(page: Path, inside: str, links: str, wanted: str) -> None:
    assert HOOK["relinked"](links, page, inside) == wanted


def test_pages_from_other_folders_exist_and_are_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    site = HOOK["SITE"]
    assert [path for path in site if not path.is_file()] == []
    assert {page for page in site.values() if page.endswith(".md")} <= listed
