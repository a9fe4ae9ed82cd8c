"""Names and descriptions of the served model in Ollama's API.

Owns the names with tags. Reads the model's configuration; knows no route.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from foresay.server.adapters.ollama_format import now
from foresay.server.service import Service
from foresay.text.prompts import fill_in_marks
from foresay.text.tool_calls.formats import describes_tools
from foresay.text.tool_calls.message import has_reasoning


class OllamaModels:
    """The model under each of its names. A name without a tag has the tag "latest"."""

    def __init__(self, service: Service) -> None:
        self._service, self._modified = service, now()

    def served(self, name: str) -> str:
        """Return the name that OpenAI's API has for a name. Raises ApiError for a model that is not served here."""
        found = next((one for one in self._service.names if _tagged(one) == _tagged(name)), name)
        self._service.check_model(found)
        return found

    def tags(self) -> dict[str, Any]:
        """Return the body of /api/tags."""
        digest = hashlib.sha256(self._service.fingerprint.encode()).hexdigest()
        same = {
            "modified_at": self._modified,
            "size": self._service.weight_bytes,
            "digest": digest,
            "details": self._details(),
        }
        names = dict.fromkeys(_tagged(one) for one in self._service.names)
        return {"models": [{"name": one, "model": one, **same} for one in names]}

    def shown(self, name: str) -> dict[str, Any]:
        """Return the body of /api/show. Raises ApiError for a model that is not served here."""
        self.served(name)
        template = getattr(self._service.generator.tokenizer, "chat_template", None)
        return {
            "modelfile": "",
            "parameters": "",
            "template": template if isinstance(template, str) else "",
            "details": self._details(),
            "model_info": self._info(),
            "capabilities": self._capabilities(),
            "modified_at": self._modified,
        }

    def _config(self) -> Any:
        """Return the configuration of a model of transformers; None for others."""
        config = getattr(getattr(self._service.generator.target.model, "model", None), "config", None)
        return None if config is None else config.get_text_config(decoder=True)

    def _details(self) -> Mapping[str, Any]:
        family = str(getattr(self._config(), "model_type", ""))
        empty = dict.fromkeys(("parent_model", "format", "parameter_size", "quantization_level"), "")
        return {**empty, "family": family, "families": [family] if family else []}

    def _info(self) -> dict[str, Any]:
        target, config = self._service.generator.target.model, self._config()
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

    def _capabilities(self) -> list[str]:
        tokenizer, features = self._service.generator.tokenizer, self._service.generator.target.model.capabilities
        has = {
            "completion": True,
            "tools": tokenizer is not None and describes_tools(tokenizer),
            "insert": tokenizer is not None and fill_in_marks(tokenizer) is not None,
            "embedding": bool(features.num_layers) and not features.reads_source,
            "thinking": tokenizer is not None and has_reasoning(tokenizer),
        }
        return [name for name, is_there in has.items() if is_there]


def _tagged(name: str) -> str:
    return name if ":" in name.rpartition("/")[2] else f"{name}:latest"
