"""A Description -> a transformers model and its tokenizer; checked before anything large is allocated.

Owns transformers' arguments, and the placement on devices. Knows nothing of decoding.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Any

from foresay.errors import ModelLoadError, UnsupportedModelError
from foresay.models.gguf.blocks import model_of_file
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.tokenizer import tokenizer_of
from foresay.models.gguf.vocabulary import suppressed_tokens
from foresay.models.huggingface.left_out import refuse_unread as refuse_tensors
from foresay.models.sources import lora
from foresay.models.sources.config_checks import check_config, check_size, report_unknown, report_unread
from foresay.models.sources.describing import Description
from foresay.models.sources.generation_settings import UNCHANGED, GenerationSettings
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.location import Location
from foresay.models.sources.multimodal import PREFIXES
from foresay.models.sources.packaged import dequantize
from foresay.models.sources.transformers_errors import quiet_transformers
from foresay.text.template_trial import check_template
from foresay.text.tokenizer import check_usable

logger = logging.getLogger("foresay")


@quiet_transformers()
def read(described: Description, options: LoadOptions) -> tuple[Any, Any]:
    """Return transformers' model and its tokenizer.

    Raises ModelLoadError for weights that are missing, of the wrong shape or not finite, and for a tokenizer that cannot be used.
    """
    tokenizer = _tokenizer(described.location, options, required=False)
    model = (_of_file if described.is_ours else _by_transformers)(described, options)
    lora.merge(model, lora.adapters(options.lora))
    return model, tokenizer


def _of_file(described: Description, options: LoadOptions) -> Any:
    """Return the model of a GGUF file that is read here."""
    header, config = described.location.header, described.config
    assert header is not None
    how: dict[str, Any] = {"in_blocks": described.in_blocks, "gpu": described.gpu}
    how |= {} if options.progress is None else {"progress": options.progress}
    model = model_of_file(header, config, described.dtype, **how).to(options.computes_on)
    suppress(model.generation_config, header)
    config.name_or_path = str(header.path)
    return model


def suppress(config: Any, header: GgufHeader) -> Any:
    """Set the tokens of a GGUF file that are never generated in a generation config, and return it."""
    if found := suppressed_tokens(header):
        config.suppress_tokens = found
    return config


def settings_of(header: GgufHeader) -> GenerationSettings:
    """Return the generation settings of a file that another engine computes."""
    from transformers import GenerationConfig

    return GenerationSettings(suppress(GenerationConfig(), header)) if suppressed_tokens(header) else UNCHANGED


@quiet_transformers()
def read_tokenizer(location: Location, options: LoadOptions) -> Any:
    """Return the tokenizer alone. Raises ModelLoadError if it cannot be used, or for a wrong config.json."""
    # it names the tokenizer's class
    if location.header is None and (Path(location.folder) / "config.json").is_file():
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


def _by_transformers(described: Description, options: LoadOptions) -> Any:
    """Return the model of a folder, or of a GGUF file that transformers dequantizes."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig

    location, config = described.location, described.config
    folder, common = location.folder, location.arguments(options)
    arguments = {"config": config, "dtype": described.dtype, **common, **_placement(location, options, config)}
    kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    if location.header is not None and options.quantization_config is None:
        arguments.update(dequantize())
    elif described.is_part:
        arguments["key_mapping"] = dict(PREFIXES)
    if location.header is None and location.is_local:
        check_size(folder, kind, config, trust_remote_code=options.trust_remote_code)
    model, report = kind.from_pretrained(folder, output_loading_info=True, **arguments)
    if location.header is not None:
        suppress(model.generation_config, location.header)
    else:
        values = PreTrainedConfig.get_config_dict(folder, **common)[0]
        report_unread(location.name, values.get("text_config", values) if described.is_part else values, model.config)
    absent = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if absent:
        raise ModelLoadError(
            f"{len(absent)} weights are missing from {folder!r} or have the wrong shape ({', '.join(absent[:3])}, ...): "
            "the model would generate noise; download its files again"
        )
    is_part = described.is_part or config.get_text_config(decoder=True) is not config
    refuse_tensors(report["unexpected_keys"], location.name, model.config, is_part=is_part)
    _untie(location.name, model)
    return model


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
