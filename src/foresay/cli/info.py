"""`foresay info [MODEL]`: the installation, or what a model supports."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter
from typing import Any

import click
import torch
from torch import nn

from foresay.checks import check_int
from foresay.cli import installation, methods, ngram
from foresay.cli.command import Given, choose_model
from foresay.cli.common import target_options
from foresay.cli.progress import loading
from foresay.decoding.protocols import LanguageModel, ModelInput
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.models.cache.snapshots import MAX_BACKLOG
from foresay.models.cache.state_cache import SLOTS
from foresay.models.cache.stores import WIDTH
from foresay.models.cpu.product import block_bits
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import activations_of, block_kinds, resident_bytes, weight_bytes
from foresay.models.huggingface.model import UNLIMITED
from foresay.models.huggingface.recurrent import RecurrentModel
from foresay.models.huggingface.self_check import judged, verified
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from foresay.models.llama_cpp.binding import version
from foresay.models.llama_cpp.model import LlamaCppModel
from foresay.models.sources.loading import load_model
from foresay.models.sources.packaged import default_drafter
from foresay.models.sources.wrapping import LoadedModel
from foresay.spec.recipe import Resources


def run(given: Given) -> int:
    """Run the command."""
    check_int("batch_size", given.batch_size, 1)
    if given.context is not None:
        check_int("context", given.context, 1)
    table = given.subject if ngram.is_table(given.subject) else None
    if table is None:
        choose_model(given, given.subject)
    _refuse_idle(given, is_table=table is not None)
    if (table is None and given.model is None) or given.methods:
        return _print(methods.described() if given.methods else installation.described())
    if table is not None:
        return _print(ngram.described(table, given))
    name, options = target_options(given)
    try:
        with loading(f"Loading {name}") as progress:
            loaded = load_model(name, replace(options, progress=progress))
            loaded.generation.check(name)
            scorer, shape = loaded.model, (given.batch_size, given.context)
            if isinstance(scorer, LlamaCppModel):
                lines = _of_llama_cpp(loaded, scorer, *shape)
            else:
                assert isinstance(scorer, CausalModel | Seq2SeqModel)
                lines = _of_transformers(loaded, scorer, *shape)
            lines |= {"default drafter": default_drafter(loaded.name, options, Resources(loaded, options).has_mtp)}
    except UnsupportedModelError as error:
        click.echo(f"{name}\n  supported: no\n  reason: {error}")
        return 2
    return _print([name, *(f"  {title}: {value}" for title, value in lines.items())])


def _refuse_idle(given: Given, *, is_table: bool) -> None:
    """Raise ConfigError for an option that has no effect on what is shown."""
    shown, applies = "a model", set(given.typed)
    if given.methods:
        shown, applies = "the methods", {"methods"}
    elif is_table:
        shown, applies = "an n-gram table", {"model", "trust_remote_code"}
    elif given.model is None:
        shown, applies = "versions and caches", set()
    if idle := [flag for name, flag in given.typed.items() if name not in applies]:
        raise ConfigError(f"has no effect on {shown}; drop it, or name a model", param=idle[0])


def _print(lines: Iterable[str]) -> int:
    for line in lines:
        click.echo(line)
    return 0


def passes(model: CausalModel | Seq2SeqModel) -> str:
    """Describe the code that computes the model's forward passes."""
    fused = model.fused if isinstance(model, CausalModel) else None
    if fused is None:
        return "transformers' own layers"
    if fused.paged is not None:
        pool = fused.paged.pool
        return f"fused layers, keys and values in pages of {pool.num_tokens} tokens ({pool.nbytes / 1e9:.1f} GB)"
    return "fused layers, kernels compiled for this machine" if fused.is_native else "fused layers"


def _memory(model: LanguageModel, weight_bytes: int, rows: int, length: int | None) -> str:
    """Memory of weights and of a batch, and whether the batch fits."""
    length = min(length or 2048, model.max_length)
    wanted, free = model.cache_bytes([length] * rows), model.free_bytes()
    fits = "it fits" if wanted <= free else f"only {free / 1e9:.1f} GB are free, so some rows would wait"
    return (
        f"weights {weight_bytes / 1e6:.0f} MB; {rows} rows of {length} tokens {wanted / 1e6:.0f} MB "
        f"({(model.cache_bytes([2 * WIDTH]) - model.cache_bytes([WIDTH])) / WIDTH / 1e3:.1f} kB a token): {fits}"
    )


def _shared(loaded: LoadedModel) -> dict[str, str]:
    """Lines for every kind of model."""
    tokens = 0 if loaded.tokenizer is None else len(loaded.tokenizer.get_vocab())
    return {
        "vocabulary": f"{loaded.model.vocab_size} embeddings, {tokens} tokens in the tokenizer",
        "chat template": "yes" if getattr(loaded.tokenizer, "chat_template", None) else "no",
        "end tokens": ", ".join(map(str, sorted(loaded.eos_token_ids))) or "none",
        **loaded.generation.described(),
    }


def _of_llama_cpp(loaded: LoadedModel, model: LlamaCppModel, rows: int, length: int | None) -> dict[str, str]:
    layout = (
        "repacked for this machine" if model.weights.repacked else "in the file's layout: repacked ones crash with AMX"
    )
    return {
        "supported": "yes: speculation, ragged batches, every rule, every drafter except heads and self-speculation",
        "family": f"{model.weights.description}, computed by llama.cpp ({version()})",
        "parameters": f"{model.num_parameters / 1e6:.1f} M",
        "weights": f"{model.weights.nbytes / 1e6:.0f} MB, {layout}",
        "context": f"{model.max_length} tokens",
        "memory": _memory(model, model.weights.nbytes, rows, length),
        **_shared(loaded),
        "same bits": "no: llama.cpp's sums depend on the number of tokens in a pass. Where two tokens' scores are as close as "
        "rounding errors, the output may depend on batch and draft",
    }


def _of_transformers(
    loaded: LoadedModel, model: CausalModel | Seq2SeqModel, rows: int, length: int | None
) -> dict[str, str]:
    checked, module = judged(model), model.model
    kept = {"": "in that dtype", "GGUF": "in the file's blocks", "MXFP4": "in that dtype, experts in MXFP4 as stored"}
    other = "rounded to" if loaded.weights in ("int8", "int4") else "as stored:"
    weights = kept.get(loaded.weights, f"{other} {loaded.weights}")
    tested = "tested" if verified(model) else "self-checked, not in the tests"
    recurrent = isinstance(model, RecurrentModel)
    limits = "; no trees and no self-speculation" if recurrent else " except heads" * model.reads_source
    return {
        "supported": f"yes: speculation, ragged batches, every rule, every drafter{limits}",
        "family": f"{module.config.model_type} ({type(module).__name__}), {tested}",
        "parameters": f"{model.num_parameters / 1e6:.1f} M",
        "dtype, device": f"{str(module.dtype).removeprefix('torch.')}, {model.device}",
        "weights": f"{weights}{_bits(module)}; one forward pass reads {weight_bytes(module) / 1e6:.0f} MB",
        **_activations(module),
        "forward pass": passes(model),
        "same bits": _same_bits(model),
        "context": "unlimited" if model.max_length == UNLIMITED else f"{model.max_length} tokens",
        "memory": _memory(model, resident_bytes(module), rows, length),
        **(_of_states(model) if isinstance(model, RecurrentModel) else {}),
        **_shared(loaded),
        "self-check": checked,
    }


def _bits(module: nn.Module) -> str:
    """Bits of weights in blocks as they are in the file, and as the kernels read them."""
    found = [(kind, *block_bits(kind)) for kind in block_kinds(module)]
    return "".join(f", {kind} ({stored:.3g} bits, {packed:.3g} in memory)" for kind, stored, packed in found)


def _same_bits(model: CausalModel | Seq2SeqModel) -> str:
    """Describe whether a token's scores depend on what else its pass contains."""
    if model.batch_invariant:
        return "yes: a token's scores do not depend on what else its pass contains"
    where = "Where two tokens' scores are as close as rounding errors, the output may depend on batch and draft"
    if isinstance(model, CausalModel) and model.paged is not None:
        if model.reproducible is False:
            return f"no: reproducible=False lets a library multiply. {where}"
        if model.reproducible:
            return "yes, in passes of up to 512 tokens, which prompts are read in, too"
        return "in passes of up to 512 tokens; prompts, with the scores after them, and larger passes have another order of sums"
    return f"no: only compiled kernels guarantee them. {where}"


def _of_states(model: RecurrentModel) -> dict[str, str]:
    """Describe the states of recurrent layers, and measure what a token costs that is fed again after a rejection."""
    if model.fused is not None:
        return {
            "states": f"{model.cache_bytes([0]) / 1e6:.1f} MB a row, with copies for common prefixes; a rejection feeds no token "
            f"again after drafts of up to {SLOTS - 1} tokens"
        }
    seconds = []
    for columns in (1, 9):
        tokens = torch.ones(1, columns, dtype=torch.int64, device=model.device)
        times = []
        for _ in range(4):
            cache = model.new_cache()
            cache.add_rows(1)
            model.forward(ModelInput(tokens[:, :1], [1]), cache)
            began = perf_counter()
            model.forward(ModelInput(tokens, [columns]), cache)
            times.append(perf_counter() - began)
        seconds.append(min(times))
    share = max(0.0, (seconds[1] - seconds[0]) / 8 / seconds[0])
    return {
        "states": f"{model.state_bytes / 1e6:.1f} MB a row, twice; after a rejection the accepted tokens, at most {MAX_BACKLOG}, "
        f"are fed again, which takes {share:.1%} of a pass each"
    }


def _activations(module: Any) -> dict[str, str]:
    kinds = activations_of(module)
    text = ", ".join("not rounded" if kind == "float32" else f"rounded to {kind}" for kind in kinds)
    return {"activations": f"{text} before products"} if kinds else {}
