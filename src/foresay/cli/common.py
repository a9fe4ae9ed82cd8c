"""Helpers that commands share: load a model from options, read a prompt, choose a seed."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from foresay.checks import check_int
from foresay.cli.command import Given
from foresay.cli.options import DEFAULT_MODEL
from foresay.cli.progress import loading, note
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ConfigError, PromptError
from foresay.files import unreadable
from foresay.generation.generator import Generator
from foresay.generation.load import change, load
from foresay.generation.method import Method, methods
from foresay.models.sources.catalogue import catalogue
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import ALIASES
from foresay.spec.expressions import Call, parse
from foresay.spec.recipes import read_drafter
from foresay.spec.settings_file import FILE, is_settings, read_settings

_SIZE = r"(\d+|cpu|mps)=\d+(\.\d+)?[KMG]i?B"
_SIZES = f"{_SIZE}(,{_SIZE})*"


def use_threads(count: int | None) -> None:
    """Limit PyTorch's threads. Two processes that both use every core slow each other by far more than 2x."""
    check_threads(count)
    if count is not None:
        torch.set_num_threads(count)


def check_threads(count: int | None) -> None:
    """Raise ConfigError for a number of threads out of range."""
    if count is not None:
        check_int("threads", count, 1, 1024)


def load_generator(given: Given, *, later: Sequence[Method] = (), **more: Any) -> Generator:
    """Load the model that options name. A draft model is passed as an expression, so that `foresay.change` can keep it.

    later: methods that the command runs one after the other over the same weights. more: arguments of `foresay.load` that
    replace those of options.
    """
    arguments = load_arguments(given, **more)
    if arguments.get("drafter") == "none":
        check_draft_weights(given, later)
    for method in later:
        read_drafter(method.drafter).check_files()
    use_threads(given.threads)
    with loading(f"Loading {arguments['target']}") as progress:
        return load(**arguments, progress=progress)


def load_target(given: Given, later: Sequence[Method] = (), **more: Any) -> Generator:
    """Load the target alone, without the drafters, lengths and rule of the options."""
    return load_generator(given, later=later, **PLAIN, **more)


def own_methods(target: Generator, *, rule: str = "speculative", best: bool = True) -> list[Method]:
    """Return the target's default drafter and, with `best`, the best draft for it on this machine, at their default lengths."""
    drafters = [change(target, drafter="auto").drafter_name]
    found = catalogue(target.target.name, search_hub=False).best if best else None
    if found is not None and found.folder is not None:
        drafters.append(found.drafter)
    return methods(drafters, rule=rule)


def sampled(params: SamplingParams, generator: Generator) -> SamplingParams:
    """Return the parameters with the model's own sampling, if it was loaded for it. Raises as `refuse_idle` does."""
    merged = generator.target.generation.sampled(params)
    if merged.greedy:
        refuse_idle(params)
    return merged


_LOADED = tuple(f.name for f in fields(LoadOptions) if f.name != "progress")
_ARGUMENTS = ("draft", "drafter", "length", "rule", "sampling", "keep_prompts", "keep_prompts_gb", *_LOADED)
PLAIN: dict[str, Any] = {"draft": None, "drafter": "none", "length": None, "rule": None}
"""Arguments of `foresay.load` for plain decoding, whatever the options name."""


def load_arguments(given: Given, **more: Any) -> dict[str, Any]:
    """Return the arguments of `foresay.load` for these options, as plain data. What is not given is left to a settings file."""
    found: dict[str, Any] = {} if "target" in more else {"target": model_name(given.model)}
    found |= {name: getattr(given, name, None) for name in _ARGUMENTS} | loaded_values(given) | more
    if found["draft"] is not None and found["drafter"] in ("auto", "model"):
        found |= {"drafter": model_expression(found["draft"]), "draft": None}
    if found["max_memory"] is not None:
        found["max_memory"] = memory_sizes(found["max_memory"])
    if found["keep_prompts_gb"] is not None and found["keep_prompts"] is None:
        raise ConfigError("needs --keep-prompts DIR", param="keep_prompts_gb", value=found["keep_prompts_gb"])
    for name in ("offload_folder", "keep_prompts"):
        found[name] = None if found[name] is None else str(found[name])
    return {name: value for name, value in found.items() if value is not None}


def loaded_values(given: Given) -> dict[str, Any]:
    """Return the options of loading a model by name; None for those that are not given."""
    found = {name: getattr(given, name, None) for name in _LOADED}
    return {**found, "lora": found["lora"] or None}


def shown_loading(given: Given) -> list[str]:
    """Return the options of loading that were typed, or are in the settings file, for a command that is shown: "--dtype fp32"."""
    values = {name: value for name, value in loaded_values(given).items() if name in given.typed and value != "auto"}
    name = FILE if given.model is None and Path(FILE).is_file() else given.model
    values = read_settings(name).filled(values) if name is not None and is_settings(name) else values
    words = list[str]()
    for option, value in values.items():
        every = [] if value is False else value if isinstance(value, tuple | list) else [value]
        flag = given.typed.get(option, f"--{option.replace('_', '-')}")
        words += [shlex.join([flag, *([] if one is True else [str(one)])]) for one in every]
    return words


def load_options(given: Given, **more: Any) -> LoadOptions:
    """Return the options of loading a model alone."""
    values = loaded_values(given) | more
    return LoadOptions(**{name: value for name, value in values.items() if value is not None})


def memory_sizes(text: str) -> dict[str, str]:
    """Return the memory limit of each device in "0=20GB,cpu=60GB"."""
    found = re.fullmatch(_SIZES, text)
    if found is None:
        raise ConfigError("must be DEVICE=SIZE and commas, such as 0=20GB,cpu=60GB", param="max_memory", value=text)
    return dict(part.split("=") for part in text.split(","))


def memory_size(flag: str, text: str) -> int:
    """Return a size in bytes. Raises ConfigError, which names the flag."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MGT])(i?)B?", text, re.IGNORECASE)
    if found is None:
        raise ConfigError("must be a size such as 800MB, 6GB or 6GiB", param=flag, value=text)
    return int(
        float(found[1]) * (1024 if found[3] else 1000) ** "kmgt".index(found[2].lower()) * (1024 if found[3] else 1000)
    )


def check_draft_weights(given: Given, methods: Sequence[Method]) -> None:
    """Raise ConfigError for --draft-weights if no method loads a draft model."""
    kind = getattr(given, "draft_weights", None)
    if kind is not None and not any(read_drafter(one.drafter).loads_model for one in methods):
        raise ConfigError("is for a draft model, and no method loads one; drop it", param="draft_weights", value=kind)


def check_output(output: Path, *, force: bool, name: str = "--output") -> None:
    """Raise ConfigError for a file that could not be written in the end."""
    if output.is_dir():
        raise ConfigError("is a folder; name a file", param=name, value=output)
    if output.exists() and not force:
        raise ConfigError("exists; add --force to replace it, or name another file", param=name, value=output)
    if not output.parent.is_dir():
        raise ConfigError(f"is in the folder {str(output.parent)!r}, which does not exist", param=name, value=output)
    if not os.access(output.parent, os.W_OK):
        raise ConfigError(f"is in the folder {str(output.parent)!r}, which is not writable", param=name, value=output)


def check_folder(folder: Path, ours: Sequence[str]) -> None:
    """Make a folder that is written or continued. Raises ConfigError for one with other content than that of these names."""
    if folder.is_file():
        raise ConfigError("is a file; name a folder", param="folder", value=folder)
    if folder.is_dir() and any(folder.iterdir()) and not any((folder / name).exists() for name in ours):
        raise ConfigError("contains something else, and is not changed; name another", param="folder", value=folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot be made: {error.strerror}", param="folder", value=folder) from None


def model_name(given: str | None) -> str:
    """Return the model to load: the given one, else foresay.toml in this folder, else the default.

    The settings of a settings file are printed on stderr.
    """
    if given is None and not Path(FILE).is_file():
        return DEFAULT_MODEL
    name = FILE if given is None else given
    if is_settings(name):
        note(f"foresay: settings from {name} ({read_settings(name)})")
    return name


def target_options(given: Given) -> tuple[str, LoadOptions]:
    """Return the target and its load options; those of a settings file where none, or "auto", is given."""
    name, options = model_name(given.model), loaded_values(given)
    if is_settings(name):
        settings = read_settings(name)
        name, options = settings.target_from(name), settings.filled(options)
    return name, LoadOptions(**{one: value for one, value in options.items() if value is not None})


def target_name(given: str | None) -> str:
    """Return the model of a command that takes no settings file: the given one, else the default.

    Raises ConfigError for a settings file.
    """
    if given is not None and is_settings(given):
        raise ConfigError("is a settings file, not a model; give its target by name", param="model", value=given)
    return DEFAULT_MODEL if given is None else given


def model_expression(name: str) -> str:
    """Return the drafter expression of a draft model, its name quoted if the grammar needs it."""
    bare = f"model({name})"
    try:
        return bare if parse(bare) == Call("model", ((None, name),)) else f'model("{name}")'
    except ConfigError:
        return f'model("{name}")'


def draft_of(generator: Generator) -> str | None:
    """The name of the draft model that a generator drafts with, if any."""
    call = parse(generator.drafter_name)
    names = [str(value) for key, value in call.values if key in (None, "name")] if call.name == "model" else []
    return names[0] if names else None


def fresh_seed() -> int:
    """Return a seed for a sampled output without a given one."""
    return secrets.randbelow(2**32)


def read_prompt(words: Sequence[str] | None, file: Path | None) -> str:
    """Return the prompt from the argument, a file, or standard input ("-", or no argument if it is not a terminal).

    Raises PromptError for several arguments, for a prompt given twice, and for one that is empty or not UTF-8.
    """
    argument = _single(words or [])
    if argument is not None and argument != "-" and file is not None:
        raise PromptError("the prompt is given twice, as an argument and with --file; drop one")
    if file is not None and str(file) != "-":
        try:
            raw = file.read_bytes()
        except OSError as error:
            raise unreadable(file, error) from None
        return _decoded(raw, str(file))
    if argument is not None and argument != "-":
        return _checked(argument)
    if argument is None and file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise PromptError("no prompt: give it as an argument in quotes, with --file, or on standard input")
    return _decoded(b"" if sys.stdin is None else sys.stdin.buffer.read(), "standard input")


def _single(words: Sequence[str]) -> str | None:
    """The only word; None if there is none."""
    if len(words) < 2:
        return words[0] if words else None
    first = words[0]
    if first in ALIASES or first.endswith(".gguf") or re.fullmatch(r"[\w.-]+/[\w.-]+", first):
        raise PromptError(f"{first!r} looks like a model: the argument is the prompt, and -m {first} names the model")
    raise PromptError(f'the prompt is one argument, and {len(words)} are given; put it in quotes: "{" ".join(words)}"')


def _decoded(raw: bytes, name: str) -> str:
    try:
        return _checked(raw.decode("utf-8-sig"))  # without a byte-order mark
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is not UTF-8 text: byte {raw[error.start]:#04x} at offset {error.start}") from None


def _checked(text: str) -> str:
    if not text.strip():
        raise PromptError("the prompt is empty")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise PromptError("the prompt is not UTF-8 text") from None
    return text


_SAMPLING = tuple(f.name for f in fields(SamplingParams))


def sampling_params(given: Given) -> SamplingParams:
    """Return SamplingParams of these options. Raises ConfigError for one that has no effect on greedy output.

    Under --sampling model, that check is left to `sampled`, which knows the model's own sampling.
    """
    values = {name: getattr(given, name, None) for name in _SAMPLING}
    params = SamplingParams(**{name: value for name, value in values.items() if value is not None})
    if getattr(given, "sampling", None) != "model":
        refuse_idle(params)
    return params


def refuse_idle(params: SamplingParams) -> None:
    """Raise ConfigError for an option that has no effect on greedy output."""
    for flag, used in idle(params).items() if params.greedy else ():  # a forgotten --temperature
        if used:
            raise ConfigError("has no effect at temperature 0; add --temperature, or drop it", param=f"--{flag}")


def idle(params: SamplingParams) -> dict[str, bool]:
    """Parameters without effect on greedy output -> True if set."""
    return {
        "seed": params.seed is not None,
        "top-k": params.top_k > 0,
        "top-p": params.top_p < 1,
        "min-p": params.min_p > 0,
    }
