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

TIMEOUT_S, _CONNECT_S = 8.0, 4.0
"""Time for all requests of a listing together, and for the first answer."""
_MAX_TARGETS, _MAX_LISTED, _MAX_TAGS, _MAX_CACHED = 3, 50, 200, 2000
_KINDS = tuple(kind for kind in PREFERRED if kind not in ("assistant", "model", "mtp"))
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


def weight_bytes(folder: Path, suffixes: tuple[str, ...] = (".safetensors", ".gguf")) -> int:
    """Return the size of the files in a folder whose names end like weight files; 0 if there is none."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.name.endswith(suffixes) and file.is_file())


def cached_repositories() -> Iterator[tuple[str, Path]]:
    """Yield the models of the hub's cache with their folders, in the order of their names."""
    from huggingface_hub import constants

    try:
        # in the library's layout; its own scan also sums the sizes of all files, which takes much longer
        names = sorted(one.name for one in Path(constants.HF_HUB_CACHE).glob("models--*--*"))
    except OSError:
        return
    for name in names[:_MAX_CACHED]:
        repo = name.removeprefix("models--").replace("--", "/")
        folder = cached_folder(repo) if re.fullmatch(REPOSITORY, repo) else None
        if folder is not None:
            yield repo, folder


def list_drafts(targets: Sequence[str]) -> tuple[list[tuple[PublishedDraft, str]], str | None]:
    """Request the drafts that name one of these targets as their base model, the most downloaded first.

    Returns them with their targets, and None, or the reason for which there are none or not all: offline, no answer, or no answer
    in time.
    """
    if is_offline():
        return [], "offline (HF_HUB_OFFLINE)"
    found: list[tuple[str, Any]] = []
    failed: list[str] = []
    ended = threading.Event()

    def request() -> None:
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session

        try:
            get_session().head(constants.ENDPOINT, timeout=_CONNECT_S)  # list_models would try again without a network
            for target, tag in itertools.product(targets[:_MAX_TARGETS], _TAGS):
                if ended.is_set():
                    return
                found.extend((target, one) for one in itertools.islice(_listed(target, tag), _MAX_LISTED))
        except Exception as error:  # any exception of the network library
            text = "".join(one if one.isprintable() else " " for one in str(error))
            failed.append(" ".join(text.split())[:200] or type(error).__name__)

    thread = threading.Thread(target=request, daemon=True)  # list_models has no timeout
    thread.start()
    thread.join(TIMEOUT_S)
    ended.set()
    late = f"no answer within {TIMEOUT_S:g} s" if thread.is_alive() else None
    drafts: dict[str, tuple[int, str, PublishedDraft]] = {}
    for target, entry in found[:]:
        if (read := _read(entry)) is not None:
            drafts.setdefault(read[0].repo, (-read[1], target, read[0]))
    ordered = sorted(drafts.values(), key=lambda one: (one[0], one[2].repo))
    return [(draft, target) for _, target, draft in ordered], late or (f"no answer ({failed[0]})" if failed else None)


def _listed(target: str, tag: str) -> Iterable[Any]:
    from huggingface_hub import HfApi

    wanted, filters = ["downloads", "safetensors", "tags"], [f"base_model:{target}", tag]
    found: Iterable[Any] = HfApi().list_models(filter=filters, limit=_MAX_LISTED, sort="downloads", expand=wanted)
    return found


def _read(one: Any) -> tuple[PublishedDraft, int] | None:
    """Return a draft that the hub lists, with its downloads; None for anything else."""
    repo, tags = getattr(one, "id", None), getattr(one, "tags", None)
    if not isinstance(repo, str) or not re.fullmatch(REPOSITORY, repo) or not isinstance(tags, list):
        return None
    known = [tag for tag in tags[:_MAX_TAGS] if isinstance(tag, str)]
    lowered = {tag.casefold() for tag in known}
    kind = next((kind for kind in _KINDS if kind in lowered), None)
    if kind is None:
        return None
    draft = PublishedDraft(
        repo=repo,
        kind=kind,
        parameters=_size(getattr(getattr(one, "safetensors", None), "total", None)),
        license=_license(known),
        files="safetensors" if "safetensors" in lowered else "gguf" if "gguf" in lowered else "unknown",
    )
    return draft, _size(getattr(one, "downloads", None)) or 0


def _size(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= _MAX_BYTES else None


def _license(tags: Sequence[str]) -> str | None:
    found = (tag.partition(":")[2] for tag in tags if tag.startswith("license:"))
    return next((one for one in found if re.fullmatch(LICENSE, one)), None)
