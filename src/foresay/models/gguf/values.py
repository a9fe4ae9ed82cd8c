"""The values in the head of a GGUF file, checked before a configuration or a tokenizer is made from them.

Owns llama.cpp's names for sizes and factors and the range of each: a size that no model has must not become a list, a table of
positions or a module per layer. What tensors must look like is shapes.py's.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from foresay.errors import ModelLoadError
from foresay.models.gguf.header import FLOATS, INTEGERS, STRING, GgufHeader, read_header, shortened

ARCHITECTURES = frozenset({"llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"})
"""Families whose files are read in their own blocks. The others' are dequantised by transformers; there 0 is a size not used."""
_LAYERS, _WIDEST, _LONGEST = 1024, 1 << 20, (1 << 31) - 1
_HEADS = 1 << 16
_SIZES = {
    "block_count": (1, _LAYERS),
    "context_length": (1, _LONGEST),
    "embedding_length": (1, _WIDEST),
    "feed_forward_length": (1, 1 << 24),
    "expert_count": (0, _HEADS),
    "expert_used_count": (0, _HEADS),
    "expert_feed_forward_length": (1, 1 << 24),
    "vocab_size": (1, _LONGEST),
    "attention.head_count": (1, _HEADS),
    "attention.head_count_kv": (1, _HEADS),
    "attention.key_length": (1, _HEADS),
    "attention.value_length": (1, _HEADS),
    "attention.sliding_window": (0, _LONGEST),
    "attention.relative_buckets_count": (1, _HEADS),
    "rope.dimension_count": (2, _HEADS),
    "rope.scaling.original_context_length": (1, _LONGEST),
    "ssm.conv_kernel": (1, _HEADS),
    "ssm.state_size": (1, _HEADS),
    "ssm.time_step_rank": (1, _WIDEST),
    "ssm.inner_size": (1, 1 << 24),
    "shortconv.l_cache": (1, _HEADS),
}
"""Whole numbers by their names after the architecture's, with their range."""
_NEEDED = ("block_count", "context_length", "embedding_length", "vocab_size")
"""Sizes that no architecture does without."""
_FACTORS = {
    "attention.layer_norm_rms_epsilon": (1e-20, 1.0),
    "attention.layer_norm_epsilon": (1e-20, 1.0),
    "rope.freq_base": (1.0, 1e15),
    "rope.scaling.factor": (1e-3, 1e6),
    "rope.scale_linear": (1e-3, 1e6),
    "attn_logit_softcapping": (1e-3, 1e9),
    "final_logit_softcapping": (1e-3, 1e9),
}
"""Numbers by their names after the architecture's, with their range. None of them divides by zero in float32."""
_TOKENS = "tokenizer.ggml.tokens"
_LONGEST_TOKEN = 1024
"""Bytes: merges that a file lacks are found by cutting each token everywhere, which takes the square of its length."""
_PER_TOKEN = {"tokenizer.ggml.scores": FLOATS, "tokenizer.ggml.token_type": INTEGERS}
_SPECIAL = ("bos", "eos", "unknown", "padding")
"""Special tokens that are read."""
_TEXTS = (
    "general.architecture",
    "general.name",
    "tokenizer.ggml.model",
    "tokenizer.ggml.pre",
    "tokenizer.chat_template",
)


def checked_header(path: Path) -> GgufHeader:
    """A file's head, whose values are checked. Raises as `read_header` and `check_values` do."""
    head = read_header(path)
    check_values(head)
    return head


def check_values(head: GgufHeader) -> None:
    """Raise ModelLoadError for a value that no model has, or that contradicts another or the length of a list.

    Architectures may list some sizes by layer; of those only the types are checked.
    """
    for key in _TEXTS:
        if key in head.lists or not isinstance(head.values.get(key, ""), str):
            raise refused(head, key, "a text")
    if not re.fullmatch(r"[\w.-]{1,64}", head.architecture):
        raise refused(head, "general.architecture", "a name of letters, digits and -_.")
    _check_numbers(head)
    _check_heads(head)
    _check_vocabulary(head)


def refused(head: GgufHeader, key: str, allowed: str) -> ModelLoadError:
    """The error for a value of a file. allowed: what it may be."""
    stored = head.lists.get(key)
    found = f"a list of {stored.count}" if stored is not None else shortened(head.values.get(key, "missing"))
    return ModelLoadError(f"{str(head.path)!r} cannot be read: its value {key} is {found}; allowed is {allowed}")


def refused_tensor(head: GgufHeader, name: str, why: str) -> ModelLoadError:
    """The error for a tensor of a file. why: begins with a verb."""
    return ModelLoadError(f"{str(head.path)!r} cannot be read: its tensor {shortened(name)} {why}")


def _check_numbers(head: GgufHeader) -> None:
    known = head.architecture in ARCHITECTURES
    for name, (low, greatest) in _SIZES.items():
        key, least = f"{head.architecture}.{name}", low if known or name in _NEEDED else 0
        if head.architecture.startswith("gemma") and name == "attention.sliding_window":
            least = 1  # elsewhere 0 is no window
        if key in head.lists and (known or head.lists[key].kind not in INTEGERS):
            raise refused(head, key, "one whole number for all layers" if known else "whole numbers by layer")
        value = head.values.get(key, least)
        if type(value) is not int or not least <= value <= greatest:
            raise refused(head, key, f"a whole number from {least} to {greatest}")
    for name, (smallest, largest) in _FACTORS.items():
        key = f"{head.architecture}.{name}"
        value = head.values.get(key, smallest)
        if key in head.lists or type(value) not in (int, float) or not smallest <= float(value) <= largest:
            raise refused(head, key, f"a finite number from {smallest:g} to {largest:g}")
    layers, count = f"{head.architecture}.block_count", len(head.tensors)
    if count and not head.is_part and int(head.values.get(layers, 1)) > count:
        raise refused(head, layers, f"at most one for each of its {count} tensors")
    for key, value in head.values.items():
        if key.startswith(f"{head.architecture}.") and isinstance(value, float) and not math.isfinite(value):
            raise refused(head, key, "a finite number")


def _check_heads(head: GgufHeader) -> None:
    heads, key_heads = (f"{head.architecture}.attention.head_count{suffix}" for suffix in ("", "_kv"))
    shared = int(head.values.get(key_heads, 0))  # 0 in architectures without attention
    if heads in head.values and shared and int(head.values[heads]) % shared:
        raise refused(head, key_heads, f"a divisor of the {head.values[heads]} heads")
    turned = f"{head.architecture}.rope.dimension_count"
    if turned in head.values and int(head.values[turned]) % 2:
        raise refused(head, turned, "an even number")


def _check_vocabulary(head: GgufHeader) -> None:
    tokens = head.lists.get(_TOKENS)
    if tokens is None:
        if _TOKENS in head.values:
            raise refused(head, _TOKENS, "a list of texts")
        return
    for key in (_TOKENS, "tokenizer.ggml.merges"):
        if key in head.values or (key in head.lists and head.lists[key].kind != STRING):
            raise refused(head, key, "a list of texts")
    if tokens.longest > _LONGEST_TOKEN:
        raise ModelLoadError(
            f"{str(head.path)!r} cannot be read: a token of {_TOKENS} has {tokens.longest} bytes; allowed are {_LONGEST_TOKEN}"
        )
    for key, kinds in _PER_TOKEN.items():
        stored = head.lists.get(key)
        if key in head.values or (stored is not None and (stored.count != tokens.count or stored.kind not in kinds)):
            raise refused(head, key, f"a list of {tokens.count} numbers, one for each of {_TOKENS}")
    size = f"{head.architecture}.vocab_size"
    if head.values.get(size, tokens.count) != tokens.count:
        raise refused(head, size, f"{tokens.count}, the length of {_TOKENS}")
    for name in _SPECIAL:
        key = f"tokenizer.ggml.{name}_token_id"
        one = head.values.get(key, 0)
        if key in head.lists or type(one) is not int or not 0 <= one < tokens.count:
            raise refused(head, key, f"a whole number from 0 to {tokens.count - 1}, as {_TOKENS} lists them")
