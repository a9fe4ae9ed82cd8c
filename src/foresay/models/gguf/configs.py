"""The configuration of a GGUF file, as an object of transformers.

Made of the file's values by the tables of architectures.py, and of what llama.cpp derives from them. Reads no weights.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

from foresay.models.gguf.architectures import COMMON, YARN_FACTORS, architecture_of
from foresay.models.gguf.granite import granite_fields, granite_hybrid_fields
from foresay.models.gguf.header import STRING, GgufHeader
from foresay.models.gguf.hybrids import delta_fields, lfm2_fields, rotary_sections
from foresay.models.gguf.positions import YARN, rope_parameters, rotated_share
from foresay.models.gguf.values import NONE_IF_0, check_values, invalid_value
from foresay.models.gguf.vocabulary import read_vocabulary

logger = logging.getLogger("foresay")

_REQUIRED = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
"""Values that transformers would replace by those of some model of the family if they were missing."""
_THETA = 10_000.0
"""Base of rotary positions of files that do not state it, as in llama.cpp."""
_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "unk_token_id": "unknown", "pad_token_id": "padding"}
"""Fields of the configuration -> roles of special tokens."""
_FULL, _SLIDING = "full_attention", "sliding_attention"
_USUAL_PERIOD, _MOST_PERIOD = 4, 1024
"""Period of layers without a window: of files that do not state it, as in llama.cpp, and the longest."""
_MOST_RATE = 1e3
"""Greatest rate of the scale of queries by their position."""
_LARGEST_MODEL_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Number of layers of each family's 27-billion-parameter model, whose queries are not scaled by the attention head size."""


def config_of(header: GgufHeader) -> Any:
    """Return the transformers configuration of a file, whose architecture must be one of ARCHITECTURES.

    Raises ModelLoadError for missing and invalid values; see `check_values`.
    """
    from transformers import AutoConfig

    fields = fields_of(header)
    config = AutoConfig.for_model(architecture_of(header).model_type, **fields)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # a missing id defaults to that of some model of the family, which may exceed this vocabulary
        if isinstance(found := getattr(config, name, None), int) and found >= config.vocab_size:
            setattr(config, name, None)
    set_end_tokens(config, header)
    return config


def fields_of(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of `config_of`, which raises as this."""
    check_values(header)
    one, values = architecture_of(header), header.values
    for name in [name for name in (*_REQUIRED, *one.required) if name not in one.lacking]:
        if (key := f"{header.architecture}.{name}") not in values and key not in header.lists:
            raise invalid_value(header, key, "a number; it has no default")
    fields: dict[str, Any] = dict(one.fixed)
    for key, name in {**COMMON, **one.fields}.items():
        value = values.get(f"{header.architecture}.{key}")
        if value is not None and (value or key not in NONE_IF_0):
            fields[name] = value
    fields |= {name: values[key] for name, role in _IDS.items() if (key := f"tokenizer.ggml.{role}_token_id") in values}
    fields["tie_word_embeddings"] = "output.weight" not in header.tensors
    if "vocab_size" not in fields and "token_embd.weight" in header.tensors:
        fields["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    if not fields["head_dim"]:
        raise invalid_value(header, f"{header.architecture}.attention.head_count", "at most embedding_length")
    fields.setdefault("rope_theta", _THETA)
    if one.yarn is not None:
        fields["rope_parameters"] = rope_parameters(header, fields.pop("rope_theta"))
    if (derive := _DERIVED.get(header.architecture)) is not None:
        fields |= derive(header, fields)
    return fields


def set_end_tokens(config: Any, header: GgufHeader) -> None:
    """Set the ids that end a text or a turn, of which transformers reads only one."""
    vocabulary = read_vocabulary(header)
    if vocabulary is not None and len(vocabulary.ends) > 1:
        config.eos_token_id = list(vocabulary.ends)


Derive = Callable[[GgufHeader, dict[str, Any]], dict[str, Any]]
"""(header, fields so far) -> further fields."""


def _scaled_queries(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """No key stores the scale: like llama.cpp, recognize the largest model of a family by its number of layers."""
    largest = fields["num_hidden_layers"] == _LARGEST_MODEL_LAYERS[header.architecture]
    whole = fields["hidden_size"] // fields["num_attention_heads"]
    return {"query_pre_attn_scalar": whole if largest else fields["head_dim"]}


def _text_alone(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """The three positions of a token are equal in texts, whatever frequencies belong to each."""
    rotary_sections(header, fields["head_dim"] // 2)
    logger.warning("%s also reads images in other programs: it is loaded for text only", header.path)
    return {}


def _glm4_moe(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """MTP layers are counted with the others; biases and norms of heads are there if their tensors are."""
    prefix = header.architecture
    more = int(header.values.get(f"{prefix}.nextn_predict_layers", 0))
    return {
        "num_hidden_layers": fields["num_hidden_layers"] - more,
        "num_mtp_layers": more,
        "partial_rotary_factor": header.values[f"{prefix}.rope.dimension_count"] / fields["head_dim"],
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "use_qk_norm": "blk.0.attn_q_norm.weight" in header.tensors,
    }


def _windows(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """Types of the layers of a family in which each fourth one has no window, unless a file states another period or a list."""
    layers = int(fields["num_hidden_layers"])
    if "sliding_window" not in fields:
        return {"sliding_window": None, "layer_types": [_FULL] * layers}
    key = f"{header.architecture}.attention.sliding_window_pattern"
    stored, period = header.lists.get(key), header.values.get(key, _USUAL_PERIOD)
    slides = [] if stored is None or stored.kind == STRING else [bool(one) for one in stored.numbers()]
    if stored is None and type(period) is int and 0 < period <= _MOST_PERIOD:
        slides = [bool((i + 1) % period) for i in range(layers)]
    if len(slides) != layers:
        raise invalid_value(header, key, f"an integer from 1 to {_MOST_PERIOD}, or a list of {layers} flags")
    return {"layer_types": [_SLIDING if one else _FULL for one in slides]}


def _olmo3(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """Layers with windows have unscaled positions. YaRN's factor of the attention is the usual one, which may be stated."""
    if "sliding_window" not in fields:
        return {}
    full: dict[str, Any] = fields.pop("rope_parameters")
    theta = float(header.values.get(f"{header.architecture}.rope.freq_base_swa", full["rope_theta"]))
    usual = 1.0 + 0.1 * math.log(max(1.0, float(full.get("factor", 1.0))))
    for name in YARN_FACTORS:
        stated = header.values.get(key := f"{header.architecture}.{name}", usual)
        if type(stated) is not float or not math.isclose(stated, usual, rel_tol=1e-6):
            raise invalid_value(header, key, f"{usual}; no other value is supported for this architecture")
    rope = {_SLIDING: {"rope_type": "default", "rope_theta": theta}, _FULL: full}
    return {**_windows(header, fields), "rope_parameters": rope}


def _ministral3(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """Queries are scaled by their position; YaRN's factor of the attention is the usual one, or 1."""
    if "rope_parameters" not in fields:  # Mistral Small 3
        return {}
    prefix, rope = header.architecture, dict(fields["rope_parameters"])
    if rope["rope_type"] != YARN:
        raise invalid_value(header, f"{prefix}.rope.scaling.type", f"{YARN!r}")
    rate = header.values[scale := f"{prefix}.attention.temperature_scale"]
    if type(rate) is not float or not 0 < rate <= _MOST_RATE:
        raise invalid_value(header, scale, f"a number above 0, at most {_MOST_RATE:g}")
    original = rope["original_max_position_embeddings"]
    if header.values.get(length := f"{prefix}.attention.temperature_length", original) not in (0, original):
        raise invalid_value(header, length, f"{original}, the original length of the context")
    usual = header.values.get(log := f"{prefix}.rope.scaling.yarn_log_multiplier", 0.0)
    if usual not in (0.0, 1.0):
        raise invalid_value(header, log, "0 or 1")
    factors = {"mscale": 1.0, "mscale_all_dim": 1.0} if usual else {}
    return {"rope_parameters": {**rope, **factors, "llama_4_scaling_beta": rate}}


def _gemma4(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """Sizes of layers with windows and of those without; see Gemma 4's description in transformers for the names."""
    prefix, layers = header.architecture, int(fields["num_hidden_layers"])
    sizes = {}
    for suffix in ("", "_swa"):
        sizes[suffix] = header.values.get(f"{prefix}.attention.key_length{suffix}")
        for name in (f"attention.value_length{suffix}", f"rope.dimension_count{suffix}"):
            if header.values.get(key := f"{prefix}.{name}", sizes[suffix]) != sizes[suffix]:
                raise invalid_value(header, key, f"{sizes[suffix]}, the length of keys")
    stored = header.lists.get(key := f"{prefix}.attention.sliding_window_pattern")
    if stored is None or stored.kind == STRING or stored.count != layers or not stored.numbers()[-1] == 0:
        raise invalid_value(header, key, f"a list of {layers} flags, of which the last is false")
    slides = [bool(one) for one in stored.numbers()]
    first_shared, full = layers - int(fields.get("num_kv_shared_layers", 0)), slides.index(False)
    widths = _by_layer(header, "feed_forward_length", layers)
    heads = _by_layer(header, "attention.head_count_kv", layers)
    doubled = widths != [widths[0]] * layers
    if doubled and widths != [widths[0] * (1 + (i >= first_shared)) for i in range(layers)]:
        raise invalid_value(
            header, f"{prefix}.feed_forward_length", "the same in all layers, or twice that where keys are shared"
        )
    if any(heads[i] != heads[slides.index(one)] for i, one in enumerate(slides)):
        raise invalid_value(header, f"{prefix}.attention.head_count_kv", "the same in all layers of a kind")
    table = header.tensors.get("per_layer_token_embd.weight")
    theta = float(header.values.get(f"{prefix}.rope.freq_base_swa", _THETA))
    proportional = {"rope_type": "proportional", "partial_rotary_factor": rotated_share(header)}
    return {
        "layer_types": [_SLIDING if one else _FULL for one in slides],
        "head_dim": sizes["_swa"],
        "global_head_dim": sizes[""],
        "num_key_value_heads": heads[slides.index(True)] if True in slides else heads[0],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in header.tensors,
        "intermediate_size": widths[0],
        "use_double_wide_mlp": doubled,
        "hidden_size_per_layer_input": int(header.values.get(f"{prefix}.embedding_length_per_layer_input", 0)),
        "vocab_size_per_layer_input": fields["vocab_size"] if table is None else table.shape[0],
        "rope_parameters": {
            _SLIDING: {"rope_type": "default", "rope_theta": theta},
            _FULL: {**proportional, "rope_theta": fields.pop("rope_theta")},
        },
    }


def _by_layer(header: GgufHeader, name: str, layers: int) -> list[int]:
    """Return a value of each layer, of a key that states one for all or one for each."""
    key = f"{header.architecture}.{name}"
    stored = header.lists.get(key)
    return [int(header.values.get(key, 0))] * layers if stored is None else [int(one) for one in stored.numbers()]


_DERIVED: dict[str, Derive] = {
    "gemma2": _scaled_queries,
    "gemma3": _scaled_queries,
    "granite": granite_fields,
    "granitehybrid": granite_hybrid_fields,
    "olmo2": _olmo3,
    "mistral3": _ministral3,
    "exaone4": _windows,
    "gemma4": _gemma4,
    "glm4moe": _glm4_moe,
    "lfm2": lfm2_fields,
    "lfm2moe": lfm2_fields,
    **dict.fromkeys(("qwen2vl", "qwen3vl", "qwen3vlmoe"), _text_alone),
    "qwen3next": delta_fields,
    "qwen35": delta_fields,
    "qwen35moe": delta_fields,
}
