"""scripts/recording: the SVG of a terminal, of which docs/images has one."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
NAMES: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "recording"))


def test_the_picture_is_small_and_shows_the_task_done() -> None:
    svg = NAMES["PICTURE"].read_text(encoding="utf-8")
    _, *runs = (one.text for one in ElementTree.fromstring(svg) if one.text)  # after the style
    text, task = "".join(runs).replace(" ", ""), NAMES["TASK"].read_text(encoding="utf-8").splitlines()[0]
    assert "prefers-color-scheme: dark" in svg and len(svg) < 150_000 and task.replace(" ", "") in text
    assert "methodtokens" in text and "DIFFERENT" not in text
