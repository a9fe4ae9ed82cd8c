"""The configuration of a GGUF file, as an object of transformers.

Made of the file's values by the entry of its architecture. Reads no weights.
"""

from __future__ import annotations

from typing import Any

from foresay.models.families.positions import THETA
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.positions import rope_parameters, rotated_share
from foresay.models.gguf.values import NONE_IF_0
from foresay.models.gguf.vocabulary import read_vocabulary

_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "rope.freq_base": "rope_theta",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
"""Keys without the architecture prefix -> fields of transformers' configuration, of every architecture."""
_REQUIRED = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
"""Values that transformers would replace by those of some model of the family if they were missing."""
_IDS = {"bos_token_id": "bos", "eos_token_id": "eos", "unk_token_id": "unknown", "pad_token_id": "padding"}
"""Fields of the configuration -> roles of special tokens."""


def config_of(header: GgufHeader) -> Any:
    """Return the transformers configuration of a file, whose architecture must be one of ARCHITECTURES.

    header: checked by `check_values`. Raises ModelLoadError for missing values and those that contradict each other.
    """
    from transformers import AutoConfig

    fields = fields_of(header)
    config = AutoConfig.for_model(header.family.model_type, **fields)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        # a missing id defaults to that of some model of the family, which may exceed this vocabulary
        if isinstance(found := getattr(config, name, None), int) and found >= config.vocab_size:
            setattr(config, name, None)
    set_end_tokens(config, header)
    return config


def fields_of(header: GgufHeader) -> dict[str, Any]:
    """Return the fields of `config_of`, which raises as this."""
    stated, one = header.stated, header.family
    for name in [name for name in (*_REQUIRED, *one.required) if name not in one.lacking]:
        if name not in stated:
            raise stated.invalid(name, "a number; it has no default")
    fields: dict[str, Any] = dict(one.fixed)
    for key, name in {**_COMMON, **one.fields}.items():
        value = stated.get(key)
        if value is not None and (value or key not in NONE_IF_0):
            fields[name] = value
    ids = {name: header.values.get(f"tokenizer.ggml.{role}_token_id") for name, role in _IDS.items()}
    fields |= {name: value for name, value in ids.items() if value is not None}
    fields["tie_word_embeddings"] = "output.weight" not in stated.shapes
    if "vocab_size" not in fields and "token_embd.weight" in stated.shapes:
        fields["vocab_size"] = stated.shapes["token_embd.weight"][0]
    fields.setdefault("head_dim", fields["hidden_size"] // fields["num_attention_heads"])
    if not fields["head_dim"]:
        raise stated.invalid("attention.head_count", "at most embedding_length")
    fields.setdefault("rope_theta", THETA)
    if one.yarn is not None:
        fields["rope_parameters"] = rope_parameters(header, fields.pop("rope_theta"))
    if one.proportional:
        fields["partial_rotary_factor"] = rotated_share(header)
    return fields if one.derive is None else fields | one.derive(stated, fields)


def set_end_tokens(config: Any, header: GgufHeader) -> None:
    """Set the ids that end a text or a turn, of which transformers reads only one."""
    vocabulary = read_vocabulary(header)
    if vocabulary is not None and len(vocabulary.ends) > 1:
        config.eos_token_id = list(vocabulary.ends)
