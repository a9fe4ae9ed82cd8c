"""Weights that transformers reads, with its arguments for files and devices; checked for what it leaves out."""

from __future__ import annotations

import logging
import math
import os
from typing import Any

from foresay.errors import ModelLoadError, UnsupportedModelError
from foresay.models.huggingface.left_out import refuse_unread
from foresay.models.sources.describing import Description
from foresay.models.sources.load_options import LoadOptions

logger = logging.getLogger("foresay")


def arguments_of(options: LoadOptions) -> dict[str, Any]:
    """Return the arguments by which every from_pretrained of transformers finds the files of any source."""
    return {"trust_remote_code": options.trust_remote_code, "revision": options.revision or "main"}


def class_of(config: Any) -> Any:
    """Return transformers' class of models with a head for tokens."""
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def read_weights(name: str, folder: str, described: Description, options: LoadOptions, **arguments: Any) -> Any:
    """Return a model with its weights. name: in messages. folder: a folder or hub id. arguments: of from_pretrained.

    Raises ModelLoadError for weights that are missing or of another shape, and for tensors that would be ignored.
    """
    config = described.config
    arguments = {"config": config, "dtype": described.dtype, **_placement(folder, config, options), **arguments}
    model, report = class_of(config).from_pretrained(folder, output_loading_info=True, **arguments)
    absent = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if absent:
        raise ModelLoadError(
            f"{len(absent)} weights are missing from {folder!r} or have the wrong shape ({', '.join(absent[:3])}, ...): "
            "the model would generate noise; download its files again"
        )
    is_part = described.is_part or config.get_text_config(decoder=True) is not config
    refuse_unread(report["unexpected_keys"], name, model.config, is_part=is_part)
    _untie(name, model)
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


def _placement(folder: str, config: Any, options: LoadOptions) -> dict[str, Any]:
    """transformers' arguments for the devices of the weights."""
    found: dict[str, Any] = {}
    device = options.computes_on
    if options.tp_plan is not None:
        from transformers.distributed import DistributedConfig

        check_divisible(folder, config, int(os.environ["WORLD_SIZE"]))
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
