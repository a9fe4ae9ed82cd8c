"""Tensors of a checkpoint that no layer reads: those that are known to have no effect, with the reason, and all others.

transformers reports what its model has no parameter for, and goes on. Scales of an unknown format are among that. Knows names
alone, after they were mapped to those of the language model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from foresay.errors import ModelLoadError

WITHOUT_EFFECT: Mapping[str, str] = {
    r"(^|\.)rotary_emb\.(\w*inv_freq|cos_cached|sin_cached)$": "rotary positions follow from the configuration",
    r"\.(attn|attention|self_attn|self_attention|crossattention)\.(masked_)?bias$": "a causal mask",
    r"\.(attn|attention|self_attn)\.causal_mask$": "a causal mask",
    r"(^|\.)position_ids$": "the numbers from 0",
    r"(^|\.)embed_positions\.weights$": "sinusoidal positions follow from the configuration",
    r"^(model\.)?(encoder|decoder)\.version$": "the number of a layout",
    r"\.(k|v|q|kv|prob|attn)_(output_)?(scale|zero_point)$": "rounding of keys and values, which kv_cache_dtype states",
    r"\.[qkv]_proj\.output_scale$": "rounding of keys and values, which kv_cache_dtype states",
    r"^(model\.)?mtp[._]": "multi-token-prediction layers, which the drafter mtp reads",
    r"^(v_head|score|classifier|value_head)\.": "the output layer of another task",
}
"""Names of tensors, as regular expressions -> the reason for which no text depends on them."""
_OF_IMAGES = re.compile(
    r"(^|[._])(vision|visual|vit|image|images|audio|sound|speech|video|multi_?modal|mm|projector|connector|aligner"
    r"|resampler|perceiver|merger|mlp1|talker|token2wav|code2wav)([._]|$)"
)
"""Parts of checkpoints that read or make images and sound."""
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def is_of_images(name: str) -> bool:
    """Return True for the name of a tensor, module or section of a part that reads or makes images or sound."""
    return _OF_IMAGES.search(name) is not None


def unread(names: Iterable[str], config: Any, *, is_part: bool) -> list[str]:
    """Return the names that are not known to have no effect.

    config: of the language model. is_part: True if the checkpoint has other parts than this.
    """
    return sorted(
        name
        for name in names
        if not any(re.search(pattern, name) for pattern in WITHOUT_EFFECT)
        and not (is_part and is_of_images(name))
        and not _is_of_mtp(name, config)
    )


def refuse_unread(found: Iterable[str], name: str, config: Any, *, is_part: bool) -> None:
    """Raise ModelLoadError for tensors that have or may have an effect. found: names. name: of the model."""
    if absent := unread(found, config, is_part=is_part):
        raise ModelLoadError(
            f"{name!r} has {len(absent)} tensors that no layer of a {config.model_type} model reads ({', '.join(absent[:3])}"
            f"{', ...' if absent[3:] else ''}): the model would be another; its config.json and its weights do not fit together, "
            "or their format is not supported"
        )


def _is_of_mtp(name: str, config: Any) -> bool:
    """Return True for layers after the last one, if the configuration names that many which predict further tokens."""
    found, first = _LAYER.search(name), getattr(config, "num_hidden_layers", None)
    counts = [getattr(config, one, None) for one in ("num_nextn_predict_layers", "num_mtp_layers")]
    count = next((one for one in counts if isinstance(one, int)), 0)
    return bool(found and isinstance(first, int) and first <= int(found[1]) < first + count)
