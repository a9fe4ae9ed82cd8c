"""Checks of the values in a GGUF file's header before a configuration or a tokenizer is made from them.

Owns llama.cpp's names of sizes and factors and the range of each, so that an absurd size never allocates a list, a position table
or a module per layer. shapes.py checks the tensors.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from foresay.errors import ModelLoadError
from foresay.models.families import gemma
from foresay.models.families.stated import FLOATS, INTEGERS, STRING, StoredList, shortened
from foresay.models.families.stated import invalid_value as invalid
from foresay.models.gguf.header import GgufHeader, read_header

ASSISTANT = "gemma4-assistant"
DRAFTS = {"dflash": "block", "eagle3": "head", ASSISTANT: "head"}
"""Architectures of drafts on hidden states, and the drafters that read them."""
_MAX_LAYERS, _MAX_WIDTH, _MAX_LENGTH = 1024, 1 << 20, (1 << 31) - 1
_MAX_HEADS = 1 << 16
SIZES = {
    "block_count": (1, _MAX_LAYERS),
    "context_length": (1, _MAX_LENGTH),
    "embedding_length": (1, _MAX_WIDTH),
    "feed_forward_length": (1, 1 << 24),
    "expert_count": (0, _MAX_HEADS),
    "expert_used_count": (0, _MAX_HEADS),
    "expert_feed_forward_length": (1, 1 << 24),
    "expert_shared_count": (0, _MAX_HEADS),
    "expert_group_count": (0, _MAX_HEADS),
    "expert_group_used_count": (0, _MAX_HEADS),
    "leading_dense_block_count": (0, _MAX_LAYERS),
    "nextn_predict_layers": (0, _MAX_LAYERS),
    "vocab_size": (1, _MAX_LENGTH),
    "attention.head_count": (1, _MAX_HEADS),
    "attention.head_count_kv": (1, _MAX_HEADS),
    "attention.key_length": (1, _MAX_HEADS),
    "attention.value_length": (1, _MAX_HEADS),
    "attention.key_length_swa": (0, _MAX_HEADS),
    "attention.value_length_swa": (0, _MAX_HEADS),
    "attention.shared_kv_layers": (0, _MAX_LAYERS),
    "embedding_length_per_layer_input": (0, _MAX_WIDTH),
    "rope.dimension_count_swa": (0, _MAX_HEADS),
    "attention.sliding_window": (0, _MAX_LENGTH),
    "attention.relative_buckets_count": (1, _MAX_HEADS),
    "rope.dimension_count": (2, _MAX_HEADS),
    "rope.scaling.original_context_length": (1, _MAX_LENGTH),
    "ssm.conv_kernel": (1, _MAX_HEADS),
    "ssm.state_size": (1, _MAX_HEADS),
    "ssm.time_step_rank": (1, _MAX_WIDTH),
    "ssm.inner_size": (1, 1 << 24),
    "shortconv.l_cache": (1, _MAX_HEADS),
}
"""Ranges of integers, by their key without the architecture prefix."""
_REQUIRED = ("block_count", "context_length", "embedding_length", "vocab_size")
"""Sizes that must be positive in every architecture."""
FACTORS = {
    "attention.layer_norm_rms_epsilon": (1e-20, 1.0),
    "attention.layer_norm_epsilon": (1e-20, 1.0),
    "rope.freq_base": (1.0, 1e15),
    "rope.freq_base_swa": (1.0, 1e15),
    "rope.scaling.factor": (1e-3, 1e6),
    "rope.scale_linear": (1e-3, 1e6),
    "rope.scaling.yarn_beta_fast": (1e-3, 1e6),
    "rope.scaling.yarn_beta_slow": (1e-3, 1e6),
    "attn_logit_softcapping": (1e-3, 1e9),
    "final_logit_softcapping": (1e-3, 1e9),
}
"""Ranges of numbers, by their key without the architecture prefix. No value in them causes a division by zero in float32."""
SCALES = ("logit_scale", "residual_scale", "embedding_scale", "attention.scale", "expert_weights_scale")
"""Factors by their key without the prefix, from 1e-6 to 1e6; 0 means none."""
_MODEL_FLAGS = ("expert_weights_norm",)
"""Keys without the architecture prefix that are true or false."""
NONE_IF_0 = (*SCALES, "attention.sliding_window", "expert_group_count", "expert_group_used_count")
"""Keys of which a value of 0 means the same as a missing one."""
TOKENS = "tokenizer.ggml.tokens"
SUPPRESSED = "tokenizer.ggml.suppress_tokens"
"""Ids of tokens that are never generated."""
_MAX_TOKEN_BYTES = 1024
"""Longest token in bytes. Missing merges are derived by splitting each token at every byte, in time quadratic in its length."""
_PER_TOKEN = {"tokenizer.ggml.scores": FLOATS, "tokenizer.ggml.token_type": INTEGERS}
_IDS = re.compile(r"tokenizer\.ggml\.\w+_token_id")
"""Keys of the ids of special tokens."""
_FLAGS = re.compile(r"tokenizer\.ggml\.(add_\w+|remove_extra_whitespaces|normalizer\.\w+)")
"""Keys that are true or false."""
_STRINGS = (
    "general.architecture",
    "general.name",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.chat_template",
)


def checked_header(path: Path) -> GgufHeader:
    """Read a file's header and check its values. Raises as `read_header` and `check_values` do."""
    header = read_header(path)
    check_values(header)
    return header


def check_values(header: GgufHeader) -> None:
    """Raise ModelLoadError for a value outside its range, or that contradicts another value or the length of a list.

    Architectures that are not read here may list a size for each layer; only the element types of such lists are checked.
    """
    for key in _STRINGS:
        if key in header.lists or not isinstance(header.values.get(key, ""), str):
            raise invalid_value(header, key, "a string")
    if not re.fullmatch(r"[\w.-]{1,64}", header.architecture):
        raise invalid_value(header, "general.architecture", "a name of letters, digits and -_.")
    _check_numbers(header)
    _check_heads(header)
    _check_vocabulary(header)


def invalid_value(header: GgufHeader, key: str, allowed: str) -> ModelLoadError:
    """Return the error for an invalid value. allowed: description of valid ones, with an article."""
    return invalid(header.path, key, header.values, header.lists, allowed)


def invalid_tensor(header: GgufHeader, name: str, problem: str) -> ModelLoadError:
    """Return the error for an invalid tensor. problem: starts with a verb."""
    return ModelLoadError(f"{str(header.path)!r} cannot be read: its tensor {shortened(name)} {problem}")


def _check_numbers(header: GgufHeader) -> None:
    known = header.entry
    for name, (low, greatest) in SIZES.items():
        key, least = f"{header.architecture}.{name}", low if known or name in _REQUIRED else 0
        if header.architecture.startswith(gemma.PREFIX) and name == "attention.sliding_window":
            least = 1  # in other families 0 means no window
        if key in header.lists and known and name in known.by_layer:
            _check_list(header, key, 0 if known.mixed else least, greatest)  # 0: no attention
        elif key in header.lists and (known or header.lists[key].kind not in INTEGERS):
            raise invalid_value(
                header,
                key,
                "one integer for all layers" if known else "an integer or a list of integers, one for each layer",
            )
        value = header.values.get(key, least)
        if type(value) is not int or not least <= value <= greatest:
            raise invalid_value(header, key, f"an integer from {least} to {greatest}")
    for name, (smallest, largest) in {**FACTORS, **dict.fromkeys(SCALES, (1e-6, 1e6))}.items():
        key = f"{header.architecture}.{name}"
        value = header.values.get(key, smallest)
        if name in SCALES and type(value) in (int, float) and value == 0:
            continue  # as if it were missing
        if key in header.lists or type(value) not in (int, float) or not smallest <= float(value) <= largest:
            raise invalid_value(header, key, f"a finite number from {smallest:g} to {largest:g}")
    for name in _MODEL_FLAGS:
        key = f"{header.architecture}.{name}"
        if key in header.lists or type(header.values.get(key, True)) is not bool:
            raise invalid_value(header, key, "true or false")
    layers, count = f"{header.architecture}.block_count", len(header.tensors)
    if count and not header.is_part and int(header.values.get(layers, 1)) > count:
        raise invalid_value(header, layers, f"at most {count}, its number of tensors")
    for key, value in header.values.items():
        if key.startswith(f"{header.architecture}.") and isinstance(value, float) and not math.isfinite(value):
            raise invalid_value(header, key, "a finite number")


def _check_list(header: GgufHeader, key: str, least: int, greatest: int) -> None:
    """Raise ModelLoadError unless a list has an integer in a range for each layer."""
    stored, layers = header.lists[key], header.values.get(f"{header.architecture}.block_count")
    is_valid = stored.kind in INTEGERS and stored.count == layers
    if not is_valid or not all(least <= one <= greatest for one in stored.numbers()):
        raise invalid_value(
            header, key, f"one integer, or one for each of the {layers} layers, from {least} to {greatest}"
        )


def _check_heads(header: GgufHeader) -> None:
    layers, more = (
        header.values.get(f"{header.architecture}.{name}", 0) for name in ("block_count", "nextn_predict_layers")
    )
    if more and int(more) >= int(layers) and header.architecture != ASSISTANT:
        raise invalid_value(header, f"{header.architecture}.nextn_predict_layers", f"less than the {layers} layers")
    heads, key_heads = (f"{header.architecture}.attention.head_count{suffix}" for suffix in ("", "_kv"))
    listed = header.lists.get(key_heads) if header.entry else None
    shared = [int(one) for one in listed.numbers()] if listed else [int(header.values.get(key_heads, 0))]
    # 0 in architectures without attention
    if heads in header.values and any(one and int(header.values[heads]) % one for one in shared):
        raise invalid_value(header, key_heads, f"a divisor of the {header.values[heads]} heads")
    rotated = f"{header.architecture}.rope.dimension_count"
    if rotated in header.values and int(header.values[rotated]) % 2:
        raise invalid_value(header, rotated, "an even number")


def _check_vocabulary(header: GgufHeader) -> None:
    tokens = header.lists.get(TOKENS)
    if tokens is None:
        if TOKENS in header.values:
            raise invalid_value(header, TOKENS, "a list of strings")
        return
    for key in (TOKENS, "tokenizer.ggml.merges"):
        if key in header.values or (key in header.lists and header.lists[key].kind != STRING):
            raise invalid_value(header, key, "a list of strings")
    if tokens.longest > _MAX_TOKEN_BYTES:
        raise ModelLoadError(
            f"{str(header.path)!r} cannot be read: a token of {TOKENS} has {tokens.longest} bytes; "
            f"allowed are at most {_MAX_TOKEN_BYTES}"
        )
    for key, kinds in _PER_TOKEN.items():
        stored = header.lists.get(key)
        if key in header.values or (stored is not None and (stored.count != tokens.count or stored.kind not in kinds)):
            raise invalid_value(header, key, f"a list of {tokens.count} numbers, one for each token of {TOKENS}")
    stored = header.lists.get(SUPPRESSED)
    if SUPPRESSED in header.values or (stored is not None and not _are_ids(stored, tokens.count)):
        raise invalid_value(
            header, SUPPRESSED, f"a list of integers from 0 to {tokens.count - 1}, indices into {TOKENS}"
        )
    size = f"{header.architecture}.vocab_size"
    if header.values.get(size, tokens.count) != tokens.count:
        raise invalid_value(header, size, f"{tokens.count}, the length of {TOKENS}")
    for key in (*header.values, *header.lists):
        one = header.values.get(key)
        if _IDS.fullmatch(key) and (type(one) is not int or not 0 <= one < tokens.count):
            raise invalid_value(header, key, f"an integer from 0 to {tokens.count - 1}, an index into {TOKENS}")
        if _FLAGS.fullmatch(key) and type(one) is not bool:
            raise invalid_value(header, key, "true or false")


def _are_ids(stored: StoredList, count: int) -> bool:
    return stored.kind in INTEGERS and stored.count <= count and all(0 <= one < count for one in stored.numbers())
