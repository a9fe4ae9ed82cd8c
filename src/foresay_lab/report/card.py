"""The model card of a published draft: its metadata for the hub, and what its note and a results file report, as Markdown.

Owns the template, and which values of a note are shown. Everything from a file is escaped, and a value of another type than the
expected one is left out. Knows no network.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from foresay.records.results import Results
from foresay_lab.report.table import COLUMNS, NAMES, TABLE_NOTE, rows

RELATION = "adapter"
"""The hub accepts adapter, merge, quantized and finetune; a draft consists of weights that work only with their base model."""
_SHOWN = ("batch", "sampling", "speed-up", "tokens per pass", "acceptance rate", "identical", "exact")
_COUNTS = {"texts": "texts", "tokens": "tokens", "minutes": "minutes of training", "seed": "seed"}
_HELD_OUT = ("tokens_per_pass", "divergence", "acceptance_1", "acceptance_2", "acceptance_3", "loss")


def model_card(
    *,
    repo: str,
    base_model: str,
    kind: str,
    drafter: str,
    layers: Sequence[int],
    draft_tokens: int,
    weight_bytes: int,
    license: str | None = None,
    note: Mapping[str, Any] | None = None,
    results: Results | None = None,
    names: Mapping[str, str] | None = None,
) -> str:
    """Return the card of a draft, a README.md. Names of repositories are those of the hub.

    kind: published name of the kind, such as eagle3. drafter: expression that drafts with it. draft_tokens: number of different
    tokens that it can draft. names: texts in the names of methods that are replaced, such as the path of a folder.
    """
    from huggingface_hub import ModelCardData

    values: dict[str, Any] = {
        "base_model": base_model,
        "base_model_relation": RELATION,
        "library_name": "foresay",
        "license": license,
        "tags": ["foresay", "speculative-decoding", "draft-model", kind],
    }
    metadata = ModelCardData(**{name: value for name, value in values.items() if value is not None}).to_yaml()
    base = f"[{escaped(base_model)}](https://huggingface.co/{base_model})"
    parts = [
        f"---\n{metadata.strip()}\n---",
        f"# {escaped(repo)}",
        f"A draft ({escaped(kind)}) for speculative decoding with {base}. It proposes tokens, and the target keeps those "
        "that it would have generated itself: the output is the target's own.",
        f"- reads layers {', '.join(map(str, layers))} of the target\n- drafts {draft_tokens:,} different tokens\n"
        f"- weights: {weight_bytes / 1e6:.1f} MB",
        f'```bash\nforesay generate "Name three rivers." -m {base_model} --drafter "{drafter}"\n```',
        "## Training",
        "\n".join(_of_note(note or {})) or "No note about the training was given.",
        "## Measured",
        *(_measured(results, names or {}) if results else ["No measurement was given."]),
    ]
    return "\n\n".join(parts) + "\n"


def _of_note(note: Mapping[str, Any]) -> Iterator[str]:
    """Lines about how a draft was made."""
    for name, unit in _COUNTS.items():
        if _is_number(note.get(name)):
            yield f"- {unit}: {note[name]:,}"
    held_out = note.get("held_out")
    if isinstance(held_out, Mapping):
        found = [f"{escaped(name)} {held_out[name]:.4g}" for name in _HELD_OUT if _is_number(held_out.get(name))]
        if found:
            yield f"- on held-out texts: {', '.join(found)}"
    origin = note.get("provenance")
    versions = origin.get("versions") if isinstance(origin, Mapping) else None
    if isinstance(versions, Mapping):
        shown = [f"{escaped(name)} {escaped(one)}" for name, one in list(versions.items())[:10] if isinstance(one, str)]
        yield f"- versions: {', '.join(shown)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18


def _measured(results: Results, names: Mapping[str, str]) -> Iterator[str]:
    """The measured table, and the machine that it was measured on."""
    columns = [*NAMES[:2], *_SHOWN]
    table = [columns, [":---" if name in NAMES else "---:" for name in columns]]
    for row in rows(results):
        cells = [COLUMNS[name](row) for name in columns]
        for old, new in names.items():
            cells[0] = cells[0].replace(old, new)
        table.append([escaped(cell) for cell in cells])
    yield "\n".join(f"| {' | '.join(row)} |" for row in table)
    yield TABLE_NOTE
    machine = results.provenance.get("machine")
    if isinstance(machine, Mapping):
        shown = [
            f"{escaped(name)}: {escaped(one)}" for name, one in list(machine.items())[:8] if isinstance(one, str | int)
        ]
        yield f"Machine: {', '.join(shown)}."


def escaped(value: Any) -> str:
    """Escape all Markdown syntax in a text."""
    text = escape(" ".join(str(value).split()), quote=False)
    text = re.sub(r"([\\`*\[\]|~]|(?<!\w)_|_(?!\w))", r"\\\1", text)
    return re.sub(r"^(?=[#+-])", r"\\", text) if text != "-" else text
