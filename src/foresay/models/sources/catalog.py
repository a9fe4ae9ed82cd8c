"""An alias, a folder, a hub id or a GGUF file -> weights and tokenizer.

Owns how a name is located and what is passed to transformers. Knows nothing of decoding, nor how a conversion is kept
(packaged.py).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from foresay.decoding.protocols import LanguageModel, ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import (
    ConfigError,
    ForesayError,
    ModelLoadError,
    ModelNotFoundError,
    UnknownNameError,
    UnsupportedModelError,
)
from foresay.models.cache.memory import trim
from foresay.models.gguf.blocks import model_of_blocks
from foresay.models.gguf.positions import refuse_unread
from foresay.models.gguf.shapes import dense_config
from foresay.models.gguf.tokenizer import config_of, tokenizer_of
from foresay.models.gguf.values import ARCHITECTURES, checked_header
from foresay.models.huggingface import linears
from foresay.models.sources.config_checks import check_config, check_size
from foresay.models.sources.llama_cpp import open_gguf
from foresay.models.sources.load_options import DTYPES, LLAMA_CPP, LoadOptions
from foresay.models.sources.packaged import ALIASES, check_gguf, converted, dequantize, packaged_file
from foresay.models.sources.transformers_errors import load_errors, quiet_transformers
from foresay.text.tokenizer import Tokenizer, check_usable

logger = logging.getLogger("foresay")

_BF16 = ("bf16", "bfloat16", torch.bfloat16)
_HUB_TIMEOUT_S = 10.0
_PROBED = 4
"""Tokens whose scores are looked at after loading."""
_TOKENIZER_FILES = ("tokenizer", "tokenization", "vocab", "spiece", "sentencepiece", "source.spm")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A LanguageModel, with its tokenizer and end token ids."""

    name: str
    model: LanguageModel
    tokenizer: Tokenizer | None
    eos_token_ids: frozenset[int]
    weights: str = ""
    """"int8" or "int4" where its weights are rounded to that, "GGUF" where they are the blocks of such a file, "llama.cpp" where
    that computes."""

    @property
    def precision(self) -> str:
        """What its numbers are, as "bfloat16" or "bfloat16, int4 weights"."""
        if not self.dtype:
            return self.weights
        return f"{self.dtype}, {self.weights} weights" if self.weights else self.dtype

    @property
    def dtype(self) -> str:
        """The dtype of the weights, as "bfloat16"; empty for a model without weights."""
        return str(getattr(getattr(self.model, "model", None), "dtype", "")).removeprefix("torch.")


def native_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the processor computes in it natively, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "cpu" and linears.available(torch.bfloat16, device):
        capability = torch.backends.cpu.get_cpu_capability()
        if "AVX512" in capability or "AMX" in capability:
            return torch.bfloat16
    return torch.float32


def load_model(name: str | os.PathLike[str], options: LoadOptions | None = None) -> LoadedModel:
    """Load a model by alias, hub id, local folder or GGUF file.

    Raises ModelNotFoundError when there is no such model, ModelLoadError when its files cannot be read or lack weights,
    UnsupportedModelError when it cannot be decoded exactly, and ConfigError for a generation config that is not supported;
    never transformers' own errors.
    """
    options = options or LoadOptions()
    if options.backend == LLAMA_CPP:
        return _by_llama_cpp(os.fspath(name), options)
    folder, extra, owned = _locate(os.fspath(name), options)
    device, kept = _device(options), "" if options.bits is None else options.weights
    with quiet_transformers(), load_errors(os.fspath(name), owned):
        blocks = _blocks(Path(folder) / extra["gguf_file"], options, device) if "gguf_file" in extra else None
        if blocks is not None:
            (weights, tokenizer), kept = blocks, "GGUF"
        else:
            _check_config(folder, extra, options)
            weights, tokenizer = _read(folder, extra, options, _decoding_dtype(folder, extra, options, device), device)
    with load_errors(os.fspath(name), owned):
        found = wrap(os.fspath(name), weights, tokenizer, optimise=True, bits=options.bits)
        _check_scores(os.fspath(name), found.model)
    trim()  # the weights before they were packed
    return dataclasses.replace(found, weights=kept)


def _check_scores(name: str, model: LanguageModel) -> None:
    """Score a few tokens: what is wrong with a model's numbers, and was not seen in its files, must not end a request.

    Raises ModelLoadError for scores that are not finite, and whatever the pass raises.
    """
    ids = torch.arange(min(_PROBED, model.max_length)) % model.vocab_size
    source = ids.tolist() if model.capabilities.reads_source else None
    cache = model.new_cache()
    model.admit(Rows([Row(0, ids.tolist(), SamplingParams(), limit=len(ids) + 1, source=source)]), 0, cache)
    scores = model.forward(ModelInput(ids[None], [len(ids)]), cache).scores()
    known = torch.isfinite(scores) | (scores == -torch.inf)  # of ids that a head lacks
    if not bool(known.all()) or not bool(torch.isfinite(scores).any(-1).all()):
        raise ModelLoadError(f"{name!r} cannot be used: it gives scores that are not finite; get its files again")


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """Whether a name is a GGUF file, or an alias of one: what llama.cpp reads."""
    return os.fspath(name) in ALIASES or os.fspath(name).endswith(".gguf")


def _by_llama_cpp(name: str, options: LoadOptions) -> LoadedModel:
    if not is_gguf(name):
        raise ConfigError(f"backend='llama.cpp' reads GGUF files, and {name!r} is none; drop it, or give such a file")
    if name in ALIASES:
        path = packaged_file(name)
    else:
        folder, extra, _ = _locate(name, options)
        path = Path(folder) / extra["gguf_file"]
    model = open_gguf(path, options)
    with quiet_transformers(), load_errors(name, False):
        tokenizer = _tokenizer(str(path.parent), {"gguf_file": path.name}, options)
    return LoadedModel(name, model, tokenizer, model.weights.end_tokens, weights="llama.cpp")


def load_weights(name: str | os.PathLike[str], options: LoadOptions | None = None) -> tuple[Any, Any]:
    """transformers' own model, and its tokenizer or None, with nothing of foresay's in it: to be cut, trained or saved.

    Raises as `load_model` does; weights="int8" and "int4" are refused.
    """
    options = options or LoadOptions()
    if options.bits is not None:
        raise ConfigError(f"weights={options.weights!r} are for decoding alone; leave it out")
    folder, extra, owned = _locate(os.fspath(name), options)
    device = _device(options)
    with quiet_transformers(), load_errors(os.fspath(name), owned):
        _check_config(folder, extra, options)
        return _read(folder, extra, options, _dtype(options.computes_in, device), device)


def load_tokenizer(name: str | os.PathLike[str], options: LoadOptions | None = None) -> Any:
    """Load a model's tokenizer without its weights, named as for `load_model`; a folder may hold nothing else.

    Of the options only revision, trust_remote_code and progress apply. Raises as `load_model` does.
    """
    options = options or LoadOptions()
    folder, extra, owned = _locate(os.fspath(name), options, weights=False)
    with quiet_transformers(), load_errors(os.fspath(name), owned):
        if (Path(folder) / "config.json").is_file():  # from which transformers takes the class
            _check_config(folder, extra, options)
        return _tokenizer(folder, extra, options)


def wrap(name: str, weights: Any, tokenizer: Any, *, optimise: bool, bits: int | None = None) -> LoadedModel:
    """Wrap a transformers model as a LanguageModel; it gets foresay's attention until `model.release()`.

    optimise: lay its linear layers out for the processor, in `bits` bits where given, and make its passes lean; only for a
    model that nothing else uses. One that is somebody else's too keeps its weights where they are: its passes are lean where
    kernels read them there. Raises UnsupportedModelError for a model that cannot be decoded exactly, which is then given back
    as it was.
    """
    from foresay.models.huggingface.causal import CausalModel
    from foresay.models.huggingface.self_check import check, confirm, use_fused_layers
    from foresay.models.huggingface.seq2seq import Seq2SeqModel

    model = Seq2SeqModel(weights) if weights.config.is_encoder_decoder else CausalModel(weights)
    try:
        check(model)
    except BaseException:
        model.release()
        raise
    if model.is_shared:  # by processes, each with a share of every product
        return LoadedModel(name, model, tokenizer, end_tokens(weights, tokenizer))
    if optimise:
        if bits is None:
            linears.freeze_model(weights)
        else:
            linears.freeze_model(weights, linears.quantizer(bits), all_dtypes=True)
    if isinstance(model, CausalModel):
        if (why := use_fused_layers(model, compiled=not optimise)) is not None:
            if not why.expected:  # its own code has to be right then, of a family that is otherwise trusted too
                try:
                    confirm(model, why.reason)
                except ForesayError as error:
                    model.release()
                    raise error.about(repr(name)) from None
            level = logging.INFO if why.expected or not optimise else logging.WARNING
            logger.log(level, "passes of %s are made by its family's own code: %s", name, why)
        if not optimise:
            model.watch()
    return LoadedModel(name, model, tokenizer, end_tokens(weights, tokenizer))


def end_tokens(weights: Any, tokenizer: Any) -> frozenset[int]:
    """The ids that end a text: the generation config's, else the tokenizer's."""
    eos = getattr(weights.generation_config, "eos_token_id", None) if weights.can_generate() else None
    if eos is None:
        eos = weights.config.get_text_config(decoder=True).eos_token_id
    if eos is None and tokenizer is not None:
        eos = tokenizer.eos_token_id
    return frozenset() if eos is None else frozenset([eos] if isinstance(eos, int) else eos)


def _dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    return native_dtype(device) if dtype == "auto" else DTYPES[dtype]


def _check_config(folder: str, extra: dict[str, Any], options: LoadOptions) -> None:
    """Check a folder's configuration; a GGUF file's is made from values that are checked."""
    if "gguf_file" not in extra:
        check_config(folder, {**_common(options), **extra})


def _decoding_dtype(folder: str, extra: dict[str, Any], options: LoadOptions, device: torch.device) -> torch.dtype:
    """What a target decodes in: under `auto` bf16 too where our kernels make whole passes, which then read half the bytes."""
    dtype = _dtype(options.computes_in, device)
    spread = any(getattr(options, name) is not None for name in ("device_map", "quantization_config", "tp_plan"))
    if (
        options.computes_in != "auto"
        or dtype == torch.bfloat16
        or device.type != "cpu"
        or spread
        or "gguf_file" in extra
    ):
        return dtype
    from transformers import AutoConfig

    from foresay.models.cpu.layers import ACTIVATIONS
    from foresay.models.huggingface.fused import FAMILIES

    if not linears.compiled():
        return dtype
    config = AutoConfig.from_pretrained(folder, **_common(options), **extra)
    named = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    whole = config.model_type in FAMILIES and str(named) in ACTIVATIONS
    foreign = getattr(config, "quantization_config", None) or (
        options.trust_remote_code and getattr(config, "auto_map", None)
    )
    return torch.bfloat16 if whole and not foreign else dtype


def _blocks(path: Path, options: LoadOptions, device: torch.device) -> tuple[Any, Any] | None:
    """A GGUF file's model over the blocks it is stored in, and its tokenizer; None where it is dequantised.

    That is where a GPU or something else was asked for, and for architectures that are not known here.
    """
    head = checked_header(path)
    plain = options.quantization_config is None and options.device_map is None and options.tp_plan is None
    plain = plain and options.weights == "auto" and options.dtype in ("auto", *_BF16)
    plain = plain and device.type == "cpu" and head.architecture in ARCHITECTURES
    if not plain:
        return None
    refuse_unread(head, in_blocks=True)
    config = config_of(head)
    return model_of_blocks(head, config, torch.bfloat16), tokenizer_of(path, config)


def _device(options: LoadOptions) -> torch.device:
    if options.device is not None:
        return torch.device(options.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _common(options: LoadOptions) -> dict[str, Any]:
    """The arguments common to loading weights and tokenizer."""
    return {"trust_remote_code": options.trust_remote_code, "revision": options.revision or "main"}


def _tokenizer(folder: str, extra: dict[str, Any], options: LoadOptions) -> Any:
    from transformers import AutoTokenizer

    if "gguf_file" in extra:
        path = Path(folder) / extra["gguf_file"]
        head = checked_header(path)
        if head.architecture in ARCHITECTURES:
            return tokenizer_of(path, config_of(head))
    tokenizer = AutoTokenizer.from_pretrained(folder, **_common(options), **extra)
    check_usable(tokenizer)
    return tokenizer


def _read(
    folder: str, extra: dict[str, Any], options: LoadOptions, dtype: Any, device: torch.device
) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    common = {**_common(options), **extra}
    kwargs: dict[str, Any] = {"dtype": dtype, **common}
    if options.tp_plan is not None:
        from transformers.distributed import DistributedConfig

        _check_heads(folder, AutoConfig.from_pretrained(folder, **common), int(os.environ["WORLD_SIZE"]))
        kwargs["distributed_config"] = DistributedConfig(tp_plan=options.tp_plan)
    if options.max_memory is not None:  # a GPU is a number, also where JSON or a command line made it a text
        kwargs["max_memory"] = {int(k) if str(k).isdecimal() else k: size for k, size in options.max_memory.items()}
    for key in ("offload_folder", "quantization_config"):
        if (value := getattr(options, key)) is not None:
            kwargs[key] = value
    if options.device_map is not None:
        kwargs["device_map"] = options.device_map
    elif options.tp_plan is None and device.type != "cpu":
        kwargs["device_map"] = {"": device}
    if "gguf_file" in extra and options.quantization_config is None:
        kwargs.update(dequantize())
    if "gguf_file" in extra:
        kwargs["config"] = dense_config(checked_header(Path(folder) / extra["gguf_file"]))
    tokenizer = _tokenizer(folder, extra, options)
    kind = AutoModelForCausalLM
    if "gguf_file" not in extra:  # which is taken for a decoder-only model
        config = AutoConfig.from_pretrained(folder, **common)
        kind = AutoModelForSeq2SeqLM if config.is_encoder_decoder else kind
        if Path(folder).is_dir():
            check_size(folder, kind, config, trust_remote_code=options.trust_remote_code)
    model, report = kind.from_pretrained(folder, output_loading_info=True, **kwargs)
    absent = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if absent:
        raise ModelLoadError(
            f"{len(absent)} weights are missing from {folder!r} or have the wrong shape ({', '.join(absent[:3])}, ...): "
            "the model would write noise; get its files again"
        )
    return model, tokenizer


def _check_heads(name: str, config: Any, processes: int) -> None:
    """Raise UnsupportedModelError where attention heads are shared out whose number the processes do not divide."""
    own = config.get_text_config(decoder=True)
    plan = getattr(own, "base_model_tp_plan", None) or {}
    shared = [path for path, style in plan.items() if style == "colwise"]  # other styles put the parts together again
    heads = [int(getattr(own, "num_attention_heads", 0) or 0)]
    if any(path.endswith("k_proj") for path in shared):
        heads.append(int(getattr(own, "num_key_value_heads", 0) or heads[0]))
    attends = any(path.endswith(("q_proj", "query_key_value")) for path in shared)
    if not attends or all(count % processes == 0 for count in heads):
        return
    most = math.gcd(*heads)
    fitting = [count for count in range(2, most + 1) if most % count == 0]
    start = f"start {' or '.join(map(str, fitting))} processes" if fitting else "load it without tp_plan"
    kinds = " and ".join(f"{n} {kind} heads" for n, kind in zip(heads, ("attention", "key-value"), strict=False))
    raise UnsupportedModelError(
        f"{name!r} has {kinds}, which {processes} processes (WORLD_SIZE) cannot share out evenly under tp_plan; {start} "
        "(a draft model that does not divide: give draft_device)"
    )


def _locate(name: str, options: LoadOptions, *, weights: bool = True) -> tuple[str, dict[str, Any], bool]:
    """(folder or hub id, extra arguments, whether the folder is a conversion of ours).

    weights: whether they are needed, or a tokenizer alone.
    """
    if not name:
        raise ModelNotFoundError("the model's name is empty; give an alias, a hub id, a folder or a GGUF file")
    if name in ALIASES:
        return str(converted(name, options)), {}, True
    path = Path(name).expanduser()
    if path.is_dir():
        if not weights and not any(file.name.startswith(_TOKENIZER_FILES) for file in path.iterdir()):
            raise ModelNotFoundError(f"the folder {name!r} holds no tokenizer (tokenizer.json, tokenizer.model, ...)")
        if weights and not (path / "config.json").is_file():
            raise ModelNotFoundError(f"the folder {name!r} holds no config.json; is it a transformers model folder?")
        return str(path), {}, False
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(
                f"{name!r} is a file, but not a .gguf file; give a model folder, a GGUF file or a hub id"
            )
        check_gguf(path)
        return str(path.parent), {"gguf_file": path.name}, False
    looks_local = name.startswith(("/", "./", "../", "~")) or name.endswith(".gguf") or name.count("/") > 1
    if looks_local:
        raise ModelNotFoundError(f"no such file or folder: {name!r}")
    if "/" not in name:
        raise ModelNotFoundError(
            str(UnknownNameError("model", name, ALIASES)) + " Or give org/name, a folder or a GGUF file."
        )
    return name, _reached(name, options), False


def _reached(name: str, options: LoadOptions) -> dict[str, Any]:
    """Request a model's configuration from the hub once, with a short timeout; offline, use the hub's cache.

    Returns extra arguments for transformers, which by itself would retry every file for most of a minute. An error reply of
    the hub is left to transformers to report.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return {}
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=options.revision), timeout=_HUB_TIMEOUT_S)
    except (HfHubHTTPError, ValueError):
        return {}
    except Exception as error:  # whatever the network library raises
        if isinstance(try_to_load_from_cache(name, "config.json", revision=options.revision), str):
            return {"local_files_only": True}
        raise ModelNotFoundError(
            f"{name!r} is neither a file nor a folder here, and the hub did not give it: {error} (check your network)"
        ) from error
    return {}
