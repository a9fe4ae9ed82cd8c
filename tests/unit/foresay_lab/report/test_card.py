"""The model card of a draft: its metadata, what it shows of a note and of results, and that nothing of them becomes markup."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from huggingface_hub import metadata_load

from foresay.records.results import Cell, Results, Run
from foresay_lab.report.card import RELATION, model_card

FACTS: dict[str, Any] = {
    "repo": "me/draft",
    "base_model": "org/target",
    "kind": "dspark",
    "drafter": "hybrid(suffix, block(me/draft))",
    "layers": (1, 5, 9),
    "draft_tokens": 32000,
    "weight_bytes": 12_345_678,
}
HOSTILE = "<img src=x onerror=1> | [x](http://evil.example) `a`\n# b\n---\nlicense: mit"
"""A text that would break a table, a link, code and the metadata."""
MARKUP = re.compile(r"<img|(?<!\\)\]\(http://evil|(?<!\\)`a|\n# b")


def results(method: str, **provenance: Any) -> Results:
    cells = [(Cell("plain", "shipped", 1), 2.0), (Cell(method, "shipped", 1), 1.0)]
    runs = [Run(cell, 0, seconds, 100, plain_seconds=2.0, identical=True) for cell, seconds in cells]
    return Results({}, provenance, runs)


def test_metadata_and_text(tmp_path: Path) -> None:
    card = model_card(**FACTS, license="mit")
    (tmp_path / "README.md").write_text(card)
    assert metadata_load(tmp_path / "README.md") == {
        "base_model": "org/target",
        "base_model_relation": RELATION,
        "library_name": "foresay",
        "license": "mit",
        "tags": ["foresay", "speculative-decoding", "draft-model", "dspark"],
    }
    assert RELATION in ("adapter", "merge", "quantized", "finetune"), "one of those in the hub's documentation"
    for line in (
        "# me/draft",
        "- reads layers 1, 5, 9 of the target",
        "- drafts 32,000 different tokens",
        "- weights: 12.3 MB",
        'foresay generate "Name three rivers." -m org/target --drafter "hybrid(suffix, block(me/draft))"',
        "No note about the training was given.",
        "No measurement was given.",
    ):
        assert f"\n{line}\n" in card


def test_what_a_note_reports() -> None:
    note = {
        "texts": 15680,
        "tokens": 1617301,
        "minutes": 72.5,
        "seed": 0,
        "held_out": {"tokens_per_pass": 2.31375, "loss": 1.81639, "other": 7},
        "provenance": {"versions": {"torch": "2.13.0"}, "arguments": ["/home/me"], "machine": {"processor": "x"}},
        "prompts": ["private.jsonl"],
    }
    card = model_card(**FACTS, note=note)
    for line in (
        "- texts: 15,680",
        "- minutes of training: 72.5",
        "- on held-out texts: tokens_per_pass 2.314, loss 1.816",
        "- versions: torch 2.13.0",
    ):
        assert f"\n{line}\n" in card
    assert "private" not in card and "/home/me" not in card


def test_a_hostile_note_becomes_no_markup(tmp_path: Path) -> None:
    notes: list[dict[str, Any]] = [
        {"texts": HOSTILE, "tokens": [1], "minutes": True, "seed": 1e300},
        {"held_out": HOSTILE, "provenance": HOSTILE},
        {"held_out": {"loss": HOSTILE}, "provenance": {"versions": [HOSTILE]}},
        {"provenance": {"versions": {HOSTILE: HOSTILE, "torch": 7}}},
        {"held_out": {"loss": float("nan")}},
    ]
    for note in notes:
        card = model_card(**FACTS, note=note)
        assert MARKUP.search(card) is None and "nan" not in card
        (tmp_path / "README.md").write_text(card)
        assert "license" not in (metadata_load(tmp_path / "README.md") or {})


def test_the_measured_table() -> None:
    found = results("head(/home/me/out), 3", machine={"processor": "EPYC", "cores": 2, "odd": ["x"]})
    card = model_card(**FACTS, results=found, names={"/home/me/out": "me/draft"})
    assert "| head(me/draft), 3 | shipped | 1 | greedy | 2.00x |" in card and "| plain | shipped |" in card
    assert "/home/me" not in card and "\nMachine: processor: EPYC, cores: 2.\n" in card
    card = model_card(**FACTS, results=results(HOSTILE, machine={HOSTILE: HOSTILE}))
    row = next(line for line in card.splitlines() if "onerror" in line)
    assert row.startswith("| &lt;img") and row.replace("\\|", "").count("|") == 10
    assert MARKUP.search(card) is None
