"""A model's name -> where its files are. A name is resolved once, and a GGUF file's header is read once.

A name is an alias, a hub id, a local folder or a GGUF file. Reads no configuration, weights or tokenizer.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foresay.errors import ModelLoadError, ModelNotFoundError, UnknownNameError, shown
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.values import DRAFTS, checked_header
from foresay.models.sources.hub import cached_folder, is_offline
from foresay.models.sources.load_options import LLAMA_CPP, LoadOptions
from foresay.models.sources.packaged import ALIASES, converted, packaged_file

_HUB_TIMEOUT_S = 10.0
_TOKENIZER_FILES = ("tokenizer", "tokenization", "vocab", "spiece", "sentencepiece", "source.spm")


@dataclass(frozen=True, slots=True)
class Location:
    """Files of a model: a folder or hub id, or a GGUF file in a folder."""

    name: str
    """As the user gave it."""
    folder: str
    """A local folder, or a hub id."""
    header: GgufHeader | None = None
    """Checked header of a GGUF file; None for other formats."""
    is_conversion: bool = False
    """True for the dequantized copy of an alias, which foresay made."""
    only_cached: bool = False
    """True if the hub cannot be reached but has the model in its cache."""

    @property
    def is_local(self) -> bool:
        """True unless the files are on the hub."""
        return Path(self.folder).is_dir()

    @property
    def has_vocabulary(self) -> bool:
        """False for a local folder without a file that may contain a tokenizer's vocabulary."""
        names = [file.name for file in Path(self.folder).iterdir()] if self.is_local else ["tokenizer.json"]
        described = ("tokenizer_config", "chat_template", "special_tokens_map")
        return any(name.startswith(_TOKENIZER_FILES) and not name.startswith(described) for name in names)

    def arguments(self, options: LoadOptions) -> dict[str, Any]:
        """Arguments by which every from_pretrained of transformers finds the files."""
        found: dict[str, Any] = {"trust_remote_code": options.trust_remote_code, "revision": options.revision or "main"}
        if self.header is not None:
            found["gguf_file"] = self.header.path.name
        if self.only_cached:
            found["local_files_only"] = True
        return found


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """True for a GGUF file or an alias of one, which llama.cpp can read."""
    return os.fspath(name) in ALIASES or os.fspath(name).endswith(".gguf") or _begins_as_gguf(Path(name))


def _begins_as_gguf(path: Path) -> bool:
    """True for a GGUF file of any name, such as those that Ollama keeps."""
    try:
        if not path.is_file():  # such as a pipe, which would wait
            return False
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:  # it may not be read
        return False


def locate(name: str | os.PathLike[str], options: LoadOptions, *, weights: bool = True) -> Location:
    """Find a model's files. weights: False if only the tokenizer is needed.

    Raises ModelNotFoundError if there is no such model, and ModelLoadError for a damaged GGUF file.
    """
    text = os.fspath(name)
    if not text:
        raise ModelNotFoundError("the model's name is empty; give an alias, a hub id, a folder or a GGUF file")
    if text in ALIASES:
        if options.backend == LLAMA_CPP:
            return _gguf(text, packaged_file(text))
        return Location(text, str(converted(text, options)), is_conversion=True)
    path = Path(text).expanduser()
    if path.is_dir():
        _check_folder(text, path, weights=weights)
        return Location(text, str(path))
    if path.is_file():
        if path.suffix != ".gguf" and not _begins_as_gguf(path):
            raise ModelLoadError(
                f"{text!r} is a file, but not a .gguf file; give a model folder, a GGUF file or a hub id"
            )
        return _gguf(text, path)
    refuse_missing(text)
    return Location(text, text, only_cached=_is_only_cached(text, options))


def check_exists(text: str) -> None:
    """Raise ModelNotFoundError for the name of a model that is neither here nor a hub id; request nothing from the hub."""
    if text not in ALIASES and not Path(text).expanduser().exists():
        refuse_missing(text)


def check_files(text: str, options: LoadOptions) -> int:
    """Return the bytes of a model's weight files; 0 for a hub id whose files are not here yet.

    Reads no weights and requests nothing from the hub. Raises as `locate`, ModelLoadError for a folder without weights, and
    ModelNotFoundError for a hub id that is not in the cache if requests are switched off.
    """
    if text in ALIASES:
        return packaged_file(text).stat().st_size
    path = Path(text).expanduser()
    if path.exists():
        if locate(text, options).header is not None:
            return path.stat().st_size
        folder, is_complete = path, True
    else:
        refuse_missing(text)
        cached, is_complete = cached_folder(text), is_offline()
        if cached is None and is_complete:
            raise ModelNotFoundError(f"{text!r} is not in the hub's cache, and requests are off (HF_HUB_OFFLINE)")
        if cached is None:
            return 0
        folder = cached
    stored = sum(one.stat().st_size for one in folder.iterdir() if one.name.endswith((".safetensors", ".bin")))
    if not stored and is_complete:
        raise ModelLoadError(f"{text!r} has no weights: it needs files that end in .safetensors")
    return stored


def refuse_missing(text: str) -> None:
    """Raise ModelNotFoundError for the name of a model that is neither here nor a hub id."""
    if text.startswith(("/", "./", "../", "~")) or text.endswith(".gguf") or text.count("/") > 1:
        raise ModelNotFoundError(f"no such file or folder: {text!r}")
    if "/" not in text:
        unknown = UnknownNameError("model", text, ALIASES).worded(lambda _, name: f"the model {shown(name)}")
        raise ModelNotFoundError(f"{unknown} Or give org/name, a folder or a GGUF file.")


def _gguf(name: str, path: Path) -> Location:
    header = checked_header(path)
    if (kind := DRAFTS.get(header.architecture)) is not None:
        raise ModelLoadError(
            f"{name!r} is a draft ({header.architecture}), not a language model; load its target with drafter='{kind}({name})'"
        )
    return Location(name, str(path.parent), header)


def _check_folder(name: str, path: Path, *, weights: bool) -> None:
    if weights and not (path / "config.json").is_file():
        raise ModelNotFoundError(f"the folder {name!r} has no config.json; is it a transformers model folder?")
    if not weights and not any(file.name.startswith(_TOKENIZER_FILES) for file in path.iterdir()):
        raise ModelNotFoundError(f"the folder {name!r} has no tokenizer (tokenizer.json, tokenizer.model, ...)")


def _is_only_cached(name: str, options: LoadOptions) -> bool:
    """Request a model's configuration from the hub once, with a short timeout; True if only the hub's cache has it.

    transformers itself would retry every file for most of a minute. An error reply of the hub is left to transformers to report.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=options.revision), timeout=_HUB_TIMEOUT_S)
    except (HfHubHTTPError, ValueError):
        return False
    except Exception as error:  # any exception of the network library
        if isinstance(try_to_load_from_cache(name, "config.json", revision=options.revision), str):
            return True
        raise ModelNotFoundError(
            f"{name!r} is neither a file nor a folder here, and the hub did not give it: {error} (check your network)"
        ) from error
    return False
