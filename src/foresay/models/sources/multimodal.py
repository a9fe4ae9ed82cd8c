"""Checkpoints that also read images or sound: the configuration of their language model, and the names of its weights.

transformers has a class for the language model alone in most of these families; only that part is built and read.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

logger = logging.getLogger("foresay")

PREFIXES: Mapping[str, str] = {
    r"^(?:model\.)?(?:language_model|text_model)\.lm_head\.": "lm_head.",
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?": "model.",
}
"""Names of weights in such checkpoints -> those of the language model alone, as regular expressions."""
_SAME_LAYERS = {"qwen2_vl_text": "qwen2", "qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""model_type of language models without a class of their own -> the family whose layers they have, if all tokens are text."""


def language_model_of(config: Any, name: str) -> Any:
    """Return the configuration of the language model that is built for a configuration, which for most is this itself.

    A log message names what is left out. name: of the checkpoint.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING as CLASSES

    text = config.get_text_config(decoder=True)
    if text is config or config.is_encoder_decoder or getattr(config, "quantization_config", None) is not None:
        return config
    if (family := _SAME_LAYERS.get(text.model_type)) is not None:
        text = CONFIG_MAPPING[family](**_plain(text))
    whole = CLASSES.get(type(config), None)
    if type(text) not in CLASSES:
        return config
    logger.warning("%s is a %s checkpoint: its language model is loaded, for text only", name, config.model_type)
    if whole is not None and whole.config_class is type(text):
        return config  # transformers takes the language model by itself
    text.tie_word_embeddings = config.tie_word_embeddings
    return text


def _plain(text: Any) -> dict[str, Any]:
    """Return fields of a language model without those of positions of images, which are equal numbers in texts."""
    fields = {key: value for key, value in text.to_dict().items() if key not in ("model_type", "rope_scaling")}
    rotary = dict(fields.get("rope_parameters") or {})
    for key in ("mrope_section", "mrope_interleaved", "type"):
        rotary.pop(key, None)
    rotary["rope_type"] = "default" if rotary.get("rope_type") in (None, "mrope") else rotary["rope_type"]
    return {**fields, "rope_parameters": rotary}
