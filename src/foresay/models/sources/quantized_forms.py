"""Formats of quantized linear layers in folders: AWQ, GPTQ, compressed-tensors, FP8, ModelOpt, as matrices of levels and scales.

Owns the layouts of their tensors. Knows no product and no model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from foresay.models.sources.base_models import EXPERTS
from foresay.models.sources.quantized_facts import OF_GROUPS, block_of, weight_schemes

INPUTS = ("input_scale", "activation_scale", "input_zero_point")
"""Tensors of a layer that state how its inputs are rounded."""
_BLOCK = (128, 128)
"""Rows and columns of a block of ModelOpt, which states none."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A quantized matrix (level - zero) * scale, [out, in]."""

    levels: torch.Tensor
    """[out, in] uint8, or of a type of floats with 8 bits."""
    scales: torch.Tensor
    """[out, groups] float32."""
    zeros: torch.Tensor | None
    """[out, groups] int16; None for levels that are floats."""
    group: int
    """Inputs of a group; the last one may have fewer."""
    order: torch.Tensor | None = None
    """[in], index of the group of each input if they are not consecutive."""

    def dense(self) -> torch.Tensor:
        """Return the numbers, [out, in] float32."""
        columns = torch.arange(self.levels.shape[1]) // self.group if self.order is None else self.order.long()
        levels = self.levels.float() if self.zeros is None else self.levels.float() - self.zeros.float()[:, columns]
        return levels * self.scales[:, columns]


@dataclass(frozen=True, slots=True)
class Form:
    """A format of quantized layers."""

    label: str
    main: str
    """The tensor that a quantized layer has."""
    parts: tuple[str, ...]
    """Its other tensors, some of them optional."""
    read: Callable[[Tensors, Mapping[str, Any]], Matrix]
    """Read the tensors with the values of a quantization_config. Raises ValueError for tensors that do not fit together."""
    is_float: bool = False
    """True for levels that are floats, which kernels for CPUs do not read."""


def form_of(config: Any) -> Form | None:
    """Return the format of a folder that this module reads, by its configuration; None for another.

    Experts, and language models inside of other models, are left to transformers, which renames their tensors.
    """
    found = getattr(config, "quantization_config", None)
    is_whole = config.get_text_config(decoder=True) is config and not config.is_encoder_decoder
    if not isinstance(found, Mapping) or not is_whole or any(getattr(config, name, None) for name in EXPERTS):
        return None
    method, bits = str(found.get("quant_method")), found.get("bits")
    if method == "awq" and bits == 4 and found.get("version", "gemm") == "gemm" and found.get("backend") != "llm-awq":
        return _AWQ
    if method == "gptq" and bits in (4, 8) and not found.get("is_marlin_format"):
        return _GPTQ if found.get("checkpoint_format", "gptq") in ("gptq", "gptq_v2") else None
    if method == "fp8" and found.get("scale_fmt") in (None, "float") and not found.get("modules_to_convert"):
        return _FP8
    if method.startswith("modelopt"):  # with and without the algorithm's name
        return _MODELOPT.get(str(found.get("quant_algo")))
    return _of_compressed_tensors(found) if method == "compressed-tensors" else None


def _of_compressed_tensors(values: Mapping[str, Any]) -> Form | None:
    """Return the format of a folder of compressed-tensors, all of whose groups have the same one."""
    schemes = weight_schemes(values)
    kinds = {(one.get("num_bits"), one.get("type")) for one in schemes}
    plain = all(one.get("strategy") in ("group", "channel", "tensor", "block") for one in schemes)
    is_sparse = (values.get("sparsity_config") or {}).get("format", "dense") != "dense"
    if len(kinds) != 1 or not plain or values.get("transform_config") or is_sparse:
        return None
    form, [(bits, kind)] = values.get("format"), kinds
    if form == "pack-quantized" and kind == "int" and bits in (4, 8):
        return replace(_PACKED, label=f"compressed-tensors int{bits}")
    if (
        form == "int-quantized"
        and kind == "int"
        and bits == 8
        and all(one["strategy"] in ("channel", "tensor") for one in schemes)
    ):
        return _INT8
    if form in ("float-quantized", "naive-quantized") and kind == "float" and bits == 8:
        return replace(_FP8, label="compressed-tensors FP8")
    return None


def rounded_parts(values: Mapping[str, Any]) -> list[str]:
    """Return what a quantization_config rounds next to the weights: inputs of layers, keys and values."""
    groups = [*(values.get("config_groups") or {}).values()]
    inputs = any(one.get("input_activations") for one in groups) or str(values["quant_method"]).startswith(
        ("fp8", "modelopt")
    )
    cache = values.get("kv_cache_scheme") or values.get("kv_cache_quant_algo")
    return [part for part, is_rounded in (("inputs of layers", inputs), ("keys and values", cache)) if is_rounded]


def _is_static(values: Mapping[str, Any]) -> bool:
    """Return True if a quantization_config states that scales of inputs are stored."""
    inputs = [one.get("input_activations") for one in (values.get("config_groups") or {}).values()]
    if values["quant_method"] == "compressed-tensors":
        return any(one and one.get("dynamic") is not True for one in inputs)
    return values.get("activation_scheme") != "dynamic" and values.get("quant_algo") in (
        None,
        "FP8",
        "W8A8_SQ_PER_CHANNEL",
    )


def stacked(matrices: Sequence[Matrix]) -> Matrix:
    """Return matrices of the same input and groups as one."""
    first = matrices[0]
    levels = torch.cat([one.levels.view(torch.uint8) for one in matrices]).view(first.levels.dtype)
    zeros = None if first.zeros is None else torch.cat([one.zeros for one in matrices if one.zeros is not None])
    return Matrix(levels, torch.cat([one.scales for one in matrices]), zeros, first.group, first.order)


def matrix_of(form: Form, tensors: Tensors, values: Mapping[str, Any], shape: tuple[int, int]) -> Matrix:
    """Read a layer's tensors. shape: [out, in]. Raises ValueError if they do not fit together, to the values or to the shape."""
    try:
        if tensors[form.main].dim() != 2 or not tensors[form.main].numel():
            raise ValueError(f"{form.main} is no matrix")
        found = form.read(tensors, values)
        _check(found, shape)
    except (KeyError, IndexError, TypeError, RuntimeError, OverflowError) as error:  # of shapes that no format has
        raise ValueError(str(error)) from None
    return found


def _check(found: Matrix, shape: tuple[int, int]) -> None:
    """Raise ValueError for a matrix of another shape, and for numbers that are not finite."""
    if tuple(found.levels.shape) != shape or found.scales.dim() != 2 or len(found.scales) != shape[0]:
        raise ValueError(f"levels are {[*found.levels.shape]}, scales {[*found.scales.shape]}")
    if found.zeros is not None and found.zeros.shape != found.scales.shape:
        raise ValueError(f"levels of zero are {[*found.zeros.shape]}, scales {[*found.scales.shape]}")
    groups = found.scales.shape[1]
    if found.group < 1 or groups != -(-shape[1] // found.group):
        raise ValueError(f"{groups} groups of {found.group} do not make {shape[1]} inputs")
    if found.order is not None and (
        found.order.shape != shape[1:] or not 0 <= found.order.min() <= found.order.max() < groups
    ):
        raise ValueError("the groups of its inputs are outside their range")
    if not bool(torch.isfinite(found.scales).all()):
        raise ValueError("scales are not finite")
    if found.zeros is None and not bool(torch.isfinite(found.levels.float()).all()):
        raise ValueError("floats are not finite")


def unpacked(words: torch.Tensor, bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Return the levels of 32-bit words along their last dimension, the lowest bits first, uint8.

    order: position of each of a word's levels among them; None for that of the bits.
    """
    count = 32 // bits
    parts = torch.stack([words >> (bits * i) & ((1 << bits) - 1) for i in range(count)], -1).to(torch.uint8)
    if order is not None:
        parts = parts[..., torch.tensor(order).argsort()]
    return parts.flatten(-2)


def _read_awq(tensors: Tensors, values: Mapping[str, Any]) -> Matrix:
    levels = unpacked(tensors["qweight"], 4, _AWQ_ORDER).T.contiguous()
    scales = tensors["scales"].T.contiguous()
    zeros = torch.full(scales.shape, 8, dtype=torch.int16, device=scales.device)
    if "qzeros" in tensors:
        zeros = unpacked(tensors["qzeros"], 4, _AWQ_ORDER).T.contiguous().short()
    _check_zeros(zeros, "zero_point", values.get("zero_point"), 8, "qzeros" in tensors)
    return Matrix(levels, scales, zeros, _group_of(values.get("group_size"), levels, scales))


def _group_of(size: Any, levels: torch.Tensor, scales: torch.Tensor) -> int:
    """Return the inputs of a group, as a configuration states them: all if it states none, or -1.

    Raises ValueError if there are scales of another number of groups.
    """
    group = int(size) if size and int(size) > 0 else levels.shape[1]
    if scales.shape[1] != -(-levels.shape[1] // group):
        raise ValueError(
            f"group_size is {size}, and there are scales of {scales.shape[1]} groups for {levels.shape[1]} inputs"
        )
    return group


def _check_zeros(zeros: torch.Tensor, field: str, varies: Any, middle: int, is_stored: bool) -> None:
    """Raise ValueError unless levels that stand for 0 are as stated. varies: True if they do; None if nothing is stated."""
    if varies and not is_stored:
        raise ValueError(f"{field} states levels of zero, and none are stored")
    if varies is False and bool((zeros != middle).any()):
        found = int(zeros[zeros != middle][0])
        raise ValueError(f"{field} states that level {middle} stands for 0, and the stored one is {found}")


def _read_gptq(tensors: Tensors, values: Mapping[str, Any]) -> Matrix:
    """The first version of the format stores levels of zero less one, and subtracts from whole words."""
    bits, version = int(values["bits"]), values.get("checkpoint_format", "gptq")
    levels = unpacked(tensors["qweight"].T.contiguous(), bits).contiguous()
    words = tensors["qzeros"].long() & 0xFFFFFFFF
    if version == "gptq":
        words = words + sum(1 << (bits * i) for i in range(32 // bits)) & 0xFFFFFFFF
    zeros = unpacked(words, bits).T.contiguous().short()
    fields = f"sym with bits={bits} and checkpoint_format={version!r}"
    _check_zeros(zeros, fields, False if values.get("sym") else None, 1 << (bits - 1), True)
    if version == "gptq" and bool((zeros == 0).any()) and "gptqmodel" not in str(values.get("meta")):
        raise ValueError(
            f"qzeros store {(1 << bits) - 1}, which stands for 0 or {1 << bits} by its writer; meta.quantizer must name gptqmodel"
        )
    scales, order = tensors["scales"].T.contiguous(), tensors.get("g_idx")
    found = Matrix(levels, scales, zeros, _group_of(values.get("group_size"), levels, scales))
    usual = torch.arange(levels.shape[1], device=levels.device) // found.group
    if order is None or torch.equal(order.long(), usual):
        return found
    if values.get("desc_act") is False:
        raise ValueError("desc_act is false, and g_idx stores another order of the inputs")
    return replace(found, order=order)


def _read_packed(tensors: Tensors, values: Mapping[str, Any]) -> Matrix:
    schemes = weight_schemes(values)
    [bits] = {int(one["num_bits"]) for one in schemes}
    sizes, orders = ({one.get(name) for one in schemes} for name in ("group_size", "actorder"))
    if len(sizes) > 1 or len(orders) > 1:
        raise ValueError("groups of layers differ in group_size or actorder")
    levels = unpacked(tensors["weight_packed"], bits)
    if "weight_shape" in tensors:
        shape = tensors["weight_shape"].tolist()
        levels = levels[: shape[0], : shape[1]].contiguous()
        if [*levels.shape] != shape:
            raise ValueError(f"weight_shape is {shape}, and weight_packed has {[*levels.shape]} levels")
    scales, order = tensors["weight_scale"], tensors.get("weight_g_idx")
    middle = 1 << (bits - 1)
    zeros = torch.full(scales.shape, middle, dtype=torch.int16, device=scales.device)
    if "weight_zero_point" in tensors:
        zeros = unpacked(tensors["weight_zero_point"].T.contiguous(), bits).T[: len(scales)].contiguous().short()
    _check_zeros(zeros, "symmetric", _varies(values), middle, "weight_zero_point" in tensors)
    order = None if order is None or bool((order < 0).all()) else order
    found, stated = Matrix(levels, scales, zeros, _group_of(sizes.pop(), levels, scales), order), orders.pop()
    usual = torch.arange(levels.shape[1], device=levels.device) // found.group
    if stated in OF_GROUPS and order is None:
        raise ValueError(f"actorder is {stated!r}, and no weight_g_idx is stored")
    if stated not in OF_GROUPS and order is not None and not torch.equal(order.long(), usual):
        raise ValueError(f"actorder is {stated!r}, and weight_g_idx stores another order of the inputs")
    return found


def _varies(values: Mapping[str, Any]) -> bool | None:
    """Return True if levels that stand for 0 are stated to vary, for all layers; None if groups of layers differ."""
    stated = {bool(one.get("symmetric", True)) for one in weight_schemes(values)}
    return None if len(stated) > 1 else not (stated or {True}).pop()


def _read_int8(tensors: Tensors, values: Mapping[str, Any]) -> Matrix:
    levels, scales = tensors["weight"], tensors["weight_scale"]
    _check_inputs(tensors, values)
    _check_strategy(values, "channel" if scales.numel() > 1 else "tensor", len(levels))
    scales = scales.reshape(-1, 1) if scales.numel() > 1 else scales.reshape(1, 1).expand(len(levels), 1)
    zeros = torch.full(scales.shape, 128, dtype=torch.int16, device=scales.device)
    if "weight_zero_point" in tensors:
        zeros = zeros + tensors["weight_zero_point"].reshape(zeros.shape).short()
    _check_zeros(zeros, "symmetric", _varies(values), 128, "weight_zero_point" in tensors)
    return Matrix((levels.short() + 128).to(torch.uint8), scales.contiguous(), zeros, levels.shape[1])


def _read_fp8(tensors: Tensors, values: Mapping[str, Any]) -> Matrix:
    """Scales are of the whole matrix, of its rows, or of blocks of rows and columns."""
    both = [tensors[name] for name in ("weight_scale_inv", "weight_scale") if name in tensors]
    if not both:
        raise ValueError("there are no scales")
    if len(both) == 2 and not torch.equal(both[0].flatten(), both[1].flatten()):
        raise ValueError("weight_scale_inv and weight_scale differ")
    _check_inputs(tensors, values)
    levels, scales = tensors["weight"], both[0]
    (rows, columns), block = levels.shape, block_of(values)
    if values.get("quant_algo") == "FP8_PB_WO":
        block = _BLOCK
    is_whole = scales.numel() == 1 and (block is None or (block[0] >= rows and block[1] >= columns))
    height, width = (rows, columns) if is_whole else block or (1, columns)
    scales = scales.reshape(1, 1) if is_whole else scales.reshape(len(scales) if scales.dim() else 1, -1)
    if scales.shape != (-(-rows // height), -(-columns // width)):
        raise ValueError(f"scales are {[*scales.shape]} for blocks of {height} x {width}")
    _check_strategy(values, "block" if block else "tensor" if is_whole else "channel", rows)
    index = torch.arange(rows, device=scales.device) // height
    return Matrix(levels, scales[index].contiguous(), None, width)


def _check_inputs(tensors: Tensors, values: Mapping[str, Any]) -> None:
    """Raise ValueError for stored scales of inputs that the configuration does not state."""
    if found := [name for name in INPUTS if name in tensors and not _is_static(values)]:
        raise ValueError(f"{found[0]} is stored, and the configuration states that none is")


def _check_strategy(values: Mapping[str, Any], found: str, rows: int) -> None:
    """Raise ValueError if scales are of other parts than a configuration states. found: tensor, channel (rows) or block."""
    stated = {str(one["strategy"]) for one in weight_schemes(values) if one.get("strategy")}
    stated |= _STRATEGIES.get(str(values.get("quant_algo")), set())
    if stated and found not in stated and rows > 1:
        raise ValueError(f"strategy is {min(stated)!r}, and the scales are those of {found!r}")


_STRATEGIES = {"FP8": {"tensor"}, "FP8_PER_CHANNEL_PER_TOKEN": {"channel"}, "FP8_PB_WO": {"block"}}
"""Algorithms of ModelOpt -> the parts of a matrix that have a scale."""
_AWQ = Form("AWQ", "qweight", ("qzeros", "scales"), _read_awq)
_GPTQ = Form("GPTQ", "qweight", ("qzeros", "scales", "g_idx"), _read_gptq)
_PACKED = Form("", "weight_packed", ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"), _read_packed)
_INT8 = Form("compressed-tensors int8", "weight", ("weight_scale", "weight_zero_point", *INPUTS), _read_int8)
_FP8 = Form("FP8", "weight", ("weight_scale_inv", "weight_scale", *INPUTS), _read_fp8, is_float=True)
_MODELOPT_FP8 = replace(_FP8, label="ModelOpt FP8")
_MODELOPT = {
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"), _MODELOPT_FP8),
    "W8A8_SQ_PER_CHANNEL": replace(_INT8, label="ModelOpt int8"),
}
"""Algorithms of ModelOpt -> the form of their layers."""
