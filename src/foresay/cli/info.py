"""`foresay info MODEL`: what a model supports, and why not."""

from __future__ import annotations

from typing import Annotated

import typer

from foresay.cli.options import DeviceOption, DtypeOption, TrustOption, WeightsOption
from foresay.cli.progress import loading
from foresay.errors import UnsupportedModelError
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.linears import held_bytes, weight_bytes
from foresay.models.huggingface.model import UNLIMITED
from foresay.models.huggingface.self_check import probe, verified
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from foresay.models.huggingface.slot_cache import visible_width
from foresay.models.sources.catalog import load_model
from foresay.models.sources.load_options import LoadOptions


def passes(model: CausalModel | Seq2SeqModel) -> str:
    """What makes the model's passes."""
    lean = model.lean if isinstance(model, CausalModel) else None
    if lean is None:
        return "by the family's own code"
    graphs = model.graphs if isinstance(model, CausalModel) else None
    if graphs is not None and graphs.off is None:
        return "lean, captured as graphs"
    return "lean, compiled for this machine" if lean.compiled else "lean"


def _memory(model: CausalModel | Seq2SeqModel, rows: int, length: int | None) -> str:
    """What a batch takes beside the weights, and whether there is room."""
    length = min(length or 2048, model.max_length)
    wanted, room = model.cache_bytes(rows, length), model.room_bytes()
    fits = "there is room" if wanted <= room else f"{room / 1e9:.1f} GB are free, so rows would wait for each other"
    return (
        f"weights {held_bytes(model.model) / 1e6:.0f} MB; {rows} rows of {length} tokens {wanted / 1e6:.0f} MB "
        f"({model.cache_bytes(1, 1) / visible_width(1, model.device) / 1e3:.1f} kB a token): {fits}"
    )


def run(
    model: Annotated[str, typer.Argument(help="Alias, hub id, folder or GGUF file.")],
    dtype: DtypeOption = "auto",
    weights: WeightsOption = "auto",
    device: DeviceOption = None,
    trust_remote_code: TrustOption = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows to foresee the memory for.")] = 32,
    context: Annotated[
        int | None, typer.Option(min=1, help="Their tokens. Default: 2048, or the model's context.")
    ] = None,
) -> int:
    """Say what a model supports, or why it is not supported."""
    try:
        with loading(f"Loading {model}") as progress:
            options = LoadOptions(
                dtype=dtype, weights=weights, device=device, trust_remote_code=trust_remote_code, progress=progress
            )
            loaded = load_model(model, options)
            scorer = loaded.model
            assert isinstance(scorer, CausalModel | Seq2SeqModel)
            difference = probe(scorer)
    except UnsupportedModelError as error:
        typer.echo(f"{model}\n  supported: no\n  reason: {error}")
        return 2
    module, tokenizer = scorer.model, loaded.tokenizer
    kind = str(module.config.model_type)
    tokens = 0 if tokenizer is None else len(tokenizer.get_vocab())
    limit = "unlimited" if scorer.max_length == UNLIMITED else f"{scorer.max_length} tokens"
    kept = {"": "in that dtype", "GGUF": "in the file's blocks"}.get(loaded.weights, f"rounded to {loaded.weights}")
    lines = {
        "supported": "yes: speculation, ragged batches, every drafter and rule",
        "family": f"{kind} ({type(module).__name__}), "
        + ("tested" if verified(scorer) else "self-checked, not in the tests"),
        "parameters": f"{scorer.num_parameters / 1e6:.1f} M",
        "dtype, device": f"{str(module.dtype).removeprefix('torch.')}, {scorer.device}",
        "weights": f"{kept}; a pass reads {weight_bytes(module) / 1e6:.0f} MB of them",
        "passes": passes(scorer),
        "context": limit,
        "memory": _memory(scorer, batch_size, context),
        "vocabulary": f"{scorer.vocab_size} embeddings, {tokens} tokens in the tokenizer",
        "chat template": "yes" if getattr(tokenizer, "chat_template", None) else "no",
        "end tokens": ", ".join(map(str, sorted(loaded.eos_token_ids))) or "none",
        "self-check": f"cached and uncached scores differ by {difference:.1e} of their spread",
    }
    typer.echo(model)
    for name, value in lines.items():
        typer.echo(f"  {name}: {value}")
    return 0
