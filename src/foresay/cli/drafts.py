"""`foresay drafts MODEL`: the drafts that exist for a model, and the note that one exists."""

from __future__ import annotations

import json
from typing import Any

import click

from foresay.cli.command import Given
from foresay.cli.common import target_options
from foresay.cli.progress import loading, note
from foresay.cli.tables import show_table
from foresay.generation.generator import Generator
from foresay.models.sources.catalogue import PUBLISHED, Catalogue, Found, catalogue, published_drafter, suggestion
from foresay.spec.recipes import read_drafter

HEADINGS = ("draft", "kind", "size", "licence", "here", "decoded", "cost")


def run(given: Given) -> int:
    """Run the command."""
    name, _ = target_options(given)
    with loading(f"Searching drafts for {name}"):
        found = catalogue(name, search_hub=True)
    if given.json:
        click.echo(json.dumps(_record(found), ensure_ascii=False, indent=1))
        return 0
    click.echo(_title(found))
    if found.found:
        show_table(HEADINGS, [_row(one) for one in found.found])
    refused = {one.refusal for one in found.found if one.refusal is not None}
    for reason in sorted(refused):
        click.echo(
            f"not decoded: {reason} ({', '.join(one.draft.repo for one in found.found if one.refusal == reason)})"
        )
    if found.hub is not None:
        click.echo(f"the hub's list is missing: {found.hub}; this is the table of this version and the cache")
    if (best := found.best) is not None:
        click.echo(f"draft with the first: --drafter {PUBLISHED}, or --drafter '{best.drafter}'")
    return 0


def suggest(generator: Generator) -> None:
    """Print one line on stderr if a draft is published for a target whose default drafter only copies from the text."""
    resources = generator.resources
    if resources is None or not generator.has_default_drafter or read_drafter(generator.drafter_name).reads_target:
        return
    found = suggestion(resources.target.name, resources.options)
    if found is not None:
        size = (
            "in the cache"
            if found.folder
            else "to be downloaded"
            if found.draft.size is None
            else f"{_size(found)} to download"
        )
        note(
            f"foresay: a draft is published for {found.target}: {found.draft.repo} ({found.draft.kind}, {size}); "
            f"use it with --drafter {PUBLISHED}"
        )


def found_draft(given: Given) -> str:
    """Return the expression of the best published draft for the model of the options."""
    return published_drafter(*target_options(given))


def _title(found: Catalogue) -> str:
    if not found.targets:
        return f"{found.model}: it names no model of the hub, so no draft is known; give the hub id of its base model"
    base = ", ".join(name for name in found.targets if name != found.model)
    count = len(found.found)
    return f"{found.model}{f' (made from {base})' if base else ''}: {count or 'no'} draft{'s' * (count != 1)}"


def _row(one: Found) -> tuple[str, ...]:
    return (
        one.draft.repo,
        one.draft.kind,
        _size(one),
        one.draft.license or "?",
        "yes" if one.folder else "no",
        "no" if one.refusal else "yes, tested" if one.draft.tested else "yes",
        "?" if one.cost is None else f"{one.cost:.1%} a {one.per}",
    )


def _size(one: Found) -> str:
    size = one.draft.size
    return "?" if size is None else f"{size / 1e9:.2f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"


def _record(found: Catalogue) -> dict[str, Any]:
    drafts = [
        {
            **one.draft.model_dump(),
            "target": one.target,
            "source": one.source,
            "folder": None if one.folder is None else str(one.folder),
            "decoded": one.refusal is None,
            "refusal": one.refusal,
            "cost": one.cost,
            "cost_per": None if one.cost is None else one.per,
            "drafter": one.drafter if one.refusal is None else None,
        }
        for one in found.found
    ]
    return {"model": found.model, "targets": list(found.targets), "hub": found.hub, "drafts": drafts}
