"""The hub's cache on this machine, and the models that the hub lists for a base model.

Owns the limits on what is taken from either: number of entries, sizes of files, patterns of names, and time. An entry that does
not fit is left out. Requests are made by `list_drafts` alone.
"""

from __future__ import annotations

import itertools
import re
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from foresay.models.sources.published import LICENSE, PREFERRED, REPOSITORY, PublishedDraft

TIMEOUT_S = 8.0
"""Time for all requests of a listing together."""
_MAX_LISTED, _MAX_TAGS, _MAX_CACHED = 50, 200, 2000
_KINDS = tuple(kind for kind in PREFERRED if kind not in ("model", "mtp"))
_TAGS = ("speculative-decoding", *_KINDS)
"""Tags of drafts on the hub; a request for each, as not all have the first one."""
_MAX_BYTES = 2**53


def is_offline() -> bool:
    """Return True if requests are switched off (HF_HUB_OFFLINE)."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def cached_folder(repo: str) -> Path | None:
    """Return the folder of a repository's files in the hub's cache; None if they are not there."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, local_files_only=True))
    except Exception:  # any error of the library: the name, the cache, a missing repository
        return None


def weight_bytes(folder: Path) -> int:
    """Return the size of the weight files in a folder; 0 if there is none."""
    files = itertools.chain(folder.glob("*.safetensors"), folder.glob("*.gguf"))
    return sum(file.stat().st_size for file in files if file.is_file())


def cached_repositories() -> Iterator[tuple[str, Path]]:
    """Yield the models of the hub's cache with their folders, in the order of their names."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = sorted(scan_cache_dir(constants.HF_HUB_CACHE).repos, key=lambda one: str(one.repo_id))
    except CacheNotFound:
        return
    for one in repositories[:_MAX_CACHED]:
        if one.repo_type == "model" and re.fullmatch(REPOSITORY, one.repo_id):
            folder = cached_folder(one.repo_id)
            if folder is not None:
                yield one.repo_id, folder


def list_drafts(targets: Sequence[str]) -> tuple[list[PublishedDraft], str | None]:
    """Request the drafts that name one of these targets as their base model, the most downloaded first.

    Returns them with None, or with the reason for which there are none or not all: offline, no answer, or no answer in time.
    """
    if is_offline():
        return [], "offline (HF_HUB_OFFLINE)"
    found: list[Any] = []
    failed: list[str] = []

    def request() -> None:
        try:
            for target, tag in itertools.product(targets, _TAGS):
                found.extend(itertools.islice(_listed(target, tag), _MAX_LISTED))
        except Exception as error:  # any exception of the network library
            text = "".join(one if one.isprintable() else " " for one in str(error))
            failed.append(" ".join(text.split())[:200] or type(error).__name__)

    thread = threading.Thread(target=request, daemon=True)  # the library sets no timeout, and tries again for a minute
    thread.start()
    thread.join(TIMEOUT_S)
    late = f"no answer within {TIMEOUT_S:g} s" if thread.is_alive() else None
    drafts = {one.repo: (downloads, one) for one, downloads in _read(found[:])}
    ordered = [one for _, one in sorted(drafts.values(), key=lambda pair: (-pair[0], pair[1].repo))]
    return ordered, late or (f"no answer ({failed[0]})" if failed else None)


def _listed(target: str, tag: str) -> Iterable[Any]:
    from huggingface_hub import HfApi

    wanted, filters = ["downloads", "safetensors", "tags"], [f"base_model:{target}", tag]
    found: Iterable[Any] = HfApi().list_models(filter=filters, limit=_MAX_LISTED, sort="downloads", expand=wanted)
    return found


def _read(entries: Sequence[Any]) -> Iterator[tuple[PublishedDraft, int]]:
    """Yield the drafts among the hub's entries, with their downloads."""
    for one in entries:
        repo, tags = getattr(one, "id", None), getattr(one, "tags", None)
        if not isinstance(repo, str) or not re.fullmatch(REPOSITORY, repo) or not isinstance(tags, list):
            continue
        known = [tag for tag in tags[:_MAX_TAGS] if isinstance(tag, str)]
        lowered = {tag.casefold() for tag in known}
        kind = next((kind for kind in _KINDS if kind in lowered), None)
        if kind is None:
            continue
        downloads = getattr(one, "downloads", None)
        yield (
            PublishedDraft(
                repo=repo,
                kind=kind,
                parameters=_size(getattr(getattr(one, "safetensors", None), "total", None)),
                license=_license(known),
                files="safetensors" if "safetensors" in lowered else "gguf" if "gguf" in lowered else "unknown",
            ),
            downloads if isinstance(downloads, int) else 0,
        )


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_BYTES else None


def _license(tags: Sequence[str]) -> str | None:
    found = (tag.partition(":")[2] for tag in tags if tag.startswith("license:"))
    return next((one for one in found if re.fullmatch(LICENSE, one)), None)
