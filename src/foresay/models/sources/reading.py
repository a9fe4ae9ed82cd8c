"""Weights and tokenizers, as transformers reads them from a Location; checked before anything large is allocated.

Owns the choice of dtype and device, and transformers' arguments. Knows nothing of decoding.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from foresay.errors import ConfigError, ModelLoadError, UnsupportedModelError
from foresay.models.families.table import ARCHITECTURES, FAMILIES
from foresay.models.gguf.blocks import model_of_file
from foresay.models.gguf.configs import config_of
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.positions import refuse_unread
from foresay.models.gguf.shapes import dense_config
from foresay.models.gguf.tokenizer import tokenizer_of
from foresay.models.gguf.vocabulary import suppressed_tokens
from foresay.models.huggingface import linears
from foresay.models.huggingface.left_out import refuse_unread as refuse_tensors
from foresay.models.sources import quantization
from foresay.models.sources.config_checks import check_config, check_size, report_unknown, report_unread
from foresay.models.sources.generation_settings import UNCHANGED, GenerationSettings
from foresay.models.sources.load_options import DTYPES, LoadOptions
from foresay.models.sources.location import Location
from foresay.models.sources.multimodal import PREFIXES, language_model_of
from foresay.models.sources.packaged import dequantize
from foresay.models.sources.transformers_errors import quiet_transformers
from foresay.text.template_trial import check_template
from foresay.text.tokenizer import check_usable

logger = logging.getLogger("foresay")

_OF_TRANSFORMERS = ("quantization_config", "device_map", "tp_plan")
_BF16 = ("bf16", "bfloat16", torch.bfloat16)


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


def read(location: Location, options: LoadOptions, *, for_decoding: bool = True) -> tuple[Any, Any, str]:
    """Return transformers' model, its tokenizer and the format of its weights (see `LoadedModel.weights`).

    for_decoding: True to read the stored blocks of a GGUF file and to choose the dtype for our kernels. Raises ModelLoadError for
    a wrong config.json, and if weights are missing or have the wrong shape.
    """
    rounded = "" if options.bits is None else options.weights
    with quiet_transformers():
        if (header := location.header) is not None and _reads_file(header, options):
            refuse_unread(header, ours=True)
            config, in_blocks = config_of(header), for_decoding and _keeps_blocks(options)
            dtype = torch.bfloat16 if in_blocks else _dtype(location, options, config if for_decoding else None)
            gpu = options.computes_on if for_decoding and _keeps_blocks_on_gpu(options, header) else None
            weights = model_of_file(header, config, dtype, in_blocks=in_blocks, gpu=gpu).to(options.computes_on)
            suppress(weights.generation_config, header)
            config.name_or_path = str(header.path)
            return weights, tokenizer_of(header), "GGUF" if in_blocks or gpu is not None else rounded
        whole = _config(location, options)
        config = language_model_of(whole, location.name) if location.header is None else whole
        dtype = _dtype(location, options, config if for_decoding else None)
        changes = {} if config is whole else {"config": config, "key_mapping": dict(PREFIXES)}
        own = _with_kept_weights(location, options, config, for_decoding=for_decoding, is_part=config is not whole)
        if own is not None:
            config, rounded = own[0], own[1] or rounded
            dtype = (
                torch.bfloat16 if for_decoding and _keeps_blocks(options) and options.hardware.cpu_kernels else dtype
            )
            changes |= {"config": config}
        elif isinstance(stated := getattr(config, "quantization_config", None), Mapping) and location.header is None:
            quantization.refuse_unknown(location.name, stated)
            changes |= {"config": config}
        weights, tokenizer = _read_weights(location, options, config, dtype, changes)
        return weights, tokenizer, rounded if options.bits is not None or linears.has_products(weights) else ""


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
    return header.architecture in ARCHITECTURES and not given


def _is_mixed(header: GgufHeader) -> bool:
    """Return True for an architecture whose layers have recurrent states."""
    return header.architecture in ARCHITECTURES and ARCHITECTURES[header.architecture].mixed


def _keeps_blocks(options: LoadOptions) -> bool:
    """Return True if weights that are stored in blocks are decoded in these."""
    return options.hardware.on_cpu and options.weights == "auto" and options.dtype in ("auto", *_BF16)


def _keeps_blocks_on_gpu(options: LoadOptions, header: GgufHeader) -> bool:
    """Return True if our kernels for GPUs multiply by a file's blocks."""
    is_plain = options.weights == "auto" and options.dtype in ("auto", *_BF16)
    return is_plain and options.hardware.gpu_kernels and not _is_mixed(header)


def _with_kept_weights(
    location: Location, options: LoadOptions, config: Any, *, for_decoding: bool, is_part: bool
) -> tuple[Any, str] | None:
    """Return the configuration with which we read the quantized weights of a folder; None for others.

    With the format if the weights are decoded in it; "" if they become numbers. is_part: True for a part of a checkpoint.
    """
    is_given = any(getattr(options, name) is not None for name in _OF_TRANSFORMERS)
    values = getattr(config, "quantization_config", None)
    if location.header is not None or is_given or not isinstance(values, Mapping):
        return None
    from foresay.models.sources import mxfp4, quantized_forms, quantized_layers

    hardware, device = options.hardware, options.computes_on
    is_plain = for_decoding and options.weights == "auto" and options.dtype in ("auto", *_BF16)
    if is_plain and mxfp4.is_stored(config, device):
        return mxfp4.kept_experts(config, device), "MXFP4"
    form = quantized_forms.form_of(config) if hardware.on_cpu or hardware.gpu_kernels else None
    if form is None:
        return None
    in_blocks = is_plain and (hardware.gpu_kernels or (hardware.cpu_kernels and not form.is_float))
    how = {"in_blocks": in_blocks, "is_trained": not for_decoding, "is_part": is_part}
    own = quantized_layers.config_for(config, form, location.name, device, **how)
    return own, form.label if in_blocks else ""


def suppress(config: Any, header: GgufHeader) -> Any:
    """Set the tokens of a GGUF file that are never generated in a generation config, and return it."""
    if found := suppressed_tokens(header):
        config.suppress_tokens = found
    return config


def settings_of(header: GgufHeader) -> GenerationSettings:
    """Return the generation settings of a file that another engine computes."""
    from transformers import GenerationConfig

    return GenerationSettings(suppress(GenerationConfig(), header)) if suppressed_tokens(header) else UNCHANGED


def read_tokenizer(location: Location, options: LoadOptions) -> Any:
    """Return the tokenizer alone. Raises ModelLoadError if it cannot be used, or for a wrong config.json."""
    with quiet_transformers():
        if (
            location.header is None and (Path(location.folder) / "config.json").is_file()
        ):  # it names the tokenizer's class
            check_config(location.folder, location.arguments(options))
        return _tokenizer(location, options, required=True)


def _tokenizer(location: Location, options: LoadOptions, *, required: bool) -> Any:
    """Return the tokenizer. required: False to return None for a folder without a vocabulary, and to log that."""
    from transformers import AutoTokenizer

    if location.header is not None:
        tokenizer = tokenizer_of(location.header)
        check_template(location.name, tokenizer)
        return tokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(location.folder, **location.arguments(options))
    except Exception:  # some tokenizers need no file
        if required or location.has_vocabulary:
            raise
        logger.warning(
            "%s has no tokenizer (tokenizer.json, tokenizer.model, ...): it takes token ids only", location.name
        )
        return None
    check_usable(tokenizer)
    check_template(location.name, tokenizer)
    report_unknown(location.name, tokenizer)
    return tokenizer


def _read_weights(
    location: Location, options: LoadOptions, config: Any, dtype: torch.dtype, changes: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Return transformers' model and tokenizer. Raises ModelLoadError if weights are missing or have the wrong shape.

    changes: arguments for a `config` other than the folder's: that of the language model of a multimodal checkpoint, with the
    mapping of its names, or one that keeps experts as they are stored.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig

    folder, common = location.folder, location.arguments(options)
    arguments = {"dtype": dtype, **common, **_placement(location, options, config)}
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    tokenizer = _tokenizer(location, options, required=False)
    if location.header is not None:
        arguments["config"] = config
        if options.quantization_config is None:
            arguments.update(dequantize())
    else:
        arguments.update(changes)
        if location.is_local:
            check_size(folder, kind, config, trust_remote_code=options.trust_remote_code)
    model, report = kind.from_pretrained(folder, output_loading_info=True, **arguments)
    if location.header is not None:
        suppress(model.generation_config, location.header)
    else:
        values = PreTrainedConfig.get_config_dict(folder, **common)[0]
        report_unread(
            location.name, values.get("text_config", values) if "key_mapping" in changes else values, model.config
        )
    absent = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if absent:
        raise ModelLoadError(
            f"{len(absent)} weights are missing from {folder!r} or have the wrong shape ({', '.join(absent[:3])}, ...): "
            "the model would generate noise; download its files again"
        )
    is_part = config.get_text_config(decoder=True) is not config or "key_mapping" in changes
    refuse_tensors(report["unexpected_keys"], location.name, model.config, is_part=is_part)
    _untie(location.name, model)
    return model, tokenizer


def _untie(name: str, model: Any) -> None:
    """Correct a configuration that states one weight for embedding and output layer if the files have two; log it."""
    config = model.config.get_text_config(decoder=True)
    layers = (model.get_output_embeddings(), model.get_input_embeddings())
    weights = [
        one for one in (getattr(layer, "weight", None) for layer in layers) if one is not None and not one.is_meta
    ]
    if config.tie_word_embeddings and len(weights) == 2 and weights[0] is not weights[1]:
        config.tie_word_embeddings = False
        logger.warning(
            "%s states tie_word_embeddings, but stores an output layer of other numbers, which is used", name
        )


def _placement(location: Location, options: LoadOptions, config: Any) -> dict[str, Any]:
    """transformers' arguments for the devices of the weights."""
    found: dict[str, Any] = {}
    device = options.computes_on
    if options.tp_plan is not None:
        from transformers.distributed import DistributedConfig

        check_divisible(location.folder, config, int(os.environ["WORLD_SIZE"]))
        found["distributed_config"] = DistributedConfig(tp_plan=options.tp_plan)
    if options.max_memory is not None:  # a GPU is a number, also if JSON or a command line made it a string
        found["max_memory"] = {int(k) if str(k).isdecimal() else k: size for k, size in options.max_memory.items()}
    for key in ("offload_folder", "quantization_config"):
        if (value := getattr(options, key)) is not None:
            found[key] = value
    if options.device_map is not None:
        found["device_map"] = options.device_map
    elif options.tp_plan is None and not options.hardware.on_cpu:
        found["device_map"] = {"": device}
    return found


def check_divisible(name: str, config: Any, processes: int) -> None:
    """Raise UnsupportedModelError if tensor parallelism splits attention heads whose number the processes do not divide."""
    text_config = config.get_text_config(decoder=True)
    plan = getattr(text_config, "base_model_tp_plan", None) or {}
    split = [path for path, style in plan.items() if style == "colwise"]  # other styles gather the parts again
    heads = [int(getattr(text_config, "num_attention_heads", 0) or 0)]
    if any(path.endswith("k_proj") for path in split):
        heads.append(int(getattr(text_config, "num_key_value_heads", 0) or heads[0]))
    splits_heads = any(path.endswith(("q_proj", "query_key_value")) for path in split)
    if not splits_heads or all(count % processes == 0 for count in heads):
        return
    most = math.gcd(*heads)
    divisors = [count for count in range(2, most + 1) if most % count == 0]
    hint = f"start {' or '.join(map(str, divisors))} processes" if divisors else "load it without tp_plan"
    kinds = " and ".join(f"{n} {kind} heads" for n, kind in zip(heads, ("attention", "key-value"), strict=False))
    raise UnsupportedModelError(
        f"{name!r} has {kinds}, which {processes} processes (WORLD_SIZE) cannot share out evenly under tp_plan; {hint} "
        "(a draft model that does not divide: give draft_device)"
    )
