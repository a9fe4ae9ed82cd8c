"""The configuration of a model folder, checked before transformers makes anything from it.

Owns the range of the sizes and factors that families share, whatever they call them. A size that no model has would become a list
of layers or a module for each; one that disagrees with the files would be filled with noise before transformers says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from foresay.errors import ModelLoadError
from foresay.models.sources.gguf_head import shortened

_LARGEST_FILE = 16 << 20
"""Bytes of a config.json; the largest ones known have some hundred thousand."""
_DEEPEST = 32
"""Objects within objects."""
_LAYERS, _WIDTH, _HEADS, _LENGTH = (1, 1024), (1, 1 << 24), (1, 1 << 16), (1, (1 << 31) - 1)
_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_decoder_layers"), _LAYERS),
    **dict.fromkeys(("encoder_layers", "decoder_layers"), (0, 1024)),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "intermediate_size", "moe_intermediate_size"), _WIDTH),
    **dict.fromkeys(
        ("d_ff", "ffn_dim", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "word_embed_proj_dim"), _WIDTH
    ),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "n_head", "num_heads", "num_kv_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "head_dim", "d_kv"), _HEADS),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "num_experts_per_tok"), (0, 1 << 16)),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "vocab_size"), _LENGTH),
    "sliding_window": (0, (1 << 31) - 1),
}
"""The least and the greatest of whole numbers; a list gives one for each layer, null is the family's own."""
_EPSILON, _FACTOR = (1e-20, 1.0), (1e-6, 1e15)
_FACTORS = {
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"), _EPSILON),
    **dict.fromkeys(("rope_theta", "rotary_emb_base", "factor", "rope_local_base_freq", "attention_factor"), _FACTOR),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"), _FACTOR),
    **dict.fromkeys(("short_factor", "long_factor"), _FACTOR),
    **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), (1e-6, 1.0)),
    **dict.fromkeys(("final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"), (1e-3, 1e9)),
}
"""The least and the greatest of numbers, which are finite."""


def check_config(folder: str, common: Mapping[str, Any]) -> None:
    """Raise ModelLoadError for sizes and factors that no model has.

    folder: a folder or hub id. common: transformers' arguments for finding files. Raises what transformers raises for a file that
    is missing or no JSON.
    """
    from transformers import PreTrainedConfig

    path = Path(folder) / "config.json"
    if path.is_file() and path.stat().st_size > _LARGEST_FILE:
        raise ModelLoadError(f"{str(path)!r} has {path.stat().st_size} bytes; allowed are {_LARGEST_FILE}")
    values, _ = PreTrainedConfig.get_config_dict(folder, **common)
    for where, part in _objects(folder, values):
        for key, value in part.items():
            for one in value if isinstance(value, list) else [value]:
                allowed = None if one is None else _allowed(key, one)
                if allowed is not None:
                    raise _refused(folder, f"{where}{key}", one, allowed)
        heads, shared = part.get("num_attention_heads"), part.get("num_key_value_heads")
        if type(heads) is int and type(shared) is int and heads % shared:
            raise _refused(folder, f"{where}num_key_value_heads", shared, f"a divisor of the {heads} heads")


def _allowed(key: str, value: object) -> str | None:
    """The values that are allowed, where this is none of them."""
    if key in _SIZES:
        low, high = _SIZES[key]
        fits = type(value) is int and low <= value <= high
        return None if fits else f"a whole number from {low} to {high}"
    if key in _FACTORS:
        smallest, largest = _FACTORS[key]
        fits = type(value) in (int, float) and smallest <= value <= largest  # type: ignore[operator]
        return None if fits else f"a finite number from {smallest:g} to {largest:g}"
    return "a number" if isinstance(value, float) and math.isnan(value) else None


def check_size(folder: str, kind: Any, config: Any, *, trust_remote_code: bool) -> None:
    """Raise ModelLoadError for a configuration of far more weights than the files of a folder can hold.

    kind: transformers' Auto class. The model is made without memory of its own (on the meta device).
    """
    stored = sum(one.stat().st_size for one in Path(folder).iterdir() if one.is_file())
    at_most = stored * (
        8 if getattr(config, "quantization_config", None) else 1
    )  # a weight takes a bit, or else a byte
    from transformers.initialization import no_init_weights

    with torch.device("meta"), no_init_weights():
        wanted = sum(one.numel() for one in kind.from_config(config, trust_remote_code=trust_remote_code).parameters())
    if wanted > at_most:
        raise ModelLoadError(
            f"{folder!r} cannot be read: its config.json describes a model of {wanted} weights, and its files have {stored} bytes"
        )


def _objects(folder: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(what names of its values begin with, the object) for the whole and each object in it."""
    waiting: list[tuple[str, Any, int]] = [("", values, 0)]
    while waiting:
        where, value, depth = waiting.pop()
        if depth > _DEEPEST:
            raise ModelLoadError(f"{folder!r} cannot be read: its config.json nests more than {_DEEPEST} deep")
        if isinstance(value, Mapping):
            yield where, value
            waiting += [(f"{where}{name}.", one, depth + 1) for name, one in value.items()]
        elif isinstance(value, list):
            waiting += [(where, one, depth + 1) for one in value]


def _refused(folder: str, where: str, value: object, allowed: str) -> ModelLoadError:
    return ModelLoadError(
        f"{folder!r} cannot be read: {where} in its config.json is {shortened(value)}; allowed is {allowed}"
    )
