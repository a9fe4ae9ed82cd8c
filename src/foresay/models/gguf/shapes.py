"""Checks of a GGUF file's tensors against the model that its values describe, before any tensor is read.

The expected shapes come from the parameters of transformers' model on the meta device, mapped to llama.cpp's names. Like
llama.cpp, it rejects missing tensors, tensors of another shape, and unknown tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from foresay.errors import ModelLoadError
from foresay.models.families.family import SLIDING
from foresay.models.families.stated import Stated
from foresay.models.gguf.configs import set_end_tokens
from foresay.models.gguf.header import GgufHeader, StoredTensor
from foresay.models.gguf.keys import check_keys
from foresay.models.gguf.names import Name, stored_shape
from foresay.models.gguf.positions import refuse_unread
from foresay.models.gguf.values import invalid_tensor
from foresay.models.huggingface.experts import expert_weights
from foresay.models.huggingface.linears import stored_weights

PLAIN = ("F32", "F16", "BF16")
"""Types that are not quantized."""
_EXPERTS, _JOINT = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
"""Parts of the experts of a layer, each a tensor [experts, out, in] of a file: of most files, and of those that join two."""
_POSITIONS = ("rope_freqs", "rope_factors")
"""Prefixes of tensors that positions.py reads or rejects."""


def empty_model(config: Any, dtype: Any) -> Any:
    """Return a transformers model of a configuration, on the meta device."""
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with init_empty_weights(), no_init_weights():
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def expert_parts(path: str, is_stored: Callable[[str], bool]) -> tuple[str, ...]:
    """Return the parts of a layer's experts in a file, the last of which is that of down projections.

    is_stored: whether the file has a parameter of transformers' name.
    """
    return _JOINT if is_stored(f"{path}.{_JOINT[0]}.weight") else _EXPERTS


def dense_config(header: GgufHeader) -> Any:
    """Return the configuration of a file that transformers dequantizes. Raises ModelLoadError if the tensors do not match it."""
    from transformers import AutoConfig

    refuse_unread(header, ours=False)
    check_keys(header, ("general",))
    config = AutoConfig.from_pretrained(header.path.parent, gguf_file=header.path.name)
    check_size(header, empty_model(config, torch.float32))
    set_end_tokens(config, header)
    return config


def check_tensors(header: GgufHeader, model: Any, name: Name) -> None:
    """Raise ModelLoadError for a missing or unknown tensor, or one whose shape or type does not match the model.

    model: built from the file's configuration, on the meta device.
    """
    check_keys(header, ("general", "model"))
    _check_unread_values(header, model.config)
    output = model.get_output_embeddings()
    shapes = shapes_of(header, model, name, output, is_tied=model.config.tie_word_embeddings)
    unread = (*_mtp_layers(header, model.config), *_shared_keys(model.config))
    for tensor_name, tensor in header.tensors.items():
        if tensor_name.startswith(unread):
            continue
        if not tensor_name.startswith(_POSITIONS) and not tensor_name.endswith("attn_rot_embd.weight"):
            check_tensor(header, tensor_name, tensor, shapes)


def shapes_of(
    header: GgufHeader, module: nn.Module, name: Name, output: nn.Module | None = None, *, is_tied: bool = False
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors of a module on the meta device. Raises ModelLoadError if the file lacks one.

    output: the output layer in the module, which has no bias, and no tensor if it is tied.
    """
    shapes, missing = {}, []
    for parameter, shape, needed in _parameters(
        module, lambda one: name(one) in header.tensors, output, is_tied=is_tied
    ):
        tensor_name = name(parameter)
        shapes[tensor_name] = shape
        if needed and tensor_name not in header.tensors:
            missing.append(parameter)
    if missing:
        part = "; it is one of several files, which only backend='llama.cpp' supports" if header.is_part else ""
        raise ModelLoadError(
            f"{str(header.path)!r} lacks {len(missing)} of the model's tensors ({', '.join(missing[:3])}, ...){part}"
        )
    return shapes


def _mtp_layers(header: GgufHeader, config: Any) -> tuple[str, ...]:
    """Return the prefixes of the tensors of multi-token-prediction layers, which mtp.py checks; () without such layers."""
    count = int(header.values.get(f"{header.architecture}.block_count", 0))
    return tuple(f"blk.{i}." for i in range(config.num_hidden_layers, count))


def _shared_keys(config: Any) -> list[str]:
    """Return the prefixes of the tensors of keys and values of layers that read those of others."""
    modes = getattr(config, "kv_sharing_modes", None) or ()
    parts = ("attn_k.", "attn_v.", "attn_k_norm.")
    return [f"blk.{i}.{part}" for i, mode in enumerate(modes) if mode == "reuse" for part in parts]


def check_size(header: GgufHeader, model: Any) -> None:
    """Raise ModelLoadError if a model on the meta device has over twice as many weights as the file.

    For architectures without a name mapping: transformers would allocate missing weights before it reports them.
    """
    stored = sum(math.prod(tensor.shape) for tensor in header.tensors.values())
    wanted = sum(one.numel() for one in model.parameters())
    if wanted > 2 * stored:
        raise ModelLoadError(
            f"{str(header.path)!r} cannot be read: its values describe a model of {wanted} weights, but its tensors have {stored}"
        )


def _parameters(
    model: nn.Module, is_stored: Callable[[str], bool], output: nn.Module | None, *, is_tied: bool
) -> list[tuple[str, tuple[int, ...], bool]]:
    """Return (name, shape, whether it is required) of each parameter and of each linear layer's optional bias."""
    found: list[tuple[str, tuple[int, ...], bool]] = []
    for path, module in model.named_modules():
        if (weights := expert_weights(module)) is not None:
            hidden, inner = weights.down(0)[0].shape
            *ups, down = expert_parts(path, is_stored)
            rows = (2 * inner // len(ups), hidden)
            for short, shape in (*((one, rows) for one in ups), (down, (hidden, inner))):
                found.append((f"{path}.{short}.weight", (weights.count, *shape), True))
                if weights.down(0)[1] is not None:
                    found.append((f"{path}.{short}.bias", (weights.count, shape[0]), True))
            continue
        for short, one in stored_weights(module).items():
            stored = stored_shape(module, short, tuple(one.shape))
            found.append((f"{path}.{short}", stored, not (is_tied and module is output)))
        if isinstance(module, nn.Linear) and module.bias is None and module is not output:
            # some configurations do not state whether there are biases; the file decides
            found.append((f"{path}.bias", (module.out_features,), False))
    return found


def check_tensor(
    header: GgufHeader, tensor_name: str, tensor: StoredTensor, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ModelLoadError for a tensor without one of these shapes, by name, or of a type that is not read."""
    import gguf

    shape = shapes.get(tensor_name)
    if shape is None:
        problem = f"is not among the {len(shapes)} that its values describe ({header.architecture}.block_count, ...)"
    elif tensor.shape not in (shape, shape[1:] if shape[0] == 1 else shape):  # a matrix of one row may be a vector
        problem = f"has shape {list(tensor.shape)}, but its values describe {list(shape)}"
    elif len(tensor.shape) == 1 and tensor.kind not in PLAIN:
        problem = f"is of type {tensor.kind}; it must be one of {', '.join(PLAIN)}"
    elif tensor.kind not in PLAIN and gguf.GGMLQuantizationType[tensor.kind] not in gguf.quants._type_traits:
        problem = f"is of type {tensor.kind}, which is not supported for weights"
    else:
        return
    raise invalid_tensor(header, tensor_name, problem)


def _check_unread_values(header: GgufHeader, config: Any) -> None:
    """Raise ModelLoadError if a value that transformers ignores differs from the one it assumes."""
    stated, one = header.stated, header.family
    assumed: dict[str, Any] = {}
    if "attention.key_length" not in one.derived:
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        share = float((config.rope_parameters or {}).get("partial_rotary_factor", 1.0))
        assumed |= dict.fromkeys(("attention.key_length", "attention.value_length"), size)
        assumed["rope.dimension_count"] = int(size * share)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        assumed[name] = getattr(config, name, None)
    scale = stated.get("attention.scale")
    if scale not in (None, 0) and "attention.scale" not in one.fields:
        own = getattr(config, "query_pre_attn_scalar", None) or assumed.get("attention.key_length", 1)
        if abs(float(scale) * own**0.5 - 1) > 1e-5:
            assumed["attention.scale"] = own**-0.5
    types = getattr(config, "layer_types", None) or []
    if SLIDING in types:
        _check_windows(stated, [kind == SLIDING for kind in types])
        rope = config.rope_parameters
        assumed["rope.freq_base_swa"] = rope.get(SLIDING, rope)["rope_theta"]
    for name, value in assumed.items():
        if stated.get(name, value) != value:
            raise stated.invalid(name, f"{value}; no other value is supported for this architecture")


def _check_windows(stated: Stated, own: list[bool]) -> None:
    """Raise ModelLoadError if the file has windows in other layers than the model."""
    name = "attention.sliding_window_pattern"
    found, every = stated.flags(name), stated.get(name, 0)
    if found is None:
        found = [(i + 1) % every != 0 for i in range(len(own))] if type(every) is int and every > 0 else own
    if found != own:
        raise stated.invalid(name, f"that of the {sum(own)} of {len(own)} layers with windows of its family")
