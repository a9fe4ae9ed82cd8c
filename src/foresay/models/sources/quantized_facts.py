"""Fields of a quantization_config that state the same fact, compared with each other. Reads no tensor and no file.

quantized_forms.py compares them with what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from foresay.errors import ConfigError, ModelLoadError
from foresay.json_files import Schema
from foresay.models.families.stated import shortened

OF_GROUPS = ("group", "dynamic", True)
"""Values of `actorder` for which the group of each input is stored."""
LISTS = ("modules_to_not_convert", "ignore", "ignored_layers")
"""Fields that list modules which are not quantized."""
_OF_MODELOPT = {"FP8": "float", "W8A8": "int"}
"""Beginnings of ModelOpt's algorithms -> the type of their weights."""
_OVERRIDES = ("bits", "group_size", "sym", "desc_act", "format")
Values = Mapping[str, Any]


class _Fields(BaseModel):
    """Fields of known types; others are allowed."""

    model_config = ConfigDict(extra="allow")


class _Scheme(_Fields):
    num_bits: int | None = None
    type: str | None = None
    strategy: str | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    dynamic: bool | str | None = None
    actorder: bool | str | None = None
    block_structure: str | list[int] | None = None


class _Group(_Fields):
    format: str | None = None
    weights: _Scheme | None = None
    input_activations: _Scheme | None = None


class _Config(_Fields):
    quant_method: str
    quant_algo: str | None = None
    bits: int | None = None
    group_size: int | None = None
    sym: bool | None = None
    desc_act: bool | None = None
    zero_point: bool | None = None
    version: str | None = None
    checkpoint_format: str | None = None
    format: str | None = None
    backend: str | None = None
    is_marlin_format: bool | None = None
    scale_fmt: str | None = None
    weight_block_size: list[int] | None = None
    activation_scheme: str | None = None
    config_groups: dict[str, _Group] | None = None
    dynamic: dict[str, dict[str, Any] | None] | None = None
    sparsity_config: dict[str, Any] | None = None
    modules_to_not_convert: list[str] | None = None
    ignore: list[str] | None = None
    ignored_layers: list[str] | None = None


_SCHEMA: Schema[_Config] = Schema(_Config, "a quantization_config")


def check_facts(values: Values) -> None:
    """Raise ModelLoadError for fields that contradict each other. values: with each field under one name."""
    check = _CHECKS.get(str(values["quant_method"]).partition("_")[0])
    if check is None:
        return
    try:
        _SCHEMA.of(values, "its configuration")
        block_of(values)
        problem = next(check(values), None)
    except (ConfigError, ValueError) as error:
        raise ModelLoadError(str(error)) from None
    if problem is not None:
        raise ModelLoadError(problem)


def weight_schemes(values: Values) -> list[Values]:
    """Return the schemes of weights that a quantization_config lists, one for each group of layers."""
    return [one.get("weights") or {} for one in (values.get("config_groups") or {}).values()]


def block_of(values: Values) -> tuple[int, int] | None:
    """Return rows and columns of a block, which may be a text; None if none is stated. Raises ValueError for anything else."""
    stated = [values.get("weight_block_size"), *(one.get("block_structure") for one in weight_schemes(values))]
    found = {_block(one) for one in stated if one}
    if len(found) > 1:
        raise ValueError(f"weight_block_size and block_structure state blocks of {sorted(found)}")
    return next(iter(found), None)


def _block(stated: Any) -> tuple[int, int]:
    parts = stated.split("x") if isinstance(stated, str) else stated
    if (
        not isinstance(parts, list | tuple)
        or len(parts) != 2
        or not all(str(one).isdecimal() and int(one) for one in parts)
    ):
        raise ValueError(f"block_structure is {shortened(stated)}; it must be two numbers, or a text such as '128x128'")
    return int(parts[0]), int(parts[1])


def _compressed(values: Values) -> Iterator[str]:
    whole = values.get("format")
    for name, group in (values.get("config_groups") or {}).items():
        own, weights = group.get("format"), group.get("weights") or {}
        if own and whole not in (None, "mixed-precision", str(own).lower()):
            yield f"format is {whole!r}, and that of config_groups.{name} {own!r}"
        strategy, size = weights.get("strategy"), weights.get("group_size") or -1
        if strategy and (strategy in ("group", "tensor_group")) != (size > 0):
            yield f"strategy is {strategy!r}, and group_size {weights.get('group_size')!r}"
        if strategy and (strategy == "block") != bool(weights.get("block_structure")):
            yield f"strategy is {strategy!r}, and block_structure {weights.get('block_structure')!r}"
        if weights.get("dynamic"):
            yield "dynamic is true for weights, whose scales are stored"


def _gptq(values: Values) -> Iterator[str]:
    stated = values.get("checkpoint_format")
    if values.get("is_marlin_format") and stated not in (None, "marlin"):
        yield f"checkpoint_format is {stated!r}, and is_marlin_format true"
    if values.get("pack_dtype") not in (None, "int32"):
        yield f"pack_dtype is {values['pack_dtype']!r}; only 'int32' is supported"
    if values.get("adapter"):
        yield "adapter is set, and adapters are not supported"
    for pattern, changes in (values.get("dynamic") or {}).items():
        if changed := [name for name in _OVERRIDES if name in (changes or {}) and changes[name] != values.get(name)]:
            yield f"dynamic changes {changed[0]} for {pattern!r}, which is not supported"


def _fp8(values: Values) -> Iterator[str]:
    if values.get("fmt") not in (None, "e4m3", "e4m3fn"):
        yield f"fmt is {values['fmt']!r}; only 'e4m3' is supported"


def _modelopt(values: Values) -> Iterator[str]:
    algorithm = str(values.get("quant_algo"))
    kind = next((one for start, one in _OF_MODELOPT.items() if algorithm.startswith(start)), None)
    for scheme in weight_schemes(values):
        stated = (scheme.get("type", kind), scheme.get("num_bits", 8))
        if kind is not None and stated != (kind, 8):
            yield f"quant_algo is {algorithm!r}, and config_groups states weights of {stated[1]} bits, type {stated[0]!r}"


_CHECKS: Mapping[str, Callable[[Values], Iterator[str]]] = {
    "awq": lambda values: iter(()),
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "gptq": _gptq,
    "modelopt": _modelopt,
}
"""Methods whose fields are checked."""
