"""A model's name -> the Source of its files. A name is resolved once, and a GGUF file's header is read once.

A name is an alias, a hub id, a local folder or a GGUF file. Reads no configuration, weights or tokenizer.
"""

from __future__ import annotations

import os
from pathlib import Path

from foresay.errors import ConfigError, ModelLoadError, ModelNotFoundError, UnknownNameError, shown
from foresay.models.gguf.values import DRAFTS, checked_header
from foresay.models.sources.folder import Folder, PackagedFolder
from foresay.models.sources.gguf_file import GgufFile, LlamaCppFile
from foresay.models.sources.load_options import LLAMA_CPP, LoadOptions
from foresay.models.sources.packaged import ALIASES, conversion_folder, packaged_file
from foresay.models.sources.source import Source


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


def locate(name: str | os.PathLike[str], options: LoadOptions, *, weights: bool = True) -> Source:
    """Find a model's files, and see that they can be read. weights: False if only the tokenizer is needed.

    Raises ModelNotFoundError if there is no such model, ModelLoadError for a damaged GGUF file, and ConfigError for a model that
    llama.cpp does not read.
    """
    llama_cpp = options.backend == LLAMA_CPP
    if llama_cpp and weights and not is_gguf(name):
        text = "reads GGUF files, and {model} is not one; drop it, or give such a file"
        raise ConfigError(text, param="backend", value=LLAMA_CPP, model=os.fspath(name))
    return find(name, llama_cpp=llama_cpp).fetched(options, weights=weights)


def find(name: str | os.PathLike[str], *, llama_cpp: bool = False) -> Source:
    """Find a model's files without a request to the hub or a conversion. llama_cpp: True if it computes the model.

    Raises ModelNotFoundError if there is no such model, and ModelLoadError for a damaged GGUF file.
    """
    text = os.fspath(name)
    if not text:
        raise ModelNotFoundError("the model's name is empty; give an alias, a hub id, a folder or a GGUF file")
    if text in ALIASES and not llama_cpp:
        return PackagedFolder(text, str(conversion_folder(text)))
    path = packaged_file(text) if text in ALIASES else Path(text).expanduser()
    if path.is_dir():
        return Folder(text, str(path))
    if not path.is_file():
        _refuse_missing(text)
        return Folder(text, text)
    if path.suffix != ".gguf" and not _begins_as_gguf(path):
        raise ModelLoadError(f"{text!r} is a file, but not a .gguf file; give a model folder, a GGUF file or a hub id")
    header = checked_header(path)
    if (kind := DRAFTS.get(header.architecture)) is not None:
        raise ModelLoadError(
            f"{text!r} is a draft ({header.architecture}), not a language model; load its target with drafter='{kind}({text})'"
        )
    return (LlamaCppFile if llama_cpp else GgufFile)(text, header)


def check_exists(text: str) -> None:
    """Raise ModelNotFoundError for the name of a model that is neither here nor a hub id; request nothing from the hub."""
    if text not in ALIASES and not Path(text).expanduser().exists():
        _refuse_missing(text)


def _refuse_missing(text: str) -> None:
    """Raise ModelNotFoundError for the name of a model that is neither here nor a hub id."""
    if text.startswith(("/", "./", "../", "~")) or text.endswith(".gguf") or text.count("/") > 1:
        raise ModelNotFoundError(f"no such file or folder: {text!r}")
    if "/" not in text:
        unknown = UnknownNameError("model", text, ALIASES).worded(lambda _, name: f"the model {shown(name)}")
        raise ModelNotFoundError(f"{unknown} Or give org/name, a folder or a GGUF file.")
