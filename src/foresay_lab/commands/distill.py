"""`foresay distill OUTPUT`: train or make a draft of any kind for a target.

Owns the options and which kinds they apply to; `prune`, `ngram` and `acceptance` make the kinds that are not trained on texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress

import click
import torch
from accelerate.utils import is_tensorboard_available

from foresay.checks import check_float, check_int
from foresay.cli.command import Given
from foresay.cli.common import check_folder, load_options, target_name, use_threads
from foresay.cli.progress import advancing, loading, note
from foresay.drafters.ngram_table import NgramTable
from foresay.errors import ConfigError, UnknownNameError
from foresay.models.drafts.fields import MAX_BLOCK
from foresay.models.drafts.files import read_draft
from foresay.models.sources.drafts import load_draft
from foresay.models.sources.loading import load_model, load_weights
from foresay.models.sources.wrapping import LoadedModel
from foresay.spec.recipe import check_table
from foresay.text.tokenizer import check_vocabularies, tokenizer_fingerprint
from foresay_lab.commands import acceptance, ngram, prune
from foresay_lab.commands.options import layer_numbers
from foresay_lab.commands.train import APPLIES
from foresay_lab.training.corpus import CorpusReader
from foresay_lab.training.curves import draw_curves, read_log
from foresay_lab.training.distil import NOTE, Learner, distil, draft_learner, model_learner
from foresay_lab.training.fitting import CHECKPOINT, LOG, Fitting, Plan
from foresay_lab.training.losses import Objective
from foresay_lab.training.new_drafts import BLOCK_SIZE, DraftShape, kind_of, new_draft, resumed_draft
from foresay_lab.training.new_drafts import KINDS as ON_HIDDEN_STATES
from foresay_lab.training.outputs import Text, coverage, read_outputs, split, texts_of
from foresay_lab.training.processes import is_first, own_device

HEAD, BLOCK, DFLASH2, MODEL = "head", "block", "dflash2", "model"
MAKERS: dict[str, Callable[[Given], Iterator[str]]] = {
    "pruned": prune.make,
    "ngram": ngram.build,
    "acceptance": acceptance.make,
}
"""Kinds of drafts that are not trained on texts, and what makes them and returns lines about them."""
KINDS = (HEAD, BLOCK, DFLASH2, MODEL, *MAKERS)


def run(given: Given) -> int:
    """Run the command."""
    given.kind = given.kind or (MODEL if given.draft is not None else HEAD)
    _check(given)
    use_threads(given.threads)
    is_new = not given.output.exists()
    try:
        for line in MAKERS[given.kind](given) if given.kind in MAKERS else _trained(given):
            click.echo(line)
    except BaseException:
        if is_new and given.output.is_dir():
            with suppress(OSError):  # not empty: training goes on from what it has
                given.output.rmdir()
        raise
    return 0


_BOUNDS = {"draft_steps": (1, 64), "layers": (1, 256), "block_size": (2, MAX_BLOCK), "rank": (0, 1 << 16)}
"""Allowed values of some options."""
_SHAPE = ("hidden_layers", "feed_forward", "own_output_layer", "layers", "block_size", "rank")


def _check(given: Given) -> None:
    """Raise ConfigError for values out of range, for options of another kind of draft, and for missing data."""
    if given.kind not in KINDS:
        raise UnknownNameError("kind", given.kind, KINDS)
    for name in given.typed:
        if given.kind not in (kinds := APPLIES.get(name, KINDS)):
            raise ConfigError(f"applies to --kind {' and '.join(kinds)}; drop it, or --kind {given.kind}", param=name)
    for name, (least, most) in _BOUNDS.items():
        if getattr(given, name) is not None and given.kind != "pruned":
            check_int(name, getattr(given, name), least, most)
    if given.kind not in (*MAKERS, MODEL) and given.start:
        fixed = _SHAPE if given.kind == HEAD else (*_SHAPE, "vocabulary_size")  # a head's weights do not depend on it
        if given_too := [given.typed[name] for name in fixed if name in given.typed]:
            raise ConfigError(f"sets the shape; drop {given_too[0]}", param="--from")
    if given.kind == MODEL and given.draft is None:
        raise ConfigError("needs --draft, the model to train", param="kind", value=given.kind)
    if given.kind == MODEL and (given.vocabulary is None) != (given.vocabulary_size is None):
        raise ConfigError(", a table of --kind ngram, and --vocabulary-size need each other", param="vocabulary")
    if not given.outputs and not given.text and given.kind != "pruned":
        raise ConfigError("are missing: give recordings of the target (foresay record), or --text", param="outputs")
    check_int("sequence_length", given.sequence_length, 2)
    check_float("held_out", given.held_out, 0.0, 1.0)


def _trained(given: Given) -> Iterator[str]:
    """Train a draft on texts, and return lines about it."""
    named = ("minutes", "batch_tokens", "accumulate", "evaluate_minutes", "precision", "seed")
    epochs = 1.0 if given.epochs is None else given.epochs
    plan = Plan(epochs=epochs, rate=given.learning_rate, **{name: getattr(given, name) for name in named})
    usual = "forward_kl" if given.kind == MODEL else ON_HIDDEN_STATES[given.kind].loss
    objective = Objective.parse(given.loss or usual)
    if given.tensorboard and not is_tensorboard_available():  # accelerate would log nothing, without a word
        raise ConfigError("needs tensorboard: pip install 'foresay[train]'", param="tensorboard")
    if given.hidden_layers is not None:
        given.hidden_layers = tuple(layer_numbers(given.hidden_layers, "hidden_layers", "2,15,27"))
    check_folder(given.output, (NOTE, LOG, CHECKPOINT))
    with loading("Loading") if is_first() else nullcontext():
        target = load_model(target_name(given.model), load_options(given, device=own_device(given.device)))
    learn, rest = split(_texts(target, given), given.held_out)
    note = {
        "from": given.start,
        "outputs": list(map(str, given.outputs)),
        "text": list(given.text),
        "texts": len(learn),
        "tokens": sum(one.size for one in learn),
    }
    learner = _model(target, given) if given.kind == MODEL else _draft(target, given, learn)
    with advancing("Distilling") as advance:
        report = distil(
            target,
            learner,
            *(learn, rest, plan, objective, given.output),
            states=given.states,
            note=note,
            tracker="tensorboard" if given.tensorboard else None,
            on_progress=lambda stage, share, note: advance(round(100 * share), 100, f"{stage}: {note}"),
        )
    if is_first():
        yield from _summary(given, report, learn)


def _draft(target: LoadedModel, given: Given, texts: Sequence[Text]) -> Learner:
    """Return a new draft on hidden states, or the one to start from. Raises ConfigError for one of another kind."""
    if given.start:
        draft = load_draft(given.start)
        if (found := kind_of(draft.config)) != given.kind:
            raise ConfigError(f"is of --kind {found}, not {given.kind}", param="--from", value=given.start)
        tokens = None if given.vocabulary_size is None else (texts, given.vocabulary_size)
        draft = resumed_draft(target, draft, tokens)
    else:
        shape = DraftShape(
            hidden_layers=given.hidden_layers,
            vocabulary_size=given.vocabulary_size,
            feed_forward=given.feed_forward,
            own_head=given.own_output_layer,
            layers=given.layers,
            block_size=given.block_size or BLOCK_SIZE,
            rank=given.rank,
        )
        draft = new_draft(given.kind, target, texts, shape, given.seed)
    return draft_learner(target, draft, **({"steps": given.draft_steps} if given.draft_steps else {}))


def _model(target: LoadedModel, given: Given) -> Learner:
    """Return a draft model; with --vocabulary, it learns the tokens that `model(..., vocabulary=...)` can propose."""
    weights, tokenizer = load_weights(given.draft, load_options(given, device=own_device(given.device)))
    check_vocabularies(target.tokenizer, tokenizer, (target.name, given.draft))
    tokens = None
    if given.vocabulary is not None:
        table = NgramTable.load(given.vocabulary)
        check_table(table, target)
        kept = table.draft_vocabulary(given.vocabulary_size, 1.0, target.eos_token_ids, target.model.vocab_size)
        tokens = torch.tensor(kept)
    return model_learner(target, weights, tokenizer, freeze_embeddings=not given.all_weights, token_ids=tokens)


def _texts(target: LoadedModel, given: Given) -> list[Text]:
    """Read all texts, recordings first."""
    tokenizer, size, length = target.tokenizer, target.model.vocab_size, given.sequence_length
    fingerprint = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
    out = [one for path in given.outputs for one in read_outputs(path, size, fingerprint, length)]
    if given.text:
        if tokenizer is None:
            text = "needs a tokenizer, which the model lacks; give --outputs"
            raise ConfigError(text, param="text", value=given.text)
        out += texts_of((tokenizer(piece.text).input_ids for piece in CorpusReader(list(given.text)).pieces()), length)
    return out


def _summary(given: Given, report: Fitting, learn: Sequence[Text]) -> Iterator[str]:
    folder = given.output
    lines = read_log(folder)
    best = lines[report.state.best_step]
    if not draw_curves(folder, lines):
        note("no curves.png without matplotlib: pip install 'foresay[lab]'")
    earlier = f", {report.resumed_at} of them earlier" if report.resumed_at else ""
    yield str(folder)
    yield f"  trained on {len(learn)} texts, {sum(one.size for one in learn):,} tokens of the target"
    state = report.state
    took = f"{state.tokens:,} tokens in {state.elapsed_s / 60:.1f} minutes, in batches of {state.batch_tokens:,}"
    yield f"  {state.step} steps{earlier}, {took}"
    yield (
        f"  held out: {best['tokens_per_pass']:.2f} tokens per pass, accepted {best['acceptance_1']:.2f}, "
        f"agreed {best['agreement_1']:.2f} (step {report.state.best_step})"
    )
    if "candidates" in best:
        yield f"  the target's token was among the selector's candidates at {best['candidates']:.1%} of positions"
    if given.kind != MODEL:
        ids = read_draft(folder).token_ids
        if ids is not None:
            yield f"  it drafts {len(ids):,} tokens, {coverage(learn, ids):.1%} of those that the target generated"
        name = HEAD if given.kind == HEAD else BLOCK
        yield f"  draft with it: --drafter '{name}({folder})'"
    elif given.vocabulary is None:
        yield f"  draft with it: --draft {folder}"
    else:
        cut = f"vocabulary={given.vocabulary}, vocabulary_size={given.vocabulary_size}"
        yield f"  draft with it: --drafter 'model({folder}, {cut})'"
