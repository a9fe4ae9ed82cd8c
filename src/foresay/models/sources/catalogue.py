"""The drafts for one model: what is installed, published, cached here and listed by the hub; their costs, and the best of them.

Owns the order of choice: a draft that is in the cache before one that is not, then the kind, then the order of the sources.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from foresay.errors import ForesayError, ModelNotFoundError
from foresay.models.drafts.kinds import drafter_of, kind_of, refusal
from foresay.models.sources import hub
from foresay.models.sources.base_models import card_bases, read_values
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.location import find
from foresay.models.sources.packaged import DEFAULT_DRAFTERS, WITH_MTP, packaged_head
from foresay.models.sources.published import KIND, PublishedDraft, table

logger = logging.getLogger("foresay")
PUBLISHED = "published"
"""Name of the choice of the best known draft, in place of a drafter's expression."""


@dataclass(frozen=True, slots=True)
class Found:
    """A draft for a model, and its state on this machine."""

    draft: PublishedDraft
    target: str
    """Name of the target that it was published for."""
    source: Literal["package", "table", "cache", "hub"]
    folder: Path | None
    """Folder of its files here; None if it would be downloaded."""
    refusal: str | None
    """Reason for which foresay does not decode it; None if it does, as far as its files or its kind show."""
    name: str
    """Name that a drafter's expression takes: the repository, or a GGUF file that is here."""
    cost: float | None
    """Bytes that a pass of the draft reads / bytes that a pass of the target reads; None if either is not known."""

    @property
    def drafter(self) -> str:
        """Expression that drafts with it, after matches in the text."""
        name = drafter_of(self.draft.kind)
        if self.source == "package" and self.draft.repo in DEFAULT_DRAFTERS:
            return DEFAULT_DRAFTERS[self.draft.repo]
        given = self.name if re.fullmatch(r"[^\s,;()\[\]='\"]+", self.name) else f'"{self.name}"'
        return WITH_MTP if name == "mtp" else f"hybrid(suffix, {name}({given}))"

    @property
    def per(self) -> str:
        """Unit of draft tokens that one pass of the draft yields."""
        return "block" if drafter_of(self.draft.kind) == "block" else "token"

    @property
    def _order(self) -> tuple[bool, bool, int]:
        return self.draft.kind == "mtp", self.folder is None, self.draft.rank


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The drafts for a model."""

    model: str
    targets: tuple[str, ...]
    """Names of the model, and of those it was made from, on the hub."""
    found: tuple[Found, ...]
    """The best first."""
    hub: str | None
    """Reason for which the hub's own list is missing or incomplete; None if it is complete."""

    @property
    def best(self) -> Found | None:
        """The first draft that foresay decodes."""
        return next((one for one in self.found if one.refusal is None), None)


def catalogue(model: str, *, search_hub: bool) -> Catalogue:
    """Collect the drafts for a model: an alias, a hub id, a folder or a GGUF file.

    search_hub: request the hub's list, too; otherwise nothing leaves this machine.
    """
    source = find(model)
    targets = source.hub_names()
    listed, problem = hub.list_drafts(targets) if search_hub and targets else ([], None)
    entries = [*_packaged(model), *_of_table(targets), *_cached(targets), *((*pair, "hub") for pair in listed)]
    size, seen = source.read_bytes() or _active_bytes(targets), dict[str, Found]()
    for draft, target, origin in entries:
        if draft.repo.casefold() not in seen:
            seen[draft.repo.casefold()] = _found(draft, target, origin, size)
    ordered = sorted(seen.values(), key=lambda one: (one.refusal is not None, one._order))
    return Catalogue(model, targets, tuple(ordered), problem)


_Entry = tuple[PublishedDraft, str, Literal["package", "table", "cache", "hub"]]


def _packaged(model: str) -> Iterator[_Entry]:
    """The draft head of an alias, if its package is installed."""
    if packaged_head(model) is not None:
        draft = PublishedDraft.model_construct(repo=model, kind="eagle3", license="Apache-2.0", tested=True)
        yield draft, model, "package"


def _of_table(targets: Sequence[str]) -> Iterator[_Entry]:
    known = table()
    for name in targets:
        if (entry := known.get(name.casefold())) is not None:
            yield from ((draft, entry.name, "table") for draft in entry.drafts)


def _cached(targets: Sequence[str]) -> Iterator[_Entry]:
    """Drafts in the hub's cache whose configuration or model card names one of the targets."""
    wanted = {name.casefold(): name for name in targets}
    for repo, folder in hub.cached_repositories() if wanted else ():
        values = read_values(folder)
        kind = kind_of(values)
        if kind is None or not re.fullmatch(KIND, kind):
            continue
        speculators = values.get("speculators_config")
        verifier = speculators.get("verifier") if isinstance(speculators, dict) else None
        named = [verifier.get("name_or_path") if isinstance(verifier, dict) else None, *card_bases(folder)]
        target = next(
            (wanted[one.casefold()] for one in named if isinstance(one, str) and one.casefold() in wanted), None
        )
        if target is not None:
            yield PublishedDraft(repo=repo, kind=kind), target, "cache"


def _found(
    draft: PublishedDraft, target: str, source: Literal["package", "table", "cache", "hub"], size: int | None
) -> Found:
    """Look at a draft's files, if they are here."""
    folder = packaged_head(draft.repo) if source == "package" else hub.cached_folder(draft.repo)
    files = folder.glob("*.gguf") if folder is not None and draft.files == "gguf" else ()
    file = max(files, key=lambda one: one.stat().st_size, default=None)  # the least rounded
    stored = file.stat().st_size if file else 0 if folder is None else hub.weight_bytes(folder)
    if not stored:
        folder = None
    elif draft.kind != "mtp":
        draft = draft.model_copy(update={"bytes": stored})
    reason = draft.refusal if file is None or drafter_of(draft.kind) is None else None
    if reason is None and folder is not None and file is None and drafter_of(draft.kind) in ("head", "block"):
        reason = refusal(read_values(folder))
    cost = None if draft.kind == "mtp" or draft.size is None or not size else draft.size / size
    return Found(draft, target, source, folder, reason, str(file or draft.repo), cost)


def _active_bytes(targets: Sequence[str]) -> int | None:
    """Bytes that one pass of a mixture of experts reads: its active parameters in 16 bits, if the table has them."""
    known = (table().get(name.casefold()) for name in targets)
    active = next((one.active_parameters for one in known if one is not None and one.active_parameters), None)
    return 2 * active if active else None


def published_drafter(model: str, options: LoadOptions) -> str:
    """Return the expression of the best known draft of a model, whose files are then here or can be reached.

    A draft that is not in the cache is downloaded; the hub is searched if the table and the cache have none. Raises
    ModelNotFoundError, which names the model, if no draft is known or none can be reached.
    """
    whole, refused = catalogue(model, search_hub=False), dict[str, str]()
    if _choice(whole, options) is None:
        whole = catalogue(model, search_hub=True)
    while (chosen := _choice(whole, options, refused)) is not None:
        try:
            reason = _fetched(chosen, options)
        except ModelNotFoundError as error:
            raise ModelNotFoundError(f"the published draft of {model!r} cannot be loaded: {error}") from error
        if reason is None:
            return chosen.drafter
        logger.warning("the published draft %s is not used: %s", chosen.draft.repo, reason)
        refused[chosen.draft.repo] = reason
    known = [
        f"{one.draft.repo} ({one.refusal or refused.get(one.draft.repo) or 'not in the cache'})" for one in whole.found
    ]
    listed = f"; known: {', '.join(known[:5])}" if known else ""
    searched = f"; the hub: {whole.hub}" if whole.hub else ""
    raise ModelNotFoundError(
        f"no published draft of {model!r} that can be used here is known{listed}{searched}; name a drafter instead"
    )


def _fetched(chosen: Found, options: LoadOptions) -> str | None:
    """Download a draft that is not here; return the reason for which its configuration, which comes first, is refused.

    Raises ModelNotFoundError if the hub does not give it.
    """
    if chosen.folder is not None or chosen.draft.kind == "mtp":
        return None
    if chosen.draft.kind == "model":
        find(chosen.draft.repo).fetched(options.for_draft())
        return None
    from foresay.models.sources.drafts import fetched  # which imports transformers

    if drafter_of(chosen.draft.kind) in ("head", "block"):
        reason = refusal(read_values(Path(fetched(chosen.draft.repo, None, ["config.json"]))))
        if reason is not None:
            return reason
    fetched(chosen.draft.repo, None)
    return None


def _choice(whole: Catalogue, options: LoadOptions, but: Container[str] = ()) -> Found | None:
    """Return the first draft that these options can decode; without requests, one that is in the cache. but: those left out."""
    each = (one for one in whole.found if one.refusal is None and one.draft.repo not in but)
    return next((one for one in each if _usable(one, options)), None)


def _usable(one: Found, options: LoadOptions) -> bool:
    reads_states = drafter_of(one.draft.kind) != "model"
    reachable = one.folder is not None or one.draft.kind == "mtp" or not hub.is_offline()
    return reachable and (options.exposes_hidden_states or not reads_states)


def suggestion(model: str, options: LoadOptions) -> Found | None:
    """Return the best published draft of a model whose default drafter uses none; without a request, and never an error."""
    try:
        found = _choice(catalogue(model, search_hub=False), options)
    except (ForesayError, OSError):
        return None
    return None if found is None or found.draft.kind == "mtp" or found.source == "package" else found
