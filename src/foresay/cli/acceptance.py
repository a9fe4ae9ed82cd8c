"""`foresay acceptance-head`: data, training and evaluation of the predictor of which draft tokens are accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from foresay.checks import check_float, check_int
from foresay.cli.common import load_generator
from foresay.cli.lab_options import DataOptions
from foresay.cli.options import (
    MachineOptions,
    MaxBatchOption,
    MethodOptions,
    ModelOption,
    ModelOptions,
    SamplingOptions,
)
from foresay.cli.progress import advancing
from foresay.errors import ConfigError
from foresay.files import atomic_write, writing
from foresay.lab.data.requests import RequestBuilder
from foresay.lengths.acceptance_head import AcceptanceHead
from foresay.records.provenance import provenance
from foresay.training.acceptance import AcceptancePlan, Calibration, evaluate_acceptance, train_acceptance
from foresay.training.accepted import Examples, collect, load_examples, split_examples

NOTE = "foresay.json"
_DATA = Annotated[list[Path], typer.Argument(help="Folders that acceptance-head data wrote.")]


def data(
    folder: Annotated[Path, typer.Argument(help="The folder to write; one that exists is continued.")],
    *,
    model: ModelOption = None,
    drafter: Annotated[
        str, typer.Option(metavar="EXPRESSION", help="The drafter: model(NAME), head(FOLDER) or self(LAYERS).")
    ],
    prompts: DataOptions,
    num_draft_tokens: Annotated[int, typer.Option(help="Draft tokens per pass.")] = 8,
    batch_size: MaxBatchOption = None,
    sampling: SamplingOptions,
    machine: MachineOptions,
) -> int:
    """Draft after a target's outputs; record what it accepts.

    For each draft token the folder gets the draft model's hidden state and the probability that the target accepts it.
    """
    check_int("num_draft_tokens", num_draft_tokens, 1)
    params = sampling.params()
    generator = load_generator(ModelOptions(model), drafter, MethodOptions(), machine, max_batch_size=batch_size)
    requests = [list(one.token_ids) for one in RequestBuilder(generator, chat=not prompts.raw).first(prompts.items())]
    with advancing("Drafting") as advance:
        found = collect(generator, requests, params, folder, length=num_draft_tokens, on_progress=advance)
    examples = Examples.joined(load_examples(folder))
    typer.echo(folder)
    typer.echo(f"  {len(examples):,} draft tokens, mean acceptance {float(examples.labels.float().mean()):.0%}")
    if found:
        typer.echo(f"  {found} files from an earlier run")
    return 0


def train(
    folder: Annotated[Path, typer.Argument(help="The folder to write.")],
    data: _DATA,
    blocks: Annotated[int, typer.Option(help="Residual blocks; 0 is a linear predictor.")] = 3,
    rejection_weight: Annotated[float, typer.Option(help="Weight of rejected tokens in the loss.")] = 6.0,
    mixing: Annotated[float, typer.Option(help="Weight of tokens after a rejected one.")] = 0.15,
    epochs: Annotated[int, typer.Option(help="Passes over the data.")] = 3,
    batch_tokens: Annotated[int, typer.Option(help="Tokens of a training step.")] = 256,
    learning_rate: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Seed of initial weights and order.")] = 0,
) -> int:
    """Train an acceptance head on recorded data.

    The last tenth of the tokens is held out for evaluation.
    """
    plan = AcceptancePlan(
        blocks=blocks,
        rejection_weight=rejection_weight,
        mixing=mixing,
        epochs=epochs,
        batch_size=batch_tokens,
        rate=learning_rate,
        seed=seed,
    )
    learn, held_out = split_examples([part for one in data for part in load_examples(one)])
    if folder.is_dir() and any(folder.iterdir()) and not (folder / NOTE).is_file():
        raise ConfigError(f"the folder {str(folder)!r} contains something else, and is not changed; name another")
    with advancing("Training") as advance:
        head = train_acceptance(learn, plan, lambda share, note: advance(round(100 * share), 100, note))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    head.save(folder)
    note: dict[str, Any] = {
        "made_by": "foresay acceptance-head train",
        "data": [str(one) for one in data],
        "tokens": len(learn),
    }
    note["rejection_weight"] = rejection_weight
    with atomic_write(folder / NOTE) as whole:
        whole.write_text(json.dumps({**note, "provenance": provenance()}, indent=2) + "\n", encoding="utf-8")
    typer.echo(folder)
    typer.echo(f"  trained on {len(learn):,} draft tokens, {len(held_out):,} held out")
    _show(head, held_out, rejection_weight)
    typer.echo(f"  draft with it: --length 'acceptance({folder})'")
    return 0


def evaluate(
    folder: Annotated[Path, typer.Argument(help="Folder of an acceptance head.")],
    data: _DATA,
) -> int:
    """Measure how well an acceptance head predicts."""
    head = AcceptanceHead.load(folder)
    examples = Examples.joined([part for one in data for part in load_examples(one)])
    typer.echo(folder)
    found = _show(head, examples, _rejection_weight(folder))
    for predicted, accepted, count in found.bins:
        typer.echo(f"  predicted {predicted:.2f}: accepted {accepted:.2f} ({count:,} tokens)")
    return 0


def _rejection_weight(folder: Path) -> float | None:
    """The rejection weight of a head's training; None if its folder does not record it."""
    try:
        weight = json.loads((folder / NOTE).read_text(encoding="utf-8"))["rejection_weight"]
        return check_float("rejection_weight", weight, 0.0, 1e6)
    except (OSError, ValueError, KeyError, TypeError):  # a published head has no such file
        return None


def _show(head: AcceptanceHead, examples: Examples, rejection_weight: float | None) -> Calibration:
    """Print the calibration of a head and return it."""
    found = evaluate_acceptance(head, examples)
    typer.echo(f"  {_fit(found)}")
    if rejection_weight is None:
        typer.echo(
            "  the folder does not record the rejection weight of the training; above 1, predictions are too low"
        )
    elif rejection_weight not in (0.0, 1.0):
        weight, without = f"{rejection_weight:g}", evaluate_acceptance(head, examples, rejection_weight)
        typer.echo(
            f"  trained with rejection weight {weight}: it predicts a / (a + {weight} (1 - a)) for a probability a"
        )
        typer.echo(f"  corrected for that: {_fit(without)}")
    return found


def _fit(found: Calibration) -> str:
    return (
        f"divergence {found.divergence:.4f} (of a constant: {found.without:.4f}), calibration error {found.error:.3f}"
    )
