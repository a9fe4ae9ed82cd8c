"""A Location -> a Description: what a model is and how its weights are read, before anything large is read.

Owns the choice of dtype, of the format in which weights are decoded, and of the reader of a GGUF file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from foresay.errors import ConfigError
from foresay.models.families.table import FAMILIES
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.positions import refuse_unread
from foresay.models.gguf.shapes import dense_config
from foresay.models.sources import quantization
from foresay.models.sources.config_checks import check_config
from foresay.models.sources.load_options import DTYPES, LoadOptions
from foresay.models.sources.location import Location
from foresay.models.sources.multimodal import language_model_of
from foresay.models.sources.transformers_errors import quiet_transformers

_OF_TRANSFORMERS = ("quantization_config", "device_map", "tp_plan")
_BF16 = ("bf16", "bfloat16", torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Description:
    """The configuration of a model, and how its weights are read."""

    location: Location
    config: Any
    """transformers' configuration of the language model."""
    dtype: torch.dtype
    weights: str
    """Format of the weights if any are products, see `LoadedModel.weights`."""
    is_ours: bool = False
    """True for a GGUF file that is read here; transformers reads other files."""
    in_blocks: bool = False
    """True if all of its weights that are stored in blocks are decoded in these."""
    gpu: torch.device | None = None
    """Device on which kernels multiply by its blocks."""
    is_part: bool = False
    """True for the language model of a checkpoint with other parts."""


@quiet_transformers()
def describe(location: Location, options: LoadOptions, *, for_decoding: bool = True) -> Description:
    """Return the description of a model.

    for_decoding: False for weights that become numbers, in the dtype of the options. Raises ModelLoadError for a wrong
    config.json or header, and ConfigError for options that do not apply to the files.
    """
    header, hardware, rounded = location.header, options.hardware, "" if options.bits is None else options.weights
    keeps = for_decoding and options.weights == "auto" and options.dtype in ("auto", *_BF16)
    if header is not None and _reads_file(header, options):
        refuse_unread(header, ours=True)
        config, in_blocks = config_of(header), keeps and hardware.on_cpu and not hardware.gpu_kernels
        dtype = torch.bfloat16 if in_blocks else _dtype(location, options, config if for_decoding else None)
        gpu = options.computes_on if keeps and hardware.gpu_kernels and not _is_mixed(header) else None
        weights = "GGUF" if in_blocks or gpu is not None else rounded
        return Description(location, config, dtype, weights, is_ours=True, in_blocks=in_blocks, gpu=gpu)
    whole = _config(location, options)
    config = language_model_of(whole, location.name) if header is None else whole
    dtype = _dtype(location, options, config if for_decoding else None)
    found = Description(location, config, dtype, rounded, is_part=config is not whole)
    if header is None and isinstance(stated := getattr(config, "quantization_config", None), Mapping):
        kept = _with_kept_weights(found, options, keeps=keeps, is_trained=not for_decoding)
        if kept is not None:
            return kept
        quantization.refuse_unknown(location.name, stated)
    return found


def _dtype(location: Location, options: LoadOptions, config: Any) -> torch.dtype:
    """Return the dtype of the options. "auto": the processor's native one, or bf16 if our kernels run whole passes.

    Kernels then read half the bytes. config: the model's, or None for weights that are not decoded.
    """
    dtype, hardware = options.computes_in, options.hardware
    if dtype != "auto":
        return dtype if isinstance(dtype, torch.dtype) else DTYPES[dtype]
    native = hardware.native_dtype
    is_split = any(getattr(options, name) is not None for name in ("device_map", "quantization_config", "tp_plan"))
    is_other = config is None or is_split or location.header is not None
    if is_other or native == torch.bfloat16 or not hardware.cpu_kernels:
        return native
    from foresay.models.cpu.layers import ACTIVATIONS

    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", "silu")
    is_foreign = getattr(config, "quantization_config", None) or (
        options.trust_remote_code and getattr(config, "auto_map", None)
    )
    is_fused = config.model_type in FAMILIES and str(activation) in ACTIVATIONS
    return torch.bfloat16 if is_fused and not is_foreign else native


def _config(location: Location, options: LoadOptions) -> Any:
    """Return transformers' configuration, with the quantization that the folder states anywhere.

    Raises ModelLoadError for a config.json with values outside the known range, and for statements that contradict each other.
    """
    from transformers import AutoConfig

    if location.header is not None:  # made of checked values
        return dense_config(location.header)
    common = location.arguments(options)
    stated = quantization.stated_by(location.folder, check_config(location.folder, common), common)
    config = AutoConfig.from_pretrained(location.folder, **common)
    if stated is not None:
        config.quantization_config = stated
    return config


def _reads_file(header: GgufHeader, options: LoadOptions) -> bool:
    """Return True if a GGUF file is read by foresay; transformers reads other architectures, and with options that need it.

    Raises ConfigError for such an option with a file that transformers does not read.
    """
    given = {name: one for name in _OF_TRANSFORMERS if (one := getattr(options, name)) is not None}
    for name, value in given.items() if _is_mixed(header) else ():
        text = f"does not apply to GGUF files of the architecture {header.architecture}"
        raise ConfigError(f"{text}; load the model's transformers folder instead", param=name, value=value)
    return header.entry is not None and not given


def _is_mixed(header: GgufHeader) -> bool:
    """Return True for an architecture whose layers have recurrent states."""
    return header.entry is not None and header.entry.mixed


def _with_kept_weights(
    found: Description, options: LoadOptions, *, keeps: bool, is_trained: bool
) -> Description | None:
    """Return the description of a folder whose quantized weights we read; None for others.

    keeps: True to decode them in their format if there are kernels for it; otherwise they become numbers.
    """
    if any(getattr(options, name) is not None for name in _OF_TRANSFORMERS):
        return None
    from foresay.models.sources import mxfp4, quantized_forms, quantized_layers

    hardware, device, config = options.hardware, options.computes_on, found.config
    if keeps and hardware.cpu_kernels and not hardware.gpu_kernels:
        found = replace(found, dtype=torch.bfloat16)
    if keeps and mxfp4.is_stored(config, device):
        return replace(found, config=mxfp4.kept_experts(config, device), weights="MXFP4")
    form = quantized_forms.form_of(config) if hardware.on_cpu or hardware.gpu_kernels else None
    if form is None:
        return None
    in_blocks = keeps and (hardware.gpu_kernels or (hardware.cpu_kernels and not form.is_float))
    how = {"in_blocks": in_blocks, "is_trained": is_trained, "is_part": found.is_part}
    own = quantized_layers.config_for(config, form, found.location.name, device, **how)
    return replace(found, config=own, weights=form.label if in_blocks else found.weights)
