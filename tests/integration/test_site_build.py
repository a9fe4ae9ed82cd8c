"""The documentation builds strictly, with tables of arguments, and with pages of other folders, whose links lead into it."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from helpers.site import built

ROOT = Path(__file__).parents[2]
HOOK = runpy.run_path(str(ROOT / "docs" / "theme" / "pages.py"))
GUIDE, CHANGELOG, RESULTS = (ROOT / name for name in ("docs/how-to/gpu.md", "CHANGELOG.md", "benchmarks/RESULTS.md"))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert built(folder) == ""
    return folder


def rows(page: str, after: str) -> list[str]:
    """The names in the first table after an anchor."""
    table = page[page.index(f'id="{after}"') :].partition("</table>")[0]
    cells = "".join(re.findall(r"<tr class=\"doc-section-item\">.*?</td>", table, re.DOTALL))
    return re.findall(r"<code>(\**\w+)</code>", cells)


def test_arguments_and_attributes_are_tables(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    found = rows(page, "foresay.load")
    assert found[:2] == ["target", "draft"] and {"memory_prompts", "**options"} <= set(found)
    assert rows(page, "foresay.FinishReason") == ["STOP", "LENGTH", "CANCELLED", "ERROR"]
    assert "temperature" in rows(page, "foresay.SamplingParams.max_new_tokens")
    assert "<code>256</code>" in page and "_Int(" not in page, "defaults without their private wrapper"


def test_pages_of_other_folders_are_linked_and_no_program_is_in_the_site(site: Path) -> None:
    for name in ("changelog.html", "log.html", "images/pareto.png"):
        assert (site / name).is_file()
    assert 'href="log.html"' in (site / "results.html").read_text(encoding="utf-8")
    assert 'href="../results.html"' in (site / "how-to" / "choose-a-drafter.html").read_text(encoding="utf-8")
    assert [path.name for path in (site / "theme").rglob("*") if path.suffix not in (".css", ".js")] == []


@pytest.mark.parametrize(
    ("page", "inside", "links", "wanted"),
    [
        (CHANGELOG, "changelog.md", "[a](docs/how-to/gpu.md#x)", "[a](how-to/gpu.md#x)"),
        (RESULTS, "results.md", "[a](LOG.md) ![b](pareto.png)", "[a](log.md) ![b](images/pareto.png)"),
        (GUIDE, "how-to/gpu.md", "[a](../../benchmarks/RESULTS.md#b)", "[a](../results.md#b)"),
        *((GUIDE, "how-to/gpu.md", link, link) for link in ("[a](https://example.org/x)", "[a](#x)")),
        *((GUIDE, "how-to/gpu.md", link, link) for link in ("[a](../start/serve.md)", "[a](../../src/none.py)")),
    ],
)
def test_links_of_pages_from_other_folders_lead_into_the_site(page: Path, inside: str, links: str, wanted: str) -> None:
    assert HOOK["relinked"](links, page, inside) == wanted


def test_pages_from_other_folders_exist_and_are_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    site = HOOK["SITE"]
    assert [path for path in site if not path.is_file()] == []
    assert {page for page in site.values() if page.endswith(".md")} <= listed
