"""Drafts on hidden states in GGUF files: block drafters (`dflash`) and heads (`eagle3`), as llama.cpp names their parts.

Owns the names of values and tensors, and translates them into those of drafts/files.py, which checks them. Layers of the target
are counted as here: 0 is the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from foresay.models.drafts.base import StoredDraft
from foresay.models.drafts.block_config import BlockConfig
from foresay.models.drafts.config import HeadConfig
from foresay.models.drafts.fields import FULL, SLIDING, same
from foresay.models.drafts.files import OFFSETS, assembled, halved
from foresay.models.drafts.layers import rotary_embedding
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.header import StoredTensor as GgufTensor
from foresay.models.gguf.positions import DIVISORS, scaling_divisors
from foresay.models.gguf.types import read_weight
from foresay.models.gguf.values import DRAFTS, checked_header, invalid_tensor, invalid_value

_VALUES = {
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "attention.sliding_window": "sliding_window",
    "attention.causal": "causal",
    **same(
        "block_size", "sample_from_anchor", "conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"
    ),
    **same("target_hidden_size", "norm_before_residual", "norm_before_fc", "final_logit_softcapping"),
}
"""A file's value -> our field (see drafts/fields.py)."""
_OTHERS = ("vocab_size", "attention.value_length", "rope.dimension_count", "markov_rank", "has_confidence_head")
"""Values that the tensors' shapes determine; a contradiction is found there."""
_LLAMA3: Mapping[str, Any] = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_OF_SCALING, _ORIGINAL = "rope.scaling.original_context_length", 8192
"""Parameters of scaled positions that all models of Llama 3 share, and the length before scaling of files that state none."""
_LISTS = ("target_layers", "extract_layers", "attention.sliding_window_pattern")
_NEUTRAL: dict[str, tuple[object, ...]] = {"rope.scaling.type": ("none",), "decoder_arch": ("qwen3",)}
"""Values with which a draft is the same as without them."""
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{one}": f"self_attn.{one}_proj" for one in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"attn_{one}_norm": f"self_attn.{one}_norm" for one in "qk"},
    **{f"ffn_{one}": f"mlp.{one}_proj" for one in ("gate", "up", "down")},
    **{f"{one}_conv_proj": f"{two}_conv.kernel_projection" for one, two in (("attn", "attention"), ("ffn", "mlp"))},
}
_TENSORS = {
    "fc.weight": "fc.weight",
    "output_norm.weight": "norm.weight",
    "enc.output_norm.weight": "hidden_norm.weight",
    "enc.input_norm.weight": "input_norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd.weight": "embed_tokens.weight",
    "markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_w2.weight": "markov_head.markov_w2.weight",
    "conf_proj.weight": "confidence_head.proj.weight",
    "conf_proj.bias": "confidence_head.proj.bias",
    "selector_hidden.weight": "candidate_selector.hidden_projection.weight",
    "selector_predecessor.weight": "candidate_selector.predecessor_codebook",
    "selector_successor.weight": "candidate_selector.successor_codebook",
    "d2t": OFFSETS,
    "d2t.weight": OFFSETS,
}
_HEADS = {"q_proj": "eagle3.attention.head_count", "k_proj": "eagle3.attention.head_count_kv"}
"""Matrices whose rows other files order differently -> the value with their number of heads."""


@dataclass(frozen=True, slots=True)
class DraftTensor:
    """A tensor of a GGUF file, not read yet; see tensor_files.StoredTensor."""

    header: GgufHeader
    name: str
    stored: GgufTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """See StoredTensor."""
        return self.stored.shape

    @property
    def dtype(self) -> str:
        """See StoredTensor."""
        return self.stored.kind

    @property
    def floats(self) -> bool:
        """See StoredTensor."""
        return not self.stored.kind.startswith("I")

    def read(self) -> torch.Tensor:
        """Return the numbers: integers, or floating-point numbers, in bf16 if they were quantized."""
        if not self.floats:
            kind = np.int64 if self.stored.kind == "I64" else np.int32
            return torch.from_numpy(np.array(self.stored.data).view(kind).astype(np.int64)).reshape(self.shape)
        weight = read_weight(self.stored)
        if not weight.is_finite():
            raise invalid_tensor(self.header, self.name, "contains numbers that are not finite")
        dense = self.stored.kind in ("F32", "F16", "BF16")
        return weight.dense(torch.float32 if dense else torch.bfloat16).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class _Zeros:
    """A tensor of zeros that a file leaves out."""

    shape: tuple[int, ...]
    dtype: str = "F32"
    floats: bool = True

    def read(self) -> torch.Tensor:
        """Return the zeros."""
        return torch.zeros(self.shape)


def read_tensors(wanted: Mapping[str, DraftTensor]) -> dict[str, torch.Tensor]:
    """Return the numbers of tensors."""
    return {name: one.read() for name, one in wanted.items()}


def read_gguf_draft(path: Path) -> StoredDraft:
    """Read a draft from a GGUF file. Raises as `read_draft` does, and ModelLoadError for a damaged file."""
    header = checked_header(path)
    if header.architecture not in DRAFTS:
        raise invalid_value(header, "general.architecture", f"one of {', '.join(DRAFTS)} for a draft")
    _refuse_unread(header)
    tensors: dict[str, DraftTensor | _Zeros] = {
        _name(name): DraftTensor(header, name, one) for name, one in header.tensors.items() if name != DIVISORS
    }
    if "confidence_head.proj.weight" in tensors:
        tensors.setdefault("confidence_head.proj.bias", _Zeros((1,)))
    found = _fields(header, {name: one.shape for name, one in tensors.items()})
    source = f"the draft in {str(path)!r}"

    def read(wanted: Mapping[str, DraftTensor | _Zeros]) -> dict[str, torch.Tensor]:
        return {name: _in_our_order(header, name, one.read()) for name, one in wanted.items()}

    kind = HeadConfig if header.architecture == "eagle3" else BlockConfig
    return assembled(kind, found, tensors, read, source)


def _name(name: str) -> str:
    """Return the name of a tensor in safetensors files; an unknown one stays as it is, and is refused later."""
    parts = name.split(".")
    if parts[0] != "blk" or len(parts) < 3:
        return _TENSORS.get(name, name)
    if parts[2] in ("attn_conv_base", "ffn_conv_base"):
        return f"layers.{parts[1]}.{'attention' if parts[2] == 'attn_conv_base' else 'mlp'}_conv.base_kernel"
    return f"layers.{parts[1]}.{_LAYER.get(parts[2], parts[2])}.{'.'.join(parts[3:])}"


def _fields(header: GgufHeader, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Return the fields of a configuration. shapes: of the tensors by their names in safetensors files."""
    prefix = header.architecture
    names = {field: key for name, field in _VALUES.items() if (key := f"{prefix}.{name}") in header.values}
    out: dict[str, Any] = {field: header.values[key] for field, key in names.items()}
    layers = next((header.lists[f"{prefix}.{name}"] for name in _LISTS[:2] if f"{prefix}.{name}" in header.lists), None)
    windows = header.lists.get(f"{prefix}.attention.sliding_window_pattern")
    tokens = header.lists.get("tokenizer.ggml.tokens")
    size = header.values.get(f"{prefix}.vocab_size", None if tokens is None else tokens.count)
    out |= {"vocab_size": size, "hidden_act": "silu", "names": names}
    out["hidden_layers"] = None if layers is None else [int(one) for one in layers.numbers()]
    if OFFSETS in shapes:
        out["draft_vocab_size"] = shapes[OFFSETS][0]
    if windows is not None:
        out["layer_types"] = [SLIDING if one else FULL for one in windows.numbers()]
    elif out.get("sliding_window"):
        out["use_sliding_window"] = True
    else:
        out.pop("sliding_window", None)
    out |= _scaling(header, out)
    if prefix == "eagle3":
        return HeadConfig.usual({}, out) | out
    rank = shapes.get("markov_head.markov_w1.weight", (0, 0))[-1]
    reads = shapes.get("confidence_head.proj.weight", (0, 0))[-1]
    return out | {
        "model_type": "qwen3" if "layers.0.self_attn.q_norm.weight" in shapes else "llama",
        "mask_token_id": header.values.get("tokenizer.ggml.mask_token_id", header.values.get("dflash.mask_token_id")),
        "markov_rank": rank,
        "enable_confidence_head": reads > 0,
        "confidence_head_with_markov": reads > int(out.get("hidden_size", 0)),
        "sample_from_anchor": out.get("sample_from_anchor", rank > 0),
    }


def _scaling(header: GgufHeader, layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the field of scaled positions that a tensor of divisors stands for: Llama 3's; empty without them.

    layer: the other fields. Raises ModelLoadError for other divisors.
    """
    divisors = scaling_divisors(header)
    if divisors is None:
        return {}
    dim = int(layer.get("head_dim") or layer.get("hidden_size", 0) // max(layer.get("num_attention_heads", 0), 1))
    if len(divisors) != dim // 2:
        raise invalid_tensor(header, DIVISORS, f"has {len(divisors)} divisors for {dim // 2} frequencies")
    if bool((divisors == 1).all()):
        return {}
    plain = {name: layer[name] for name in ("hidden_size", "num_attention_heads", "rope_theta") if name in layer}
    original = header.values.get(f"{header.architecture}.{_OF_SCALING}", _ORIGINAL)
    found = {**_LLAMA3, "factor": float(divisors.max()), "original_max_position_embeddings": original}
    with_scaling = rotary_embedding({**plain, "head_dim": dim, "rope_scaling": found}).inv_freq
    ratios = rotary_embedding({**plain, "head_dim": dim}).inv_freq / with_scaling
    if not torch.allclose(ratios, divisors, rtol=1e-4):
        raise invalid_tensor(header, DIVISORS, f"has other divisors than Llama 3's scaling of {original} positions")
    return {"rope_scaling": found}


def _in_our_order(header: GgufHeader, name: str, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in the order of safetensors files: heads of `eagle3` interleave the halves of a rotated head."""
    if name == OFFSETS:  # some converters write the ids themselves, which always ascend
        ascends = bool((weight[1:] > weight[:-1]).all())
        return weight - torch.arange(len(weight)) if ascends else weight
    key = next((key for kind, key in _HEADS.items() if f".{kind}." in name), None)
    if header.architecture != "eagle3" or key is None:
        return weight
    return halved(weight, int(header.values.get(key, header.values[_HEADS["q_proj"]])))


def _refuse_unread(header: GgufHeader) -> None:
    """Raise ModelLoadError for a value of the draft that is not read, and that changes what it computes."""
    prefix, read = f"{header.architecture}.", {*_VALUES, *_OTHERS, *_LISTS, _OF_SCALING, "mask_token_id"}
    for key in (*header.values, *header.lists):
        name = key.removeprefix(prefix)
        if name == key or name in read or name.startswith("source."):
            continue
        value = header.values.get(key)
        if name == "rope.dimension_sections":  # positions of a text alone
            sections = header.lists[key].numbers() if key in header.lists else [value]
            if not any(sections[1:]):
                continue
        elif key in header.values and (not value or value in _NEUTRAL.get(name, ())):
            continue
        raise invalid_value(header, key, "no value: drafts with it are not supported")
