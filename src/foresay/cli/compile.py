"""`foresay compile MODEL`: what loading a model would compile and keep, done beforehand."""

from __future__ import annotations

from time import perf_counter
from typing import Annotated

import typer

from foresay.cli.info import passes
from foresay.cli.options import DeviceOption, DtypeOption, TrustOption, WeightsOption
from foresay.cli.progress import loading
from foresay.models.cpu import build
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from foresay.models.sources.catalog import load_model
from foresay.models.sources.load_options import LoadOptions


def run(
    model: Annotated[str, typer.Argument(help="Alias, hub id, folder or GGUF file.")] = "smollm2-135m",
    dtype: DtypeOption = "auto",
    weights: WeightsOption = "auto",
    device: DeviceOption = None,
    trust_remote_code: TrustOption = False,
) -> int:
    """Compile what a model's passes run on, convert its weights, and keep that for later.

    Exit code 1: its passes run without compiled kernels.
    """
    began = perf_counter()
    with loading("Compiling the kernels") as progress:
        there = build.is_kept()
        kernels = build.library()
        took = perf_counter() - began
        progress(f"Loading {model}")
        options = LoadOptions(
            dtype=dtype, weights=weights, device=device, trust_remote_code=trust_remote_code, progress=progress
        )
        began = perf_counter()
        scorer = load_model(model, options).model
    assert isinstance(scorer, CausalModel | Seq2SeqModel)
    how = "kept" if there else f"compiled in {took:.1f} s, kept"
    typer.echo(model)
    typer.echo(f"  kernels: {'none: ' + build.why_not() if kernels is None else f'{how} as {build.kept()}'}")
    typer.echo(f"  model: loads in {perf_counter() - began:.1f} s")
    typer.echo(f"  passes: {passes(scorer)}")
    compiled = isinstance(scorer, CausalModel) and scorer.lean is not None and scorer.lean.compiled
    return 0 if compiled else 1
