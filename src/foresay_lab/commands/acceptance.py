"""`foresay distill --kind acceptance`: data, training and evaluation of the predictor of which draft tokens are accepted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from foresay.cli.command import Given
from foresay.cli.common import check_folder, load_generator
from foresay.cli.progress import advancing
from foresay.errors import ConfigError
from foresay.records.recording import Recording, read_params
from foresay_lab.training.acceptance import AcceptancePlan, Calibration, evaluate_acceptance, train_acceptance
from foresay_lab.training.accepted import Examples, collect, load_examples, split_examples
from foresay_lab.training.distil import NOTE, write_note


def make(given: Given) -> Iterator[str]:
    """Draft after a target's outputs, record what it accepts, and train an acceptance head on that; return lines about it.

    The prompts and sampling parameters are those of the recordings. The last tenth of the tokens is held out for evaluation.
    """
    folder = given.output
    if given.drafter is None:
        raise ConfigError("needs --drafter, the drafter that the head is for", param="kind", value=given.kind)
    plan = AcceptancePlan(
        rejection_weight=given.rejection_weight,
        epochs=3 if given.epochs is None else _whole(given.epochs),
        batch_size=given.batch_tokens or 256,
        rate=given.learning_rate,
        seed=given.seed,
    )
    check_folder(folder, (NOTE, "data"))
    data = given.states or folder / "data"
    found = _collect(given, data)
    learn, held_out = split_examples(load_examples(data))
    with advancing("Training") as advance:
        head = train_acceptance(learn, plan, lambda share, note: advance(round(100 * share), 100, note))
    head.save(folder)
    note = {"made_by": "foresay distill --kind acceptance", "data": str(data), "tokens": len(learn)}
    write_note(folder, note | {"rejection_weight": given.rejection_weight})
    yield str(folder)
    if found:
        yield f"  {found} files of data from an earlier run"
    accepted = float(Examples.joined([learn, held_out]).labels.float().mean())
    yield f"  trained on {len(learn):,} draft tokens, {len(held_out):,} held out, mean acceptance {accepted:.0%}"
    calibration, weight = evaluate_acceptance(head, held_out), given.rejection_weight
    yield f"  {_fit(calibration)}"
    if weight not in (0.0, 1.0):
        yield f"  trained with rejection weight {weight:g}: it predicts a / (a + {weight:g} (1 - a)) for a probability a"
        yield f"  corrected for that: {_fit(evaluate_acceptance(head, held_out, weight))}"
    for predicted, share, count in calibration.bins:
        yield f"  predicted {predicted:.2f}: accepted {share:.2f} ({count:,} tokens)"
    yield f"  draft with it: --length 'acceptance({folder})'"


def _whole(epochs: float) -> int:
    """The number of passes over the data of an acceptance head, which knows no parts of one."""
    if not epochs.is_integer():
        raise ConfigError("must be an integer for --kind acceptance", param="epochs", value=epochs)
    return int(epochs)


def _collect(given: Given, folder: Path) -> int:
    """Make the missing files of data. Return the number of files that existed."""
    recordings = [Recording.load(path) for path in given.outputs]
    if any(one.params != recordings[0].params for one in recordings):
        raise ConfigError("have different sampling parameters; give recordings of one run", param="outputs")
    generator = load_generator(given)
    prompts = [list(record.prompt) for one in recordings for record in one.records]
    with advancing("Drafting") as advance:
        params, length = read_params(recordings[0].params), given.draft_steps or 8
        return collect(generator, prompts, params, folder, length=length, on_progress=advance)


def _fit(found: Calibration) -> str:
    return (
        f"divergence {found.divergence:.4f} (of a constant: {found.without:.4f}), calibration error {found.error:.3f}"
    )
