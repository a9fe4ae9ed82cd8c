"""Names and descriptions of the served models in Ollama's API.

Owns the names with tags. Reads the model's configuration; knows no route.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from foresay.decoding.devices import is_remote
from foresay.server.adapters.ollama_format import now
from foresay.server.message_kind import takes_tools
from foresay.server.served import Served
from foresay.server.service import Entry, Service
from foresay.text.prompts import fill_in_marks
from foresay.text.reasoning import reasoning_of


class OllamaModels:
    """Each model under each of its names. A name without a tag has the tag "latest"."""

    def __init__(self, service: Service) -> None:
        self._service, self._modified = service, now()
        self._described: dict[str, dict[str, Any]] = {}
        """Descriptions of models that were loaded once."""

    @property
    def first(self) -> str:
        """Name of the model of requests that name none."""
        return self._service.entries[0].names[0]

    def served(self, name: str) -> str:
        """Return the name that OpenAI's API has for a name. Raises ApiError for a model that is not served here."""
        names = [one for entry in self._service.entries for one in entry.names]
        found = next((one for one in names if _tagged(one) == _tagged(name)), name)
        self._service.entry(found)
        return found

    def tags(self) -> dict[str, Any]:
        """Return the body of /api/tags. Details are those of models that were loaded once."""
        return {"models": [self._tag(entry, name) for entry in self._service.entries for name in _tags(entry)]}

    def running(self) -> dict[str, Any]:
        """Return the body of /api/ps: the models that are loaded, which stay so until another one needs their room."""
        return {
            "models": [
                {**self._tag(entry, name), "size_vram": _on_gpu(entry.served), "expires_at": _NEVER}
                for entry in self._service.entries
                if entry.served is not None
                for name in _tags(entry)
            ]
        }

    def _tag(self, entry: Entry, name: str) -> dict[str, Any]:
        known, model = self.known(entry.names[0]), entry.served
        return {
            "name": name,
            "model": name,
            "modified_at": self._modified,
            "size": entry.num_bytes if model is None else model.weight_bytes,
            "digest": hashlib.sha256((entry.name if model is None else model.fingerprint).encode()).hexdigest(),
            "details": _NO_DETAILS if known is None else known["details"],
        }

    def known(self, name: str) -> dict[str, Any] | None:
        """Return the body of /api/show for a model that was loaded once, else None. name: of OpenAI's API."""
        entry = self._service.entry(name)
        if entry.served is not None:
            self.shown(entry.served)
        return self._described.get(entry.name)

    def shown(self, model: Served) -> dict[str, Any]:
        """Return the body of /api/show."""
        template = getattr(model.generator.tokenizer, "chat_template", None)
        found = {
            "modelfile": "",
            "parameters": "",
            "template": template if isinstance(template, str) else "",
            "details": _details(model),
            "model_info": _info(model),
            "capabilities": _capabilities(model),
            "modified_at": self._modified,
        }
        self._described[model.key] = found
        return found


_NEVER = "9999-12-31T23:59:59Z"
_NO_DETAILS: Mapping[str, Any] = {
    **dict.fromkeys(("parent_model", "format", "parameter_size", "quantization_level", "family"), ""),
    "families": [],
}


def _on_gpu(model: Served) -> int:
    return model.weight_bytes if is_remote(model.generator.target.model.device) else 0


def _config(model: Served) -> Any:
    """Return the configuration of a model of transformers; None for others."""
    config = getattr(getattr(model.generator.target.model, "model", None), "config", None)
    return None if config is None else config.get_text_config(decoder=True)


def _details(model: Served) -> Mapping[str, Any]:
    family = str(getattr(_config(model), "model_type", ""))
    return {**_NO_DETAILS, "family": family, "families": [family] if family else []}


def _info(model: Served) -> dict[str, Any]:
    target, config = model.generator.target.model, _config(model)
    family = str(getattr(config, "model_type", "foresay"))
    sizes = {
        "context_length": target.max_length,
        "vocab_size": target.vocab_size,
        "embedding_length": getattr(config, "hidden_size", None),
        "block_count": getattr(config, "num_hidden_layers", None),
        "attention.head_count": getattr(config, "num_attention_heads", None),
    }
    found = {f"{family}.{name}": value for name, value in sizes.items() if value is not None}
    return {"general.architecture": family, **found}


def _capabilities(model: Served) -> list[str]:
    tokenizer, features = model.generator.tokenizer, model.generator.target.model.capabilities
    has = {
        "completion": True,
        "tools": takes_tools(model),
        "insert": tokenizer is not None and fill_in_marks(tokenizer) is not None,
        "embedding": bool(features.num_layers) and not features.reads_source,
        "thinking": reasoning_of(tokenizer) is not None,
    }
    return [name for name, is_there in has.items() if is_there]


def _tags(entry: Entry) -> list[str]:
    return list(dict.fromkeys(_tagged(one) for one in entry.names))


def _tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"
