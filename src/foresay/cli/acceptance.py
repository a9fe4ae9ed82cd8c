"""`foresay head`: the head that predicts whether draft tokens are accepted: its data, its training, how good it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from foresay.checks import check_float
from foresay.cli.common import load_generator
from foresay.cli.lab_options import DataOptions
from foresay.cli.options import MachineOptions, MethodOptions, ModelOption, ModelOptions, SamplingOptions
from foresay.cli.progress import advancing
from foresay.errors import ConfigError
from foresay.files import atomic_write, writing
from foresay.lab.data.requests import RequestBuilder
from foresay.lengths.acceptance_head import AcceptanceHead
from foresay.records.provenance import provenance
from foresay.training.acceptance import AcceptancePlan, Calibration, evaluate_acceptance, train_acceptance
from foresay.training.accepted import Examples, collect, load_examples, split_examples

NOTE = "foresay.json"
_DATA = Annotated[list[Path], typer.Argument(help="Folders that `foresay head data` wrote.")]


def data(
    folder: Annotated[Path, typer.Argument(help="Where to write; what is there is not made again.")],
    *,
    model: ModelOption = None,
    drafter: Annotated[str, typer.Option(help="What drafts: model(NAME), head(PATH), self(LAYERS).")],
    prompts: DataOptions,
    length: Annotated[int, typer.Option(help="Tokens of each chain.")] = 8,
    batch_size: Annotated[int, typer.Option(help="Prompts decoded at a time.")] = 16,
    sampling: SamplingOptions,
    machine: MachineOptions,
) -> int:
    """Draft behind what a target writes, and keep what the draft thought and how likely each token is accepted."""
    params = sampling.params()
    generator = load_generator(ModelOptions(model), drafter, MethodOptions(), machine, max_batch_size=batch_size)
    requests = [
        list(one.token_ids) for one in RequestBuilder(generator, chat=not prompts.no_template).first(prompts.items())
    ]
    with advancing("Drafting") as advance:
        found = collect(generator, requests, params, folder, length=length, on_progress=advance)
    examples = Examples.joined(load_examples(folder))
    typer.echo(folder)
    typer.echo(f"  {len(examples):,} drafted tokens, {float(examples.labels.float().mean()):.0%} of them acceptable")
    if found:
        typer.echo(f"  {found} files were there")
    return 0


def train(
    folder: Annotated[Path, typer.Argument(help="Where to write the head.")],
    data: _DATA,
    blocks: Annotated[int, typer.Option(help="Residual blocks; 0 is a linear head.")] = 3,
    rejection_weight: Annotated[float, typer.Option(help="Weight of the side that says rejected.")] = 6.0,
    mixing: Annotated[float, typer.Option(help="Weight of tokens behind rejected ones.")] = 0.15,
    epochs: Annotated[int, typer.Option(help="Times that each token is seen.")] = 3,
    batch_size: Annotated[int, typer.Option(help="Tokens of a step.")] = 256,
    rate: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3,
    seed: Annotated[int, typer.Option(help="Of first weights and order.")] = 0,
) -> int:
    """Train a head on the output of `foresay head data`; the last tenth of the tokens is held out."""
    plan = AcceptancePlan(
        blocks=blocks,
        rejection_weight=rejection_weight,
        mixing=mixing,
        epochs=epochs,
        batch_size=batch_size,
        rate=rate,
        seed=seed,
    )
    learn, held_out = split_examples([part for one in data for part in load_examples(one)])
    if folder.is_dir() and any(folder.iterdir()) and not (folder / NOTE).is_file():
        raise ConfigError(f"the folder {str(folder)!r} holds something else, and is left as it is; name another")
    with advancing("Training") as advance:
        head = train_acceptance(learn, plan, lambda share, note: advance(round(100 * share), 100, note))
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    head.save(folder)
    note: dict[str, Any] = {"made_by": "foresay head train", "data": [str(one) for one in data], "tokens": len(learn)}
    note["rejection_weight"] = rejection_weight
    with atomic_write(folder / NOTE) as whole:
        whole.write_text(json.dumps({**note, "provenance": provenance()}, indent=2) + "\n", encoding="utf-8")
    typer.echo(folder)
    typer.echo(f"  learned on {len(learn):,} drafted tokens, held out {len(held_out):,}")
    _show(head, held_out, rejection_weight)
    typer.echo(f"  draft with it: --length 'acceptance({folder})'")
    return 0


def evaluate(
    folder: Annotated[Path, typer.Argument(help="A head that `foresay head train` wrote.")],
    data: _DATA,
) -> int:
    """Say how well a head's predictions fit what was accepted."""
    head = AcceptanceHead.load(folder)
    examples = Examples.joined([part for one in data for part in load_examples(one)])
    typer.echo(folder)
    found = _show(head, examples, _rejection_weight(folder))
    for predicted, accepted, count in found.bins:
        typer.echo(f"  says {predicted:.2f}: {accepted:.2f} accepted ({count:,} tokens)")
    return 0


def _rejection_weight(folder: Path) -> float | None:
    """The rejection weight that a head was trained with; None if its folder does not record it."""
    try:
        weight = json.loads((folder / NOTE).read_text(encoding="utf-8"))["rejection_weight"]
        return check_float("rejection_weight", weight, 0.0, 1e6)
    except (OSError, ValueError, KeyError, TypeError):  # a published head has no such file
        return None


def _show(head: AcceptanceHead, examples: Examples, rejection_weight: float | None) -> Calibration:
    """Print how good a head is; return it for its predictions as they are."""
    found = evaluate_acceptance(head, examples)
    typer.echo(f"  {_fit(found)}")
    if rejection_weight is None:
        typer.echo(
            "  a rejection weight above 1 in its training, which its folder does not name, makes it predict less"
        )
    elif rejection_weight not in (0.0, 1.0):
        weight, without = f"{rejection_weight:g}", evaluate_acceptance(head, examples, rejection_weight)
        typer.echo(f"  trained with rejection weight {weight}, it predicts a / (a + {weight} (1 - a)) for a chance a")
        typer.echo(f"  with that taken out: {_fit(without)}")
    return found


def _fit(found: Calibration) -> str:
    return (
        f"divergence {found.divergence:.4f} (always the mean: {found.without:.4f}), calibration error {found.error:.3f}"
    )
