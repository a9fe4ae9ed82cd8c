"""Checkpoints that also read images or sound: the configuration of their language model, and the names of its weights.

transformers has a class for the language model alone in most of these families; only that part is built and read.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from foresay.models.families.table import TEXTS_OF
from foresay.models.sources.quantized_forms import form_of

logger = logging.getLogger("foresay")

PREFIXES: Mapping[str, str] = {
    r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
"""Names of weights in such checkpoints -> those of the language model alone, as regular expressions."""


def language_model_of(config: Any, name: str) -> Any:
    """Return the configuration of the language model that is built for a configuration, which for most is this itself.

    A log message names what is left out. name: of the checkpoint.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CLASSES

    text, stated = config.get_text_config(decoder=True), getattr(config, "quantization_config", None)
    if text is config or config.is_encoder_decoder:
        return config
    if (family := TEXTS_OF.get(text.model_type)) is not None:
        text = CONFIG_MAPPING[family](**_plain(text))
    whole = CLASSES.get(type(config), None)
    if type(text) not in CLASSES:
        return config
    logger.warning("%s is a %s checkpoint: its language model is loaded, for text only", name, config.model_type)
    if stated is not None:
        text.quantization_config = _with_own_names(stated)
    if whole is not None and whole.config_class is type(text) and form_of(text) is None:
        return config  # transformers takes the language model by itself
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


def own_name(name: str) -> str:
    """Return the name that a weight or module of such a checkpoint has in its language model alone."""
    for pattern, prefix in PREFIXES.items():
        name = re.sub(pattern, prefix, name)
    return name


def _with_own_names(stated: Any) -> Any:
    """Return a quantization_config whose lists of modules have the language model's names."""
    lists = {key: value for key, value in stated.items() if isinstance(value, list)}
    return {
        **stated,
        **{key: [own_name(one) if isinstance(one, str) else one for one in value] for key, value in lists.items()},
    }


def _plain(text: Any) -> dict[str, Any]:
    """Return fields of a language model without those of positions of images, which are equal numbers in texts."""
    fields = {key: value for key, value in text.to_dict().items() if key not in ("model_type", "rope_scaling")}
    rotary = dict(fields.get("rope_parameters") or {})
    for key in ("mrope_section", "mrope_interleaved", "type"):
        rotary.pop(key, None)
    rotary["rope_type"] = "default" if rotary.get("rope_type") in (None, "mrope") else rotary["rope_type"]
    return {**fields, "rope_parameters": rotary}
