"""`foresay info MODEL`: what a model supports, and why not."""

from __future__ import annotations

from typing import Annotated

import typer

from foresay.cli.options import BackendOption, DeviceOption, DtypeOption, GpuLayersOption, TrustOption, WeightsOption
from foresay.cli.progress import loading
from foresay.decoding.protocols import LanguageModel
from foresay.errors import UnsupportedModelError
from foresay.models.cache.stores import WIDTH
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import resident_bytes, weight_bytes
from foresay.models.huggingface.model import UNLIMITED
from foresay.models.huggingface.self_check import probe, verified
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from foresay.models.llama_cpp.binding import version
from foresay.models.llama_cpp.model import LlamaCppModel, compared
from foresay.models.sources.catalog import LoadedModel, load_model
from foresay.models.sources.load_options import TRANSFORMERS, LoadOptions


def passes(model: CausalModel | Seq2SeqModel) -> str:
    """What makes the model's passes."""
    lean = model.lean if isinstance(model, CausalModel) else None
    if lean is None:
        return "by the family's own code"
    graphs = model.graphs if isinstance(model, CausalModel) else None
    if graphs is not None and graphs.off is None:
        return "lean, captured as graphs"
    return "lean, compiled for this machine" if lean.compiled else "lean"


def _memory(model: LanguageModel, held: int, rows: int, length: int | None) -> str:
    """Memory of a batch next to the weights, and whether there is room."""
    length = min(length or 2048, model.max_length)
    wanted, room = model.cache_bytes([length] * rows), model.free_bytes()
    fits = "there is room" if wanted <= room else f"{room / 1e9:.1f} GB are free, so rows would wait for each other"
    return (
        f"weights {held / 1e6:.0f} MB; {rows} rows of {length} tokens {wanted / 1e6:.0f} MB "
        f"({model.cache_bytes([WIDTH]) / WIDTH / 1e3:.1f} kB a token): {fits}"
    )


def _shared(loaded: LoadedModel) -> dict[str, str]:
    """What is said of every model."""
    tokens = 0 if loaded.tokenizer is None else len(loaded.tokenizer.get_vocab())
    return {
        "vocabulary": f"{loaded.model.vocab_size} embeddings, {tokens} tokens in the tokenizer",
        "chat template": "yes" if getattr(loaded.tokenizer, "chat_template", None) else "no",
        "end tokens": ", ".join(map(str, sorted(loaded.eos_token_ids))) or "none",
    }


def _of_llama_cpp(loaded: LoadedModel, model: LlamaCppModel, rows: int, length: int | None) -> dict[str, str]:
    difference, same = compared(model)
    layouts = (
        "repacked for this machine"
        if model.weights.extra_buffers
        else "as the file has them: its repacked kernels crash here"
    )
    return {
        "supported": "yes: speculation, ragged batches, every rule, every drafter that needs no hidden states and no layers",
        "family": f"{model.weights.description}, computed by llama.cpp ({version()})",
        "parameters": f"{model.num_parameters / 1e6:.1f} M",
        "weights": f"{model.weights.nbytes / 1e6:.0f} MB, {layouts}",
        "context": f"{model.max_length} tokens",
        "memory": _memory(model, model.weights.nbytes, rows, length),
        **_shared(loaded),
        "same bits": f"{same} of 16 tokens have the same bits alone, together and in a batch, the others differ by up to "
        f"{difference:.1e} of the scores' spread: where two tokens are that near, a text may depend on batch and draft",
    }


def _of_transformers(
    loaded: LoadedModel, model: CausalModel | Seq2SeqModel, rows: int, length: int | None
) -> dict[str, str]:
    difference, module = probe(model), model.model
    kept = {"": "in that dtype", "GGUF": "in the file's blocks"}.get(loaded.weights, f"rounded to {loaded.weights}")
    tested = "tested" if verified(model) else "self-checked, not in the tests"
    return {
        "supported": f"yes: speculation, ragged batches, every rule, every drafter{' but heads' * model.reads_source}",
        "family": f"{module.config.model_type} ({type(module).__name__}), {tested}",
        "parameters": f"{model.num_parameters / 1e6:.1f} M",
        "dtype, device": f"{str(module.dtype).removeprefix('torch.')}, {model.device}",
        "weights": f"{kept}; a pass reads {weight_bytes(module) / 1e6:.0f} MB of them",
        "passes": passes(model),
        "context": "unlimited" if model.max_length == UNLIMITED else f"{model.max_length} tokens",
        "memory": _memory(model, resident_bytes(module), rows, length),
        **_shared(loaded),
        "self-check": f"cached and uncached scores differ by {difference:.1e} of their spread",
    }


def run(
    model: Annotated[str, typer.Argument(help="Alias, hub id, folder or GGUF file.")],
    dtype: DtypeOption = "auto",
    weights: WeightsOption = "auto",
    device: DeviceOption = None,
    trust_remote_code: TrustOption = False,
    backend: BackendOption = None,
    gpu_layers: GpuLayersOption = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows to foresee the memory for.")] = 32,
    context: Annotated[
        int | None, typer.Option(min=1, help="Their tokens. Default: 2048, or the model's context.")
    ] = None,
) -> int:
    """Say what a model supports, or why it is not supported."""
    try:
        with loading(f"Loading {model}") as progress:
            options = LoadOptions(
                dtype=dtype,
                weights=weights,
                device=device,
                trust_remote_code=trust_remote_code,
                backend=backend or TRANSFORMERS,
                gpu_layers=gpu_layers,
                progress=progress,
            )
            loaded = load_model(model, options)
            scorer = loaded.model
            if isinstance(scorer, LlamaCppModel):
                lines = _of_llama_cpp(loaded, scorer, batch_size, context)
            else:
                assert isinstance(scorer, CausalModel | Seq2SeqModel)
                lines = _of_transformers(loaded, scorer, batch_size, context)
    except UnsupportedModelError as error:
        typer.echo(f"{model}\n  supported: no\n  reason: {error}")
        return 2
    typer.echo(model)
    for name, value in lines.items():
        typer.echo(f"  {name}: {value}")
    return 0
