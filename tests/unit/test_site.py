"""The documentation as a site: pages from other folders, and links between them and docs/."""

from __future__ import annotations

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def hook() -> ModuleType:
    spec = spec_from_file_location("pages", ROOT / "docs" / "theme" / "pages.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_pages_from_other_folders_lead_into_the_site() -> None:
    pages = hook()
    changelog, results = ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "RESULTS.md"
    assert pages.relinked("[a](docs/how-to/gpu.md#x)", changelog, "changelog.md") == "[a](how-to/gpu.md#x)"
    assert (
        pages.relinked("[a](LOG.md) ![b](pareto.png)", results, "results.md") == "[a](log.md) ![b](images/pareto.png)"
    )
    guide = ROOT / "docs" / "how-to" / "gpu.md"
    assert pages.relinked("[a](../../benchmarks/RESULTS.md#b)", guide, "how-to/gpu.md") == "[a](../results.md#b)"
    for link in ("[a](https://example.org/x)", "[a](#x)", "[a](../start/serve.md)", "[a](../../src/none.py)"):
        assert pages.relinked(link, guide, "how-to/gpu.md") == link


def test_pages_from_other_folders_exist_and_are_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    site = hook().SITE
    assert [path for path in site if not path.is_file()] == []
    assert {page for page in site.values() if page.endswith(".md")} <= listed
