"""A hub without a network: a cache folder in its layout, and an interface that records what is requested of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import LocalEntryNotFoundError

COMMIT = "a" * 40


def entry(id: Any, *tags: Any, downloads: Any = 1, total: Any = None) -> SimpleNamespace:
    """A model as the hub lists it."""
    sizes = None if total is None else SimpleNamespace(total=total)
    return SimpleNamespace(id=id, tags=list(tags), downloads=downloads, safetensors=sizes)


class FakeHub:
    """Replaces the hub's cache and every request. online: False while requests are switched off."""

    answers = True
    """False if nothing is at the hub's address."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path, *, online: bool = True) -> None:
        self.cache, self.requests = cache, list[str]()
        self.listed: Callable[[list[str]], Iterable[Any]] = lambda filters: []
        self.downloads: dict[str, Mapping[str, bytes]] = {}
        self.uploaded: dict[str, bytes] = {}
        self._real = huggingface_hub.snapshot_download
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", not online)
        for name in ("snapshot_download", "get_hf_file_metadata"):
            monkeypatch.setattr(huggingface_hub, name, getattr(self, f"_{name}"))
        monkeypatch.setattr(huggingface_hub.utils, "get_session", lambda: SimpleNamespace(head=self._head))
        for name in ("list_models", "create_repo", "upload_folder"):
            monkeypatch.setattr(huggingface_hub.HfApi, name, getattr(self, f"_{name}"))

    def store(self, repo: str, files: Mapping[str, bytes | Mapping[str, Any]]) -> Path:
        """Put a repository into the cache; a mapping becomes JSON."""
        root = self.cache / f"models--{repo.replace('/', '--')}"
        folder = root / "snapshots" / COMMIT
        folder.mkdir(parents=True)
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(COMMIT)
        for name, content in files.items():
            (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return folder

    def _snapshot_download(self, repo: str, *, local_files_only: bool = False, **more: Any) -> str:
        if local_files_only or constants.HF_HUB_OFFLINE:
            return self._real(repo, local_files_only=True, cache_dir=self.cache)
        self.requests.append(f"download {repo}")
        if repo in self.downloads:
            self.store(repo, self.downloads.pop(repo))
        try:
            return self._real(repo, local_files_only=True, cache_dir=self.cache)
        except LocalEntryNotFoundError:
            raise OSError("no route to the hub") from None

    def _head(self, url: str, *, timeout: float) -> None:
        if not self.answers:
            raise OSError("[Errno 111] Connection refused")

    def _get_hf_file_metadata(self, url: str, **more: Any) -> None:
        self.requests.append(f"look at {url}")
        raise OSError("no route to the hub")

    def _list_models(self, *, filter: list[str], **more: Any) -> Iterable[Any]:
        self.requests.append(f"list {' '.join(filter)}")
        return self.listed(filter)

    def _create_repo(self, repo: str, **more: Any) -> None:
        self.requests.append(f"create {repo}")

    def _upload_folder(self, *, repo_id: str, folder_path: str, allow_patterns: list[str], **more: Any) -> None:
        self.requests.append(f"upload {repo_id}")
        self.uploaded = {name: (Path(folder_path) / name).read_bytes() for name in allow_patterns}
