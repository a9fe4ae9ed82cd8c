"""The tensors of a GGUF file, compared with the model that its values describe before any of them is read.

The model is transformers' own, without memory of its own (on the meta device), so that what is expected of each tensor needs no
table: its parameters under llama.cpp's names. llama.cpp, too, refuses tensors that are missing, of another shape, or left over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from foresay.errors import ModelLoadError
from foresay.models.gguf.header import GgufHeader, StoredTensor
from foresay.models.gguf.positions import refuse_unread
from foresay.models.gguf.tokenizer import config_of
from foresay.models.gguf.values import ARCHITECTURES, refused, refused_tensor

PLAIN = ("F32", "F16", "BF16")
"""Types that are not rounded."""
_NEEDED = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
"""Values without which transformers would take those of some model of the family."""
_POSITIONS = ("rope_freqs", "rope_factors")
"""Tensors that positions.py reads or refuses."""
Name = Callable[[str], str]
"""llama.cpp's name of a parameter, from transformers' name."""


def empty_model(config: Any, dtype: Any) -> Any:
    """A transformers model of a configuration, on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with init_empty_weights(), no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def namer(head: GgufHeader, config: Any) -> Name:
    """The names of a file's architecture, which is one of ARCHITECTURES."""
    import gguf

    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[head.architecture], config.num_hidden_layers)

    def name(theirs: str) -> str:
        stem, _, suffix = theirs.rpartition(".")
        return f"{names.get_name(stem)}.{suffix}"

    return name


def dense_config(head: GgufHeader) -> Any:
    """The configuration of a file that transformers is to dequantise, compared with the file's tensors. Raises ModelLoadError."""
    from transformers import AutoConfig

    refuse_unread(head, in_blocks=False)
    if head.architecture in ARCHITECTURES:
        config = config_of(head)
        check_tensors(head, empty_model(config, torch.float32), namer(head, config))
    else:
        config = AutoConfig.from_pretrained(head.path.parent, gguf_file=head.path.name)
        check_amount(head, empty_model(config, torch.float32))
    return config


def check_tensors(head: GgufHeader, model: Any, name: Name) -> None:
    """Raise ModelLoadError for a tensor that is missing, of another shape or type than the model's, or none of it.

    model: of the file's configuration, on the meta device.
    """
    _check_supposed(head, model.config)
    shapes, missing = {}, []
    for theirs, shape, needed in _parameters(model):
        own = name(theirs)
        shapes[own] = shape
        if needed and own not in head.tensors:
            missing.append(theirs)
    if missing:
        part = "; it is one of several files, which backend='llama.cpp' reads" if head.is_part else ""
        raise ModelLoadError(
            f"{str(head.path)!r} lacks {len(missing)} of the model's tensors ({', '.join(missing[:3])}, ...){part}"
        )
    for own, tensor in head.tensors.items():
        if not own.startswith(_POSITIONS) and not own.endswith("attn_rot_embd.weight"):
            _check_tensor(head, own, tensor, shapes)


def check_amount(head: GgufHeader, model: Any) -> None:
    """Raise ModelLoadError for a model on the meta device that has far more weights than the file.

    For architectures whose names are not known here: transformers would create what is missing before it reports it.
    """
    stored = sum(math.prod(tensor.shape) for tensor in head.tensors.values())
    wanted = sum(one.numel() for one in model.parameters())
    if wanted > 2 * stored:
        raise ModelLoadError(
            f"{str(head.path)!r} cannot be read: its values describe a model of {wanted} weights, and its tensors have {stored}"
        )


def _parameters(model: Any) -> list[tuple[str, tuple[int, ...], bool]]:
    """(name, shape, whether the file must have it) of each parameter, and of the biases that linear layers may have."""
    tied = model.config.tie_word_embeddings
    output = model.get_output_embeddings()
    found = []
    for path, module in model.named_modules():
        for short, one in module.named_parameters(recurse=False):
            found.append((f"{path}.{short}", tuple(one.shape), not (tied and module is output)))
        if isinstance(module, nn.Linear) and module.bias is None and module is not output:
            # a configuration need not say that there are biases: the file does
            found.append((f"{path}.bias", (module.out_features,), False))
    return found


def _check_tensor(head: GgufHeader, own: str, tensor: StoredTensor, shapes: Mapping[str, tuple[int, ...]]) -> None:
    import gguf

    shape = shapes.get(own)
    if shape is None:
        why = f"is none of the {len(shapes)} that its values describe ({head.architecture}.block_count, ...)"
    elif tensor.shape != shape:
        why = f"has the shape {list(tensor.shape)}; its values describe {list(shape)}"
    elif len(shape) == 1 and tensor.kind not in PLAIN:
        why = f"is of type {tensor.kind}; allowed are {', '.join(PLAIN)}"
    elif tensor.kind not in PLAIN and gguf.GGMLQuantizationType[tensor.kind] not in gguf.quants._type_traits:
        why = f"is of type {tensor.kind}, which weights are not read from"
    else:
        return
    raise refused_tensor(head, own, why)


def _check_supposed(head: GgufHeader, config: Any) -> None:
    """Refuse values that transformers does not read, where they are not what it takes them for."""
    for name in _NEEDED:
        if f"{head.architecture}.{name}" not in head.values:
            raise refused(head, f"{head.architecture}.{name}", "a number, which nothing else gives")
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    supposed = {
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        "attn_logit_softcapping": getattr(config, "attn_logit_softcapping", None),
        "final_logit_softcapping": getattr(config, "final_logit_softcapping", None),
    }
    for name, value in supposed.items():
        key = f"{head.architecture}.{name}"
        if head.values.get(key, value) != value:
            raise refused(head, key, f"{value}: nothing else is read from such files")
