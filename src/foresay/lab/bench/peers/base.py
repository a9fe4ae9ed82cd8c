"""Peers (other engines): their interface, their expressions and the location of their weights.

Owns the expressions (`vllm=PYTHON(ngram=5)`), the checks common to all peers, and the mapping from foresay's name of a model
to the folder or file that another engine reads. Knows nothing about calling an engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Protocol

import torch

from foresay.checks import check_int
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, ModelNotFoundError, UnknownNameError
from foresay.models.sources.load_options import DTYPES, LoadOptions
from foresay.models.sources.packaged import ALIASES, check_gguf, converted, packaged_file
from foresay.models.sources.reading import native_dtype

KNOWN: dict[str, tuple[str, ...]] = {
    "transformers": ("assistant", "cache", "lookup"),
    "vllm": ("ngram", "arguments"),
    "llama.cpp": ("lookup",),
    "economize": ("lookup",),
}
"""Peer -> its settings."""
PASSED_ON = ("max_new_tokens", "temperature", "top_k", "top_p", "seed", "ignore_eos")
"""The sampling parameters that every peer receives."""
_WITH_PYTHON = ("vllm", "llama.cpp", "economize")
_FORMS = "transformers, transformers(assistant=MODEL), transformers(lookup=10), vllm=PYTHON, vllm=PYTHON(ngram=5), "
_FORMS += "vllm=PYTHON(arguments=FILE.json), "
_FORMS += "llama.cpp=PYTHON, llama.cpp=PYTHON(lookup=10), "
_FORMS += "economize=PYTHON, economize=PYTHON(lookup=5)"


@dataclass(frozen=True, slots=True)
class PeerRun:
    """The outputs of a peer and the time that it took."""

    outputs: list[list[int]]
    """New token ids per prompt, in the order of the prompts."""
    seconds: float
    """Wall-clock time of decoding all prompts, including prompt processing, without loading."""
    passes: int | None = None
    """Number of engine steps, if reported. They are target passes, including prompt passes, unless the engine schedules ahead."""


class Peer(Protocol):
    """Another engine with the same weights."""

    name: str

    def describe(self) -> dict[str, str]:
        """Return versions, dtype and settings, for the results file."""
        ...

    def run(self, prompts: Sequence[Sequence[int]], params: SamplingParams, batch_size: int) -> PeerRun:
        """Decode the prompts, at most `batch_size` at a time. Raises ConfigError for settings that the peer does not support."""
        ...

    def close(self) -> None:
        """Release the model and end its processes; later calls have no effect."""
        ...


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """A parsed peer expression."""

    kind: str
    python: str | None = None
    settings: dict[str, str] = field(default_factory=dict)


def parse(expression: str) -> PeerSpec:
    """Parse an expression: NAME, NAME(key=value, ...), NAME=PYTHON or NAME=PYTHON(key=value, ...).

    Raises UnknownNameError for an unknown peer or setting, and ConfigError for an expression of another form.
    """
    text = expression.strip()
    kind = text[: min((text.index(mark) for mark in "=(" if mark in text), default=len(text))].strip()
    if kind not in KNOWN:
        raise UnknownNameError("peer", kind, KNOWN)
    rest = text[len(kind) :].strip()
    python: str | None = None
    inner = ""
    if rest.startswith("="):
        rest = rest[1:].strip()
        if rest.endswith(")") and not Path(rest).exists():
            rest, _, inner = rest[:-1].rpartition("(")
        python = rest.strip()
    elif rest:
        if not rest.endswith(")"):
            raise ConfigError(f"peer {expression!r} has no ')' at its end; write one of {_FORMS}")
        inner = rest[1:-1]
    _check_python(kind, python, expression)
    return PeerSpec(kind, python, _settings(kind, inner, expression))


def _check_python(kind: str, python: str | None, expression: str) -> None:
    if kind in _WITH_PYTHON and not python:
        raise ConfigError(
            f"peer {expression!r} names no interpreter; write {kind}=PYTHON with the one that has it installed, such as "
            f"{kind}=/path/to/venv/bin/python (see docs/how-to/other-engines.md)"
        )
    if kind not in _WITH_PYTHON and python is not None:
        raise ConfigError(f"peer {expression!r}: {kind} runs in this process and takes no interpreter; write {kind}")


def _settings(kind: str, inner: str, expression: str) -> dict[str, str]:
    out: dict[str, str] = {}
    for part in inner.split(",") if inner.strip() else ():
        key, mark, value = (piece.strip() for piece in part.partition("="))
        if not mark or not value:
            raise ConfigError(f"peer {expression!r}: {part.strip()!r} is not key=value; write one of {_FORMS}")
        if key not in KNOWN[kind]:
            raise UnknownNameError(f"setting of {kind}", key, KNOWN[kind])
        if key in out:
            raise ConfigError(f"peer {expression!r} gives {key} twice; give it once")
        out[key] = value.strip("\"'")
    return out


def count_setting(spec: PeerSpec, key: str) -> int | None:
    """Return a setting that is a number of tokens in [1, 1000], or None if not given. Raises ConfigError for other values."""
    if key not in spec.settings:
        return None
    text = spec.settings[key]
    return check_int(f"{spec.kind}'s {key}", int(text) if text.isdecimal() else text, 1, 1000)


def check_params(name: str, params: SamplingParams) -> None:
    """Raise ConfigError for a sampling parameter that other engines do not receive."""
    default = SamplingParams()
    for one in fields(SamplingParams):
        value = getattr(params, one.name)
        if one.name not in PASSED_ON and value != getattr(default, one.name):
            raise ConfigError(
                f"{name} does not support {one.name}={value!r}; it supports only {', '.join(PASSED_ON)}; leave it out"
            )


def check_run(name: str, prompts: Sequence[Sequence[int]], params: SamplingParams, batch_size: int) -> None:
    """Raise ConfigError for requests that no peer supports."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ConfigError("a peer needs at least one prompt, each with at least one token; leave empty ones out")
    check_int("batch_size", batch_size, 1)
    check_params(name, params)
    if params.seed is not None:
        check_int("seed", params.seed, 0, 2**32 - 1 - len(prompts))


def check_length(
    name: str, prompts: Sequence[Sequence[int]], max_new_tokens: int, context: int | None, why: str = ""
) -> None:
    """Raise ConfigError if a prompt with its output exceeds the context length."""
    longest = max(map(len, prompts)) + max_new_tokens
    if context is not None and longest > context:
        raise ConfigError(f"{name}: prompt and output have {longest} tokens, the context {context}{why}; use fewer")


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a name; "auto" is the processor's native one. Raises UnknownNameError for unknown names."""
    if name == "auto":
        return native_dtype(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if name not in DTYPES:
        raise UnknownNameError("dtype", name, ["auto", *DTYPES])
    return DTYPES[name]


def transformers_source(model: str) -> tuple[str, dict[str, Any]]:
    """Return (folder or hub id, extra arguments) with which transformers loads a model, possibly a GGUF file.

    Raises ModelNotFoundError for a name that is neither a path, an alias nor a hub id, ModelLoadError for a broken GGUF file.
    """
    if model in ALIASES:
        return str(converted(model, LoadOptions())), {}
    path = Path(model).expanduser()
    if path.is_file():
        check_gguf(path)
        return str(path.parent), {"gguf_file": path.name}
    _check_exists(model, path)
    return (str(path) if path.is_dir() else model), {}


def model_folder(model: str) -> str:
    """Return a folder with configuration, tokenizer and safetensors, as vLLM needs it; a hub id is resolved in the hub's cache.

    Raises ModelNotFoundError if there is no such folder, and ConfigError for a single file.
    """
    if model in ALIASES:
        return str(converted(model, LoadOptions()))
    path = Path(model).expanduser()
    if path.is_file():
        raise ConfigError(f"vllm reads a transformers folder, and {model!r} is a file; give the folder, or an alias")
    _check_exists(model, path)
    folder = path if path.is_dir() else _downloaded(model)
    names = [file.name for file in folder.iterdir()]
    for part, suffix in (("config.json", "config.json"), ("weights (*.safetensors)", ".safetensors")):
        if not any(name.endswith(suffix) for name in names):
            raise ModelNotFoundError(f"vllm needs {part}, which {str(folder)!r} does not contain; save the model there")
    return str(folder)


def gguf_file(model: str) -> str:
    """Return the GGUF file of a model: the packaged file of an alias, the file itself, or the only one in a folder.

    Raises ModelNotFoundError for an unknown name, ModelLoadError for another kind of file, and ConfigError unless there is
    exactly one GGUF file.
    """
    if model in ALIASES:
        return str(packaged_file(model))
    path = Path(model).expanduser()
    if path.is_file():
        check_gguf(path)
        return str(path)
    _check_exists(model, path)
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        found = f"the folder contains {len(files)}" if path.is_dir() else "a hub id names none"
        raise ConfigError(f"llama.cpp needs one GGUF file, and for {model!r} {found}; give the .gguf file itself")
    return str(files[0])


def context_of(folder: str) -> int | None:
    """Return the context length in a model folder's config.json, or None if it has none."""
    config = json.loads((Path(folder) / "config.json").read_text())
    config = config.get("text_config", config)
    length = config.get("max_position_embeddings", config.get("n_positions"))
    return length if isinstance(length, int) else None


def _check_exists(model: str, path: Path) -> None:
    """Raise ModelNotFoundError for a name that is neither an existing path nor a possible hub id."""
    if not path.exists() and (model.count("/") != 1 or model.startswith((".", "/", "~"))):
        raise ModelNotFoundError(
            f"no model {model!r}: no such file or folder, nor an alias ({', '.join(ALIASES)}), nor a hub id (org/name)"
        )


def _downloaded(model: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, local_files_only=True))
    except Exception as error:  # the hub's library may raise anything
        raise ModelNotFoundError(f"{model!r} is not in the hub's cache; get it with: hf download {model}") from error
