"""Print docs/reference/published-drafts.md: the table of published drafts, and which of them foresay decodes."""

from __future__ import annotations

from foresay.models.sources.published import PREFERRED, PublishedDraft, table

INTRODUCTION = """# Published drafts

<!-- written by scripts/published_drafts.py; do not edit -->

{count} drafts for {targets} targets, as their pages on the hub reported them: facts, not a recommendation, and none of them is
tested by foresay's own tests, which have no network. `foresay drafts MODEL` adds what the hub and your cache have, with sizes,
licences and costs; [Choose a drafter](../how-to/choose-a-drafter.md) explains the kinds. A draft in the second column has a kind
that foresay decodes; its configuration is read when it is loaded, and a part that is not supported is then named.

| target | drafts of kinds that are decoded | others |
|---|---|---|
"""


def _cell(drafts: list[PublishedDraft], *, reasons: bool) -> str:
    lines = []
    for one in sorted(drafts, key=lambda one: one.rank):
        repo = "its own layers" if one.kind == "mtp" else f"[{one.repo}](https://huggingface.co/{one.repo})"
        lines.append(f"{one.kind}: {repo}{f' ({one.refusal})' if reasons else ''}")
    return "<br>".join(lines)


def page() -> str:
    rows = []
    for target in sorted(table().values(), key=lambda one: one.name.casefold()):
        decoded = [one for one in target.drafts if one.refusal is None]
        others = [one for one in target.drafts if one.refusal is not None]
        rows.append(f"| {target.name} | {_cell(decoded, reasons=False)} | {_cell(others, reasons=True)} |\n")
    count = sum(len(one.drafts) for one in table().values())
    order = ", ".join(f"`{kind}`" for kind in PREFERRED)
    end = f"\n`--drafter published` takes a draft that is in the cache, else the first kind of this order: {order}.\n"
    return INTRODUCTION.format(count=count, targets=len(rows)) + "".join(rows) + end


if __name__ == "__main__":
    print(page(), end="")
