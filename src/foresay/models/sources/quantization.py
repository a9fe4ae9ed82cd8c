"""Statements of a folder about its quantization, wherever its format writes them: found, compared, and refused by name.

config.json states it in one of several fields, its own or those of its language model; some formats write another file. Owns
these fields and files, the names that mean the same, and the methods that are read. Reads no tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from foresay.errors import ForesayError, ModelLoadError, UnsupportedModelError
from foresay.json_files import parse_object, read_limited
from foresay.models.families.stated import shortened
from foresay.models.huggingface.left_out import is_of_images
from foresay.models.sources.quantized_facts import check_facts

_FIELDS = ("quantization_config", "compression_config", "quantization")
_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "quantization_config.json": "",
}
"""Files next to config.json -> the method of those that name none."""
_BITSANDBYTES = ("load_in_4bit", "load_in_8bit")
_ALIASES: Mapping[str, Mapping[str, str]] = {
    "": {"w_bit": "bits", "q_group_size": "group_size"},
    "gptq": {"format": "checkpoint_format", "method": "quant_method"},
    "awq": {"format": "version"},
    "modelopt": {"exclude_modules": "ignore"},
    "bitsandbytes": {f"_{name}": name for name in _BITSANDBYTES},
}
"""Methods, "" for all -> second names of fields."""
_SPELLINGS = ("quant_method", "quant_algo", "version", "checkpoint_format", "format")
"""Fields whose values differ in capitals only between writers."""
_COMPARED = (*_SPELLINGS, "bits", "group_size", "sym", "desc_act", "zero_point", "weight_block_size", *_BITSANDBYTES)
_MAX_BYTES = 16 << 20
Statement = tuple[str, dict[str, Any], str]
"""Where it is, its fields, and the method that it means if none is named; "" for none."""


def stated_by(folder: str, values: Mapping[str, Any], common: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the quantization that a folder states, its fields under one name each; None if it states none.

    values: the folder's config.json. common: transformers' arguments for finding files. Raises ModelLoadError for statements
    that contradict each other, or name no method.
    """
    found, origin = dict[str, Any](), dict[str, str]()
    try:
        statements = [*_in_config(values), *_in_files(folder, common)]
        named = (str(one["quant_method"]).lower() for _, one, _ in statements if one.get("quant_method"))
        method = next(named, None) or next((usual for _, _, usual in statements if usual), None)
        for place, stated, _ in statements:
            for name, value in _under_one_name(stated, method).items():
                if value is not None and name in found and name in _COMPARED and found[name] != value:
                    raise ModelLoadError(
                        f"{name} is {shortened(found[name])} in {origin[name]} and {shortened(value)} in {place}"
                    )
                if found.get(name) is None:
                    found[name], origin[name] = value, place
        if found and method is not None:
            found.setdefault("quant_method", method)
        if found:
            _check_method(found, ", ".join(dict.fromkeys(origin.values())))
            check_facts(found)
    except ForesayError as error:
        raise ModelLoadError(f"{folder!r} cannot be read: {error}") from None
    return found or None


def refuse_unknown(name: str, values: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for a method that transformers does not read: it would load the numbers as they lie.

    name: of the model. values: of `stated_by`.
    """
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    method, algorithm = values["quant_method"], values.get("quant_algo")
    if method == "bitsandbytes" or (method in AUTO_QUANTIZATION_CONFIG_MAPPING and not method.startswith("foresay")):
        return
    described = f"quant_method={method!r}" + (f", quant_algo={algorithm!r}" if algorithm else "")
    raise UnsupportedModelError(
        f"{name!r} is quantized by {described}, which is not supported for this model; load it unquantized, from a GGUF file, "
        "or in AWQ, GPTQ, FP8 or compressed-tensors (of ModelOpt's forms, FP8 and int8 of dense models are read)"
    )


def _in_config(values: Mapping[str, Any]) -> Iterator[Statement]:
    """Yield each statement in a config.json, its own and those of its language model's part."""
    inner = {f"{name}.": one for name, one in values.items() if name not in _FIELDS and not is_of_images(name)}
    for prefix, part in {"": values, **inner}.items():
        for field in _FIELDS if isinstance(part, Mapping) else ():
            stated = part.get(field)
            if isinstance(stated, Mapping) and stated:
                usual = "compressed-tensors" if field == "compression_config" else ""
                yield f"{prefix}{field} of config.json", _flat(stated), usual
            elif stated:
                raise ModelLoadError(f"{prefix}{field} of config.json is {shortened(stated)}; it must be an object")


def _in_files(folder: str, common: Mapping[str, Any]) -> Iterator[Statement]:
    for name, usual in _FILES.items():
        if (path := _path_of(folder, name, common)) is not None:
            stated = parse_object(read_limited(path, _MAX_BYTES), str(path))
            if {"bits", "w_bit", "quantization", "quant_algo", "quant_method"} & stated.keys():
                yield name, _flat(stated), usual


def _path_of(folder: str, name: str, common: Mapping[str, Any]) -> Path | None:
    """Return the path of a file, if it exists. folder: a folder or hub id."""
    from transformers.utils.hub import cached_file

    if Path(folder).is_dir():
        path = Path(folder) / name
        return path if path.is_file() else None
    optional = ("missing_entries", "connection_errors", "gated_repo")
    quiet = {f"_raise_exceptions_for_{one}": False for one in optional}
    where = {key: common[key] for key in ("revision", "local_files_only") if key in common}
    found = cached_file(folder, name, **where, **quiet)
    return None if found is None else Path(found)


def _flat(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return a statement without the object in which ModelOpt writes its fields."""
    inner = stated.get("quantization")
    return {name: one for name, one in stated.items() if name != "quantization"} | dict(
        inner if isinstance(inner, Mapping) else {}
    )


def _under_one_name(stated: Mapping[str, Any], method: str | None) -> dict[str, Any]:
    """Return the fields of a statement, each under one name and in one spelling. method: of the folder.

    Raises ModelLoadError if two names of a field differ.
    """
    fields = dict(stated)
    for second, first in {**_ALIASES[""], **_ALIASES.get(str(method).partition("_")[0], {})}.items():
        value = fields.pop(second, None)
        if value is not None and fields.get(first) not in (None, value):
            raise ModelLoadError(f"{first} is {shortened(fields[first])} and {second} {shortened(value)}")
        if value is not None:
            fields[first] = value
    for name in _SPELLINGS:
        if isinstance(fields.get(name), str):
            fields[name] = fields[name].upper() if name == "quant_algo" else fields[name].lower()
    return fields


def _check_method(found: dict[str, Any], place: str) -> None:
    """Complete the method of a statement. Raises ModelLoadError if none is named, or two."""
    chosen = [name for name in _BITSANDBYTES if found.get(name)]
    if len(chosen) > 1:
        raise ModelLoadError(f"{place} states {' and '.join(chosen)}; it must state one of them")
    if chosen:
        found.setdefault("quant_method", "bitsandbytes")
    method = found.get("quant_method")
    if not isinstance(method, str) or not method:
        shown = ", ".join(
            f"{name}={shortened(one)}" for name, one in found.items() if name in ("bits", "group_size", "mode")
        )
        raise ModelLoadError(
            f"{place} states a quantization ({shown or 'no known field'}) without its quant_method, as MLX writes it; "
            "that form is not supported"
        )
