"""The documentation builds strictly, with tables of arguments, and with the pages that lie in other folders."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.site import built

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert built(folder) == ""
    return folder


def rows(page: str, after: str) -> list[str]:
    """The names in the first table after an anchor."""
    table = page[page.index(f'id="{after}"') :].partition("</table>")[0]
    return re.findall(
        r"<code>(\**\w+)</code>", "".join(re.findall(r"<tr class=\"doc-section-item\">.*?</td>", table, re.DOTALL))
    )


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
