"""The multi-token-prediction layers of a GGUF file, which follow its other layers: blk.N with further tensors nextn.*.

Owns their names, and checks their tensors before any is read. The embedding and the output layer are the model's own, as in
transformers; a file's copies of them are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from foresay.errors import UnsupportedModelError
from foresay.models.gguf.blocks import FileWeights, fill
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.names import Name, gguf_namer
from foresay.models.gguf.packed import PackedWeights
from foresay.models.gguf.shapes import check_tensor, shapes_of
from foresay.models.gguf.values import checked_header

_PARTS = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "post_norm": "shared_head_norm"}
"""transformers' names of what a layer has besides those of a model -> llama.cpp's."""
_COPIES = ("embed_tokens", "shared_head_head")


def mtp_layers_of_file(model: Any, *, in_blocks: bool) -> Any | None:
    """Return transformers' MtpModel of the GGUF file that a model was read from; None for a model of other files.

    in_blocks: True for layers over the file's blocks; otherwise all weights are numbers in the model's dtype. Raises
    UnsupportedModelError for a file without such layers, and ModelLoadError if its tensors do not match the model.
    """
    path = Path(model.config.name_or_path)
    if path.suffix != ".gguf":
        return None
    header, config = checked_header(path), model.config
    count = int(getattr(config, "num_mtp_layers", None) or 0)
    if not count:
        key = f"{header.architecture}.nextn_predict_layers"
        raise UnsupportedModelError(f"{str(path)!r} has no multi-token-prediction layers: it states no {key}")
    found = _empty(model, count)
    name = _namer(header, config.num_hidden_layers, count)
    _check(header, found.layers, name, config)
    packed = PackedWeights(header, "-mtp") if in_blocks else None
    fill(found.layers, FileWeights(header, config, model.dtype, name, packed))
    if packed is not None:
        packed.write()
    found.layers.to(model.device)
    return found


def _empty(model: Any, count: int) -> Any:
    """Return transformers' layers on the meta device, with the model's own embedding and output layer."""
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights
    from transformers.modeling_layers import MtpModel

    with init_empty_weights(), no_init_weights():
        return MtpModel(model, count)


def _namer(header: GgufHeader, first: int, count: int) -> Name:
    """Return the mapping of parameters of the layers, "0.mtp_block.mlp. ...", to llama.cpp's names."""
    of_block = gguf_namer(header, first + count)

    def name(parameter: str) -> str:
        index, part, inner = parameter.split(".", 2)
        layer = first + int(index)
        return (
            f"blk.{layer}.nextn.{_PARTS[part]}.{inner}" if part in _PARTS else of_block(f"model.layers.{layer}.{inner}")
        )

    return name


def _check(header: GgufHeader, layers: Any, name: Name, config: Any) -> None:
    """Raise ModelLoadError for a missing or unknown tensor of the layers, or one of another shape."""
    shapes = shapes_of(header, layers, name)
    numbers = range(config.num_hidden_layers, config.num_hidden_layers + len(layers))
    whole = (config.vocab_size, config.hidden_size)
    shapes |= {f"blk.{n}.nextn.{copy}.weight": whole for n in numbers for copy in _COPIES}
    for tensor_name, tensor in header.tensors.items():
        if tensor_name.startswith(tuple(f"blk.{n}." for n in numbers)):
            check_tensor(header, tensor_name, tensor, shapes)
