"""Low-rank adapters (LoRA): peft folders and GGUF files, merged into a model's weights before these are packed.

A weight [out, in] becomes W + s B A, with A [r, in], B [out, r] and s = alpha / r, or alpha / sqrt(r) with rank stabilization,
times the scale of the caller. Owns which fields of an adapter are read; what is not read is refused by name.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foresay.errors import ConfigError, ModelLoadError
from foresay.files import fingerprint
from foresay.json_files import parse_object, read_limited
from foresay.models.families.table import ARCHITECTURES
from foresay.models.gguf.blocks import row_order
from foresay.models.gguf.header import GgufHeader, read_header
from foresay.models.gguf.types import read_weight

logger = logging.getLogger("foresay")

CONFIG = "adapter_config.json"
_MAX_CONFIG_BYTES = 1 << 22
_KEY = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.default)?(?:\.weight)?")
_BASE = re.compile(r"(?:base_model\.model\.)?(.+?)(?:\.base_layer)?\.weight")
_READ = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "bias", "init_lora_weights"}
)
_WITHOUT_EFFECT = frozenset(
    {
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),  # the tensors show which
        *("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"),
        *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"),
        *("fan_in_fan_out", "megatron_core", "qalora_group_size", "runtime_config"),
    }
)
"""Fields of adapter_config.json that may be set to anything; with any other an adapter may be more than B A."""
_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal", "true", "false")
"""Values of init_lora_weights that leave the base model's weights as they were."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's folder or file, and the scale of the caller."""

    path: Path
    scale: float = 1.0

    @property
    def name(self) -> str:
        """The public name: that of the folder or file."""
        return self.path.resolve().name.removesuffix(".gguf")


@dataclass(frozen=True, slots=True)
class _Change:
    """The matrix that an adapter adds to the weight of a module: scale B A."""

    module: str
    a: torch.Tensor
    b: torch.Tensor
    scale: float

    def matrix(self) -> torch.Tensor:
        return self.scale * (self.b.float() @ self.a.float())


def adapters(given: str | Sequence[str] | None) -> list[Adapter]:
    """Return the adapters of an option, PATH or PATH=SCALE each.

    Raises ConfigError for others, and for a path that does not exist.
    """
    found = []
    for text in [given] if isinstance(given, str) else given or ():
        path, _, scale = str(text).rpartition("=") if re.search(r"=[-+.\d][^/=]*$", str(text)) else (str(text), "", "1")
        try:
            number = float(scale)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError("must be PATH or PATH=SCALE", param="lora", value=text)
        place = Path(path).expanduser()
        if not (place.is_dir() or (place.suffix == ".gguf" and place.is_file())):
            raise ConfigError("is neither a folder nor a GGUF file", param="lora", value=path)
        found.append(Adapter(place, number))
    return found


def digest(given: list[Adapter]) -> bytes:
    """Return what distinguishes models with these adapters from others; empty without any."""
    return b"".join(fingerprint(one.path) + str(one.scale).encode() for one in given)


def merge(model: Any, given: list[Adapter]) -> None:
    """Add adapters to a transformers model's weights, in place.

    Raises ModelLoadError for files that cannot be read, for modules that the model does not have, for other shapes, and for
    fields and tensors that are not merged; ConfigError for weights that are not numbers.
    """
    for one in given:
        for change in _of_gguf(one, model) if one.path.suffix == ".gguf" else _of_folder(one, model):
            _add(model, change, one)


def _add(model: Any, change: _Change, adapter: Adapter) -> None:
    """Add a change to the weight of its module."""
    try:
        module = model.get_submodule(change.module)
    except AttributeError:
        module = None
    name, weight = f"{adapter.path.name!r} adapts {change.module}", getattr(module, "weight", None)
    if module is None:
        raise ModelLoadError(f"{name}, which the model does not have")
    if (
        not isinstance(weight, nn.Parameter)
        or not weight.is_floating_point()
        or weight.is_meta
        or weight.dtype.itemsize < 2
    ):
        text = f"needs weights that are numbers, and {change.module} is quantized or not in memory; give {{weights}}"
        raise ConfigError(text, param="lora", value=str(adapter.path), weights="bf16")
    matrix = change.matrix()
    if isinstance(module, nn.Embedding) or not isinstance(module, nn.Linear):  # [in, out], also of GPT-2's layers
        matrix = matrix.t()
    if matrix.shape != weight.shape:
        shapes = f"{tuple(matrix.shape)}, not {tuple(weight.shape)}"
        raise ModelLoadError(f"{name}, whose weight it would make {shapes}: it belongs to another model")
    if not bool(matrix.isfinite().all()):
        raise ModelLoadError(f"{name} by numbers that are not finite")
    tied = [
        path
        for path, other in model.named_modules()
        if other is not module and getattr(other, "weight", None) is weight
    ]
    if tied:
        raise ModelLoadError(f"{name}, whose weight is also that of {tied[0]}: which of them to change is not defined")
    with torch.no_grad():
        weight.copy_(weight.float() + matrix.to(weight.device))


def _of_folder(adapter: Adapter, model: Any) -> Iterator[_Change]:
    """Read a folder in peft's layout."""
    from safetensors import SafetensorError, safe_open

    where = adapter.path / "adapter_model.safetensors"
    try:
        values = parse_object(read_limited(adapter.path / CONFIG, _MAX_CONFIG_BYTES), CONFIG)
        with safe_open(where, "pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"the adapter {str(adapter.path)!r} cannot be read: {error}") from None
    _check(values, adapter)
    _compare_bases(adapter, values.get("base_model_name_or_path"), model)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    if not tensors:
        raise ModelLoadError(f"{str(where)!r} has no tensors")
    for key, tensor in tensors.items():
        if _is_copy(key, tensor, model):
            continue
        known = _KEY.fullmatch(key)
        if known is None or tensor.dim() != 2:
            raise ModelLoadError(f"{str(where)!r} has a tensor {key!r} {tuple(tensor.shape)}, which is not merged")
        pairs.setdefault(known[1], {})[known[2]] = tensor
    for module, pair in pairs.items():
        rank = _rank(module, pair, where)
        alpha = _of_pattern(values, "alpha_pattern", module, values.get("lora_alpha", 8))
        stated = _of_pattern(values, "rank_pattern", module, values.get("r", 8))
        if stated != rank:
            raise ModelLoadError(f"{str(where)!r} has {module} in rank {rank}, and {CONFIG} states {stated}")
        by = alpha / (math.sqrt(rank) if values.get("use_rslora") else rank)
        yield _Change(module, pair["A"], pair["B"], adapter.scale * by)


def _is_copy(key: str, tensor: torch.Tensor, model: Any) -> bool:
    """True for a weight of the base model, which peft stores with adapters of embeddings."""
    known = _BASE.fullmatch(key)
    try:
        weight = model.get_submodule(known[1]).weight if known else None
    except AttributeError:
        weight = None
    return (
        weight is not None and weight.shape == tensor.shape and torch.equal(weight.float(), tensor.to(weight).float())
    )


def _check(values: Mapping[str, Any], adapter: Adapter) -> None:
    """Refuse an adapter of which more would have to be merged than B A."""
    if values.get("peft_type", "LORA") != "LORA":
        raise ModelLoadError(
            f"{adapter.path.name!r} is an adapter of the kind {values['peft_type']!r}; only LORA is merged"
        )
    found = [name for name, value in values.items() if value and name not in _READ | _WITHOUT_EFFECT]
    found += [
        name
        for name, plain in (("bias", ("none", None)), ("init_lora_weights", _PLAIN_STARTS))
        if values.get(name) not in plain
    ]
    if found:
        shown = ", ".join(f"{name}={values[name]!r}" for name in found)
        raise ModelLoadError(f"{adapter.path.name!r} has {shown}, which is not merged; merge it with peft")


def _compare_bases(adapter: Adapter, stated: object, model: Any) -> None:
    """Log the base model that an adapter states if the model's name does not contain its name."""
    name = model.config.name_or_path
    base, own = (re.sub(r"[^a-z0-9]", "", text.lower()) for text in (Path(str(stated or "")).name, name))
    if base not in own:
        logger.warning("the adapter %s states the base model %r; it is merged into %r", adapter.name, stated, name)


def _rank(module: str, pair: Mapping[str, torch.Tensor], where: Path) -> int:
    a, b = pair.get("A"), pair.get("B")
    if a is None or b is None or a.shape[0] != b.shape[1]:
        raise ModelLoadError(f"{str(where)!r} has no two factors of one rank for {module}")
    return int(a.shape[0])


def _of_pattern(values: Mapping[str, Any], field: str, module: str, default: Any) -> float:
    """Return a module's number: of the first name in `field` that is the end of its own, else the default."""
    named = {str(key).removeprefix("^"): value for key, value in (values.get(field) or {}).items()}
    if wrong := [key for key in named if not re.fullmatch(r"[\w.]+", key)]:
        raise ModelLoadError(f"{CONFIG} has the pattern {wrong[0]!r} in {field}; names are read")
    number = next((value for key, value in named.items() if f".{module}".endswith(f".{key}")), default)
    if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
        raise ModelLoadError(f"{CONFIG} has {field} or its default {number!r}, which is no number")
    return float(number)


def _of_gguf(adapter: Adapter, model: Any) -> Iterator[_Change]:
    """Read a GGUF file in llama.cpp's layout."""
    header = read_header(adapter.path)
    kind, alpha = header.values.get("adapter.type"), header.values.get("adapter.lora.alpha", 0.0)
    if header.values.get("general.type") != "adapter" or kind != "lora":
        raise ModelLoadError(
            f"{adapter.path.name!r} is no low-rank adapter, but {header.values.get('general.type', 'a model')!r}"
        )
    read = ("adapter.type", "adapter.lora.alpha")
    other = [key for key in (*header.values, *header.lists) if key.startswith("adapter.") and key not in read]
    if other or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        found = other[0] if other else f"adapter.lora.alpha {alpha!r}"
        raise ModelLoadError(f"{adapter.path.name!r} has {found}, which is not merged")
    names = _gguf_names(header, model, adapter)
    _compare_bases(adapter, header.values.get("general.base_model.0.name"), model)
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, stored in header.tensors.items():
        stem, _, factor = name.rpartition(".lora_")
        if stem.removesuffix(".weight") not in names or factor not in ("a", "b"):
            raise ModelLoadError(f"{adapter.path.name!r} has a tensor {name!r}, which is not merged")
        pairs.setdefault(stem.removesuffix(".weight"), {})[factor.upper()] = read_weight(stored).dense(torch.float32)
    config = model.config.get_text_config(decoder=True)
    heads = {"attn_q": config.num_attention_heads, "attn_k": getattr(config, "num_key_value_heads", None) or 1}
    for name, pair in pairs.items():
        rank, b = _rank(name, pair, adapter.path), pair.get("B")
        assert b is not None
        if ARCHITECTURES[header.architecture].interleaved and (count := heads.get(name.rpartition(".")[2])):
            b = b[row_order(len(b), count)]
        yield _Change(names[name], pair["A"], b, adapter.scale * (alpha / rank if alpha else 1.0))


def _gguf_names(header: GgufHeader, model: Any, adapter: Adapter) -> dict[str, str]:
    """Return llama.cpp's name of each module -> its path. Raises ModelLoadError for an architecture with other weights."""
    import gguf

    config, form = model.config.get_text_config(decoder=True), ARCHITECTURES.get(header.architecture)
    kinds = () if form is None or form.mixed else (form, *form.variants.values())
    if config.model_type not in [one.model_type for one in kinds]:
        raise ModelLoadError(
            f"{adapter.path.name!r} is for {header.architecture!r}, and the model is {model.config.model_type!r}"
        )
    known = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(known[header.architecture], config.num_hidden_layers)
    named = {table.get_name(path): path for path, _ in model.named_modules()}
    return {name: path for name, path in named.items() if name is not None}
