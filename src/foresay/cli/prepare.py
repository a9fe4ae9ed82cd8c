"""`foresay prepare [MODEL]`: fill the caches that loading a model would fill."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter

import click

from foresay.cli.command import Given
from foresay.cli.common import target_options
from foresay.cli.info import passes
from foresay.cli.progress import loading
from foresay.models.cpu import build
from foresay.models.gguf.packed import settle
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from foresay.models.sources.loading import load_model


def run(given: Given) -> int:
    """Run the command."""
    began = perf_counter()
    model, options = target_options(given)
    with loading("Compiling the kernels") as progress:
        cached = build.is_compiled()
        kernels = build.library()
        took = perf_counter() - began
        progress(f"Loading {model}")
        began = perf_counter()
        scorer = load_model(model, replace(options, progress=progress)).model
        settle()
    assert isinstance(scorer, CausalModel | Seq2SeqModel)
    state = "cached" if cached else f"compiled in {took:.1f} s, cached"
    click.echo(model)
    click.echo(
        f"  kernels: {'none: ' + build.failure_reason() if kernels is None else f'{state} as {build.library_path()}'}"
    )
    click.echo(f"  model: loads in {perf_counter() - began:.1f} s")
    click.echo(f"  forward pass: {passes(scorer)}")
    compiled = isinstance(scorer, CausalModel) and scorer.fused is not None and scorer.fused.is_native
    return 0 if compiled else 1
