"""GGUF files of models with recurrent layers, LFM2, Qwen3-Next, Qwen3.5 and Granite 4: their sizes, names and order of rows.

llama.cpp's converter stores the decays of a layer as -exp(A_log) and convolutions without their middle dimension; Qwen3.5's value
heads in tiles, the first of each key head, then the second ones; and Qwen3-Next's queries, keys, values and gates one after the
other, where transformers has those of each key head together. Granite's gates and ups are apart, its vectors of heads are
columns, and the norm of its state spaces has a row for each group. Owns these facts; configs.py and blocks.py apply them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from foresay.models.gguf.header import INTEGERS, STRING, GgufHeader
from foresay.models.gguf.values import invalid_value
from foresay.models.huggingface.frozen import ReorderedOutput

HYBRIDS = frozenset({"lfm2", "lfm2moe", "qwen3next", "qwen35", "qwen35moe", "granitehybrid"})
"""Architectures with such layers."""
PRECISE = ("ssm_a", "ssm_d", "ssm_dt", "ssm_conv1d", "ssm_norm", "shortconv")
"""Parts of a layer that stay in float32 whatever the model's dtype, as llama.cpp computes them."""
_LAYER_PARAMETERS = {
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "expert_bias": "exp_probs_b.bias",
    "scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale",
}
"""transformers' parameters without a module -> the last part of llama.cpp's name."""
_BY_KEY_HEAD = "qwen3_next"
"""Family whose layers have their inputs ordered by key heads."""
_SPLIT = re.compile(r"\.(?:in_proj_(?:qkvz|ba)(?=\.in_proj_)|input_linear(?=\.))")
"""Names of the modules that `split_inputs` adds or splits, which are no part of a tensor's name."""
_OF_GRANITE = {"block_sparse_moe.router": "block_sparse_moe.gate", "block_sparse_moe.experts": "mlp.experts"}
"""Parts of Granite's layers -> names of which llama.cpp knows what they are."""
_INTERVAL, _USUAL_INTERVAL = "full_attention_interval", 4
"""Interval of layers with attention of Qwen3-Next's files that do not state it, as in llama.cpp."""
_MOST_INTERVAL, MOST_GROUPS, MOST_INNER = 1024, 1 << 16, 1 << 24


def parameter_namer(header: GgufHeader, name: Callable[[str], str]) -> Callable[[str], str]:
    """Return the mapping of transformers' names to llama.cpp's. name: that of modules and their parameters."""
    shared = "mlp.shared_experts" if header.values.get(f"{header.architecture}.expert_count") else "mlp"

    def of(parameter: str) -> str:
        parameter = _SPLIT.sub("", parameter).replace("shared_mlp.output_linear", f"{shared}.down_proj")
        parameter = parameter.replace("shared_mlp", shared)
        for theirs, known in _OF_GRANITE.items():
            parameter = parameter.replace(theirs, known)
        words = parameter.split(".")  # model, layers, index, part, ...
        stored = _LAYER_PARAMETERS.get(words[-1])
        return name(parameter) if stored is None else f"blk.{words[2]}.{stored}"

    return of


def stored_shape(module: nn.Module, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter in a file, by its name in its module and its shape there."""
    if isinstance(module, nn.Conv1d) and len(shape) == 3:  # of one channel each
        return shape[::2]
    if name in ("A_log", "D") and hasattr(module, "ssm_state_size"):
        return (*shape, 1)
    size = getattr(module, "group_size", None)
    return shape if size is None else (shape[0] // int(size), int(size))


def split_inputs(model: Any, header: GgufHeader) -> None:
    """Replace joint layers of a model, on the meta device, by layers with a file's tensors.

    Of Qwen3-Next, in order of kind: the kernels read their outputs as they are, transformers reads them by key heads. Older files
    have one tensor for all kinds.
    """
    config = model.config
    for mlp in [layer.shared_mlp for layer in model.model.layers if hasattr(layer, "shared_mlp")]:
        inner = mlp.hidden_size
        halves = {
            name: nn.Linear(mlp.input_size, inner, bias=False, device="meta") for name in ("gate_proj", "up_proj")
        }
        mlp.input_linear = ReorderedOutput(halves, torch.arange(2 * inner))
    for i, layer in enumerate(model.model.layers if config.model_type == _BY_KEY_HEAD else ()):
        if (mixer := getattr(layer, "linear_attn", None)) is None:
            continue
        rows = {"in_proj_qkv": int(mixer.conv_dim), "in_proj_z": int(mixer.value_dim)}
        if f"blk.{i}.ssm_in.weight" in header.tensors:
            rows = {"in_proj_qkvz": sum(rows.values())}
        parts = {name: nn.Linear(config.hidden_size, n, bias=False, device="meta") for name, n in rows.items()}
        mixer.in_proj_qkvz = ReorderedOutput(parts, torch.argsort(_by_kind(config, "ssm_in")))
        mixer.in_proj_ba = ReorderedOutput({"in_proj_ba": mixer.in_proj_ba}, torch.argsort(_by_kind(config, "ssm_ba")))


def _by_kind(config: Any, part: str) -> torch.Tensor:
    """Return the index among rows by key heads of each row by kind. part: ssm_in, or ssm_ba for betas and alphas."""
    keys = config.linear_num_key_heads
    own = config.linear_num_value_heads // keys
    sizes = [own] * 2
    if part == "ssm_in":
        sizes = [config.linear_key_head_dim] * 2 + [own * config.linear_value_head_dim] * 2
    kinds = torch.split(torch.arange(keys * sum(sizes)).view(keys, -1), sizes, 1)
    return torch.cat([one.reshape(-1) for one in kinds])


def part_of(tensor_name: str) -> str:
    """Return the part of a layer that a tensor belongs to, such as "attn_q"; "" outside of layers."""
    words = tensor_name.split(".")
    return words[2] if words[0] == "blk" and len(words) > 2 else ""


def row_order(config: Any, tensor_name: str) -> torch.Tensor | None:
    """Return the file's row index of each of transformers' rows; None if they are in the same order."""
    keys, values = (getattr(config, f"linear_num_{kind}_heads", 0) for kind in ("key", "value"))
    part = part_of(tensor_name)
    if config.model_type == _BY_KEY_HEAD:
        return _by_kind(config, part) if part in ("ssm_in", "ssm_ba") else None
    if keys == values:
        return None
    size = config.linear_value_head_dim
    if part in ("ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return _rows(keys, values, 1)
    if part == "attn_gate":
        return _rows(keys, values, size)
    if part in ("attn_qkv", "ssm_conv1d"):  # queries and keys are in their order
        first = 2 * keys * config.linear_key_head_dim
        return torch.cat([torch.arange(first), first + _rows(keys, values, size)])
    return None


def column_order(config: Any) -> torch.Tensor | None:
    """Return transformers' column index of each of the file's columns of ssm_out; None if they are in the same order."""
    keys, values = (getattr(config, f"linear_num_{kind}_heads", 0) for kind in ("key", "value"))
    is_same = keys == values or config.model_type == _BY_KEY_HEAD
    return None if is_same else _rows(values // keys, values, config.linear_value_head_dim)


def _rows(groups: int, heads: int, size: int) -> torch.Tensor:
    """Return the indices of the rows of heads [heads / groups, groups] in the order [groups, heads / groups]."""
    order = torch.arange(heads).view(heads // groups, groups).T.reshape(-1)
    return (order[:, None] * size + torch.arange(size)).reshape(-1)


def lfm2_fields(header: GgufHeader, fields: dict[str, Any], other: str = "conv") -> dict[str, Any]:
    """Return the fields of a configuration that a list of key heads states, 0 for a layer without attention. other: its kind."""
    key = f"{header.architecture}.attention.head_count_kv"
    stored = header.lists.get(key)
    counts = [] if stored is None else [int(one) for one in stored.numbers()]  # checked by `check_values`
    heads = max(counts, default=0)
    if not heads or {*counts} - {0, heads} or fields["num_attention_heads"] % heads:
        raise invalid_value(header, key, "a list of one integer for each layer, 0 or the number of its key heads")
    return {
        "num_key_value_heads": heads,
        "layer_types": ["full_attention" if count else other for count in counts],
        "rope_parameters": {"rope_type": "default", "rope_theta": fields.pop("rope_theta")},
    }


def delta_fields(header: GgufHeader, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a configuration that several values state together. MTP layers are counted with the others."""
    keys = positive_integer(header, "ssm.group_count", MOST_GROUPS)
    prefix, size = header.architecture, fields["head_dim"]
    heads, inner = (int(header.values[f"{prefix}.ssm.{name}"]) for name in ("time_step_rank", "inner_size"))
    rotated = int(header.values[f"{prefix}.rope.dimension_count"])
    if "shared_expert_intermediate_size" in fields:
        positive_integer(header, "expert_shared_feed_forward_length", MOST_INNER)
    if heads % keys:
        raise invalid_value(header, f"{prefix}.ssm.time_step_rank", f"a multiple of the {keys} groups")
    if inner % heads:
        raise invalid_value(header, f"{prefix}.ssm.inner_size", f"a multiple of the {heads} heads")
    if rotated > size:
        raise invalid_value(header, f"{prefix}.rope.dimension_count", f"at most the {size} numbers of a head")
    more = int(header.values.get(f"{prefix}.nextn_predict_layers", 0))
    layers = fields["num_hidden_layers"] - more
    of_mtp = {"num_mtp_layers": more, "mtp_layer_types": ["full_attention"] * more} if more else {}
    rope = {"rope_type": "default", "rope_theta": fields.pop("rope_theta"), "partial_rotary_factor": rotated / size}
    if prefix != "qwen3next":
        rope["mrope_section"] = rotary_sections(header, rotated // 2)
    return {
        **of_mtp,
        "num_hidden_layers": layers,
        "layer_types": [
            "linear_attention" if one else "full_attention" for one in _are_recurrent(header, layers, more)
        ],
        "linear_value_head_dim": inner // heads,
        "rope_parameters": rope,
    }


def _are_recurrent(header: GgufHeader, layers: int, more: int) -> list[bool]:
    """Return which layers have no attention: those of a list of all layers, or all but those of an interval.

    more: MTP layers, which the list includes.
    """
    key = f"{header.architecture}.attention.recurrent_layers"
    stored = header.lists.get(key)
    if stored is None and key not in header.values:
        known = header.architecture != "qwen3next" or f"{header.architecture}.{_INTERVAL}" in header.values
        interval = positive_integer(header, _INTERVAL, _MOST_INTERVAL) if known else _USUAL_INTERVAL
        return [bool((i + 1) % interval) for i in range(layers)]
    found = [] if stored is None or stored.kind == STRING else [bool(one) for one in stored.numbers()]
    if len(found) != layers + more or all(found[:layers]) or any(found[layers:]):
        raise invalid_value(header, key, f"a list of {layers + more} flags, some of them false, and the last {more}")
    return found[:layers]


def positive_integer(header: GgufHeader, name: str, most: int) -> int:
    """Return a value from 1 to `most`, by its key without the architecture. Raises ModelLoadError for another one."""
    key = f"{header.architecture}.{name}"
    value = header.values.get(key)
    if type(value) is not int or not 1 <= value <= most:
        raise invalid_value(header, key, f"an integer from 1 to {most}")
    return value


def rotary_sections(header: GgufHeader, half: int) -> list[int]:
    """Return the frequencies of the three kinds of positions, which are equal for texts."""
    key = f"{header.architecture}.rope.dimension_sections"
    stored = header.lists.get(key)
    sections = [] if stored is None or stored.kind not in INTEGERS else [int(one) for one in stored.numbers()[:4]]
    if len(sections) < 3 or min(sections) < 0 or sum(sections[:3]) != half or any(sections[3:]):
        raise invalid_value(
            header, key, f"a list of at least 3 integers, of which the first 3 add up to {half}, then 0"
        )
    return sections[:3]
