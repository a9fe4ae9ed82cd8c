"""scripts/recording: the SVG of a terminal, of which docs/images has one."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
NAMES: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "recording"))


def shown(svg: str) -> list[tuple[str, str | None, str | None]]:
    """Text, class and style of each run of characters."""
    return [(one.text or "", one.get("class"), one.get("style")) for one in ElementTree.fromstring(svg) if one.text]


def test_lines_colours_and_times_are_those_of_the_terminal() -> None:
    done = [(0.0, "$ a <b>\n"), (0.2, "\x1b[32m  kept\x1b[0m \x1b[1;31mgone\x1b[0m"), (9.0, "x" * 75)]
    [style, *runs] = shown(NAMES["drawn"](done))
    assert "prefers-color-scheme: dark" in style[0]
    late = "animation-delay:0.7s"
    assert runs == [
        ("$ a <b>", None, None),
        ("kept", "g", "animation-delay:0.2s"),
        ("gone", "b r", "animation-delay:0.2s"),
        ("x" * 69, None, late),
        ("x" * 6, None, late),
    ]


def test_the_picture_is_small_and_shows_the_task_done() -> None:
    svg = NAMES["PICTURE"].read_text(encoding="utf-8")
    text = "".join(run[0] for run in shown(svg)[1:])
    assert len(svg) < 150_000 and NAMES["TASK"].read_text(encoding="utf-8").splitlines()[0].replace(
        " ", ""
    ) in text.replace(" ", "")
    assert "methodtokens" in text.replace(" ", "") and "DIFFERENT" not in text
