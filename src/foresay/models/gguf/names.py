"""llama.cpp's names of a model's parameters, and the shapes in which files store them.

llama.cpp's converter stores the decays of a recurrent layer as -exp(A_log) and convolutions without their middle dimension.
Granite's gates and ups are apart, its vectors of heads are columns, and the norm of its state spaces has a row for each group.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from foresay.models.gguf.header import GgufHeader

Name = Callable[[str], str]
"""Map transformers' name of a parameter to llama.cpp's."""
PRECISE = ("ssm_a", "ssm_d", "ssm_dt", "ssm_conv1d", "ssm_norm", "shortconv")
"""Parts of a recurrent layer that stay in float32 whatever the model's dtype, as llama.cpp computes them."""
_LAYER_PARAMETERS = {
    "A_log": "ssm_a",
    "D": "ssm_d",
    "dt_bias": "ssm_dt.bias",
    "expert_bias": "exp_probs_b.bias",
    "scale": "ffn_gate_inp.scale",
    "per_expert_scale": "ffn_down_exps.scale",
}
"""transformers' parameters without a module -> the last part of llama.cpp's name."""
_SPLIT = re.compile(r"\.(?:in_proj_(?:qkvz|ba)(?=\.in_proj_)|input_linear(?=\.))")
"""Names of the modules that an architecture's `split` adds or splits, which are no part of a tensor's name."""
_OF_GRANITE = {"block_sparse_moe.router": "block_sparse_moe.gate", "block_sparse_moe.experts": "mlp.experts"}
"""Parts of Granite's layers -> names of which llama.cpp knows what they are."""


def gguf_namer(header: GgufHeader, num_layers: int) -> Name:
    """Return the name mapping of a file's architecture, which must be one of ARCHITECTURES.

    A parameter that is no weight or bias of a module is stored as the weight of its own name, or as a bias without "_bias".
    """
    import gguf

    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(known[header.architecture], num_layers)
    shared = "mlp.shared_experts" if header.stated.get("expert_count") else "mlp"

    def of_module(parameter: str) -> str:
        stem, _, suffix = parameter.rpartition(".")
        if suffix in ("weight", "bias"):
            return f"{names.get_name(stem)}.{suffix}"
        whole = parameter.removesuffix("_bias")
        return f"{names.get_name(whole)}.{'weight' if whole == parameter else 'bias'}"

    def name(parameter: str) -> str:
        parameter = _SPLIT.sub("", parameter).replace("shared_mlp.output_linear", f"{shared}.down_proj")
        parameter = parameter.replace("shared_mlp", shared)
        for theirs, ours in _OF_GRANITE.items():
            parameter = parameter.replace(theirs, ours)
        words = parameter.split(".")  # model, layers, index, part, ...
        stored = _LAYER_PARAMETERS.get(words[-1])
        return of_module(parameter) if stored is None else f"blk.{words[2]}.{stored}"

    return name


def part_of(tensor_name: str) -> str:
    """Return the part of a layer that a tensor belongs to, such as "attn_q"; "" outside of layers."""
    words = tensor_name.split(".")
    return words[2] if words[0] == "blk" and len(words) > 2 else ""


def stored_shape(module: nn.Module, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a parameter in a file, by its name in its module and its shape there."""
    if isinstance(module, nn.Conv1d) and len(shape) == 3:  # of one channel each
        return shape[::2]
    if name in ("A_log", "D") and hasattr(module, "ssm_state_size"):
        return (*shape, 1)
    size = getattr(module, "group_size", None)
    return shape if size is None else (shape[0] // int(size), int(size))
