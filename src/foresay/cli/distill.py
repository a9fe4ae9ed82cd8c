"""`foresay distill FOLDER`: train a draft head, block drafter or draft model on a target's own outputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import typer
from accelerate.utils import is_tensorboard_available

from foresay.checks import check_float, check_int
from foresay.cli.common import target_name, use_threads
from foresay.cli.options import DeviceOption, DtypeOption, TargetOption, ThreadsOption, TrustOption
from foresay.cli.progress import advancing, loading
from foresay.drafters.ngram_table import NgramTable
from foresay.errors import ConfigError, UnknownNameError
from foresay.models.drafts.fields import MAX_BLOCK
from foresay.models.drafts.files import read_draft
from foresay.models.sources.drafts import load_draft
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_model, load_weights
from foresay.models.sources.wrapping import LoadedModel
from foresay.spec.recipe import check_table
from foresay.text.tokenizer import check_vocabularies, tokenizer_fingerprint
from foresay.training.corpus import CorpusReader
from foresay.training.curves import draw_curves, read_log
from foresay.training.distil import BLOCK_SIZE, KINDS, NOTE, DraftShape, distil, distil_model, new_draft, resumed_draft
from foresay.training.fitting import CHECKPOINT, LOG, Plan, Report
from foresay.training.losses import Objective
from foresay.training.outputs import Text, coverage, read_outputs, split, texts_of
from foresay.training.processes import is_first, own_device

HEAD, BLOCK = "head", "block"


@dataclass(frozen=True, slots=True)
class TextOptions:
    """Training data."""

    PANEL: ClassVar[str] = "Data"
    outputs: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="A recording of the target (foresay record); may be repeated."),
    ] = None
    text: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Text or .jsonl to learn the target's distributions on; may be repeated."),
    ] = None
    sequence_length: Annotated[int, typer.Option(help="Tokens of a text at most; longer ones are split.")] = 512
    held_out: Annotated[float, typer.Option(help="Fraction of the texts that is held out for evaluation.")] = 0.03

    def check(self) -> None:
        """Raise ConfigError for values out of range, and if there is no training data."""
        if not self.outputs and not self.text:
            raise ConfigError("no training data: give --outputs, recordings of the target (foresay record), or --text")
        check_int("sequence_length", self.sequence_length, 2)
        check_float("held_out", self.held_out, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class StudentOptions:
    """The draft that is trained, and its loss."""

    PANEL: ClassVar[str] = "Draft"
    kind: Annotated[str, typer.Option(metavar="KIND", help="head, a draft head; or block, a block drafter.")] = HEAD
    draft: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Train a smaller model of the same vocabulary instead, by name."),
    ] = None
    start: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="NAME",
            help="Start from this head or block drafter (folder, hub id or alias), on a new schedule.",
        ),
    ] = None
    loss: Annotated[
        str | None,
        typer.Option(
            metavar="LOSS",
            help="forward_kl, reverse_kl, tv, ce (block drafters), or a mixture such as forward_kl=0.5,tv=0.5.  "
            "[default: forward_kl; for a block drafter ce=0.1,tv=1.8]",
        ),
    ] = None
    draft_steps: Annotated[
        int | None, typer.Option(help="Tokens that a head drafts in a row in training.  [default: 5]")
    ] = None
    decay: Annotated[
        float | None,
        typer.Option(help="Weight of each draft token, relative to the one before.  [default: 0.8; block 0.7788]"),
    ] = None
    hidden_layers: Annotated[
        str | None,
        typer.Option(metavar="N,N,N", help="Layers of the target whose hidden states are read, such as 2,15,27."),
    ] = None
    vocabulary_size: Annotated[
        int | None,
        typer.Option(
            help="Number of tokens that a head, a block drafter, or a draft model with --vocabulary can propose."
        ),
    ] = None
    vocabulary: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Restrict a draft model to the most frequent tokens of this table (ngram build)."
        ),
    ] = None
    feed_forward: Annotated[int | None, typer.Option(help="Feed-forward neurons of a head or a block drafter.")] = None
    layers: Annotated[
        int | None, typer.Option(help="Layers of a block drafter.  [default: one for every 15 of the target]")
    ] = None
    block_size: Annotated[
        int | None, typer.Option(help="Tokens that a block drafter drafts in one pass.  [default: 7]")
    ] = None
    markov_rank: Annotated[
        int | None,
        typer.Option(help="Rank of a block drafter's Markov head, 0 for none.  [default: a ninth of the width]"),
    ] = None
    anchors: Annotated[
        int | None,
        typer.Option(help="Blocks of each text that a training step of a block drafter takes.  [default: 64]"),
    ] = None
    own_head: Annotated[
        bool, typer.Option("--own-output-layer", help="Train an output layer for a head, not only its decoder layer.")
    ] = False
    all_weights: Annotated[
        bool, typer.Option("--all-weights", help="Also train a draft model's embeddings and output layer.")
    ] = False

    def check(self) -> None:
        """Raise ConfigError for values out of range, and for options that contradict."""
        if self.kind not in KINDS:
            raise UnknownNameError("kind", self.kind, KINDS)
        for name, (least, most) in _BOUNDS.items():
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), least, most)
        self._check_kind()
        if self.start and self.draft is not None:
            raise ConfigError(
                "--from starts from a head or block drafter; to start from a draft model, name it with --draft"
            )
        size = self.vocabulary_size if self.kind == HEAD else None  # which a head's own weights do not depend on
        if self.start and self.shape() != DraftShape(vocabulary_size=size):
            raise ConfigError(
                "--from sets the shape; drop --hidden-layers, --feed-forward, --own-output-layer, --layers, --block-size and "
                "--markov-rank, and --vocabulary-size for a block drafter"
            )
        if self.vocabulary is not None and (self.draft is None or self.vocabulary_size is None):
            raise ConfigError(
                "--vocabulary needs --draft MODEL and --vocabulary-size; a head takes its tokens from the texts"
            )
        if self.vocabulary is None and self.vocabulary_size is not None and self.draft is not None:
            raise ConfigError("--vocabulary-size with --draft needs --vocabulary, a table (foresay ngram build)")

    def _check_kind(self) -> None:
        """Raise ConfigError for an option of another kind of draft."""
        if self.draft is not None and self.kind != HEAD:
            raise ConfigError("--draft trains a model; leave out --kind")
        of_blocks = ("layers", "block_size", "markov_rank", "anchors")
        wrong = ("draft_steps", "own_head") if self.kind == BLOCK else of_blocks
        for name in wrong:
            if getattr(self, name):
                option = "own-output-layer" if name == "own_head" else name.replace("_", "-")
                other = HEAD if self.kind == BLOCK else BLOCK
                raise ConfigError(f"--{option} applies to --kind {other}; drop it")

    def shape(self) -> DraftShape:
        """Shape of a new draft on hidden states."""
        return DraftShape(
            own_head=self.own_head,
            hidden_layers=_layers(self.hidden_layers),
            vocabulary_size=self.vocabulary_size,
            feed_forward=self.feed_forward,
            layers=self.layers,
            block_size=self.block_size or BLOCK_SIZE,
            markov_rank=self.markov_rank,
        )

    def objective(self) -> Objective:
        """The loss. Raises ConfigError for an unknown one."""
        return Objective.parse(self.loss or KINDS[self.kind].loss)


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Schedule and optimiser."""

    PANEL: ClassVar[str] = "Training"
    epochs: Annotated[float, typer.Option(help="Passes over the texts.")] = 1.0
    minutes: Annotated[float | None, typer.Option(help="End after X minutes, earlier runs included.")] = None
    learning_rate: Annotated[float, typer.Option(help="Learning rate.")] = 1e-3
    optimiser: Annotated[str, typer.Option(metavar="NAME", help="muon or adamw.")] = "muon"
    batch_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens of a batch.  [default: 4096, or fewer so that --minutes allows 50 steps]"),
    ] = None
    accumulate: Annotated[int, typer.Option(help="Batches whose gradients make one training step.")] = 1
    evaluate_minutes: Annotated[float, typer.Option(help="Minutes between evaluations.")] = 5.0
    precision: Annotated[str, typer.Option(metavar="DTYPE", help="Train in fp32 or bf16.")] = "fp32"
    seed: Annotated[int, typer.Option(help="Seed of initial weights and order of texts.")] = 0

    def plan(self) -> Plan:
        """Return the plan. Raises ConfigError for values out of range."""
        given = asdict(self)
        return Plan(rate=given.pop("learning_rate"), **given)


def run(
    folder: Annotated[Path, typer.Argument(help="The folder to write; an interrupted run in it is continued.")],
    *,
    model: TargetOption = None,
    student: StudentOptions,
    texts: TextOptions,
    plans: PlanOptions,
    states: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Cache the target's hidden states here, computed once.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log for TensorBoard.")] = False,
    dtype: DtypeOption = "auto",
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    trust_remote_code: TrustOption = False,
) -> int:
    """Train a draft head, block drafter or draft model.

    A draft head reads the target's hidden states and drafts token by token (EAGLE-3), a block drafter reads them and drafts a
    block in one pass (DSpark), and a draft model is a smaller model of the same vocabulary. The folder always contains the best
    draft so far. A later run continues where the last one ended.
    """
    student.check()
    plan, objective = plans.plan(), student.objective()
    if tensorboard and not is_tensorboard_available():  # accelerate would log nothing, without a word
        raise ConfigError("--tensorboard needs tensorboard: pip install 'foresay[train]'")
    texts.check()
    _check_folder(folder)
    use_threads(threads)
    options = LoadOptions(dtype=dtype, device=own_device(device), trust_remote_code=trust_remote_code)
    with loading("Loading") if is_first() else nullcontext():
        target = load_model(target_name(model), options)
    learn, rest = split(_texts(target, texts), texts.held_out)
    train = _train_model if student.draft is not None else _train_draft
    with _progress() as on_progress:
        report = train(
            (target, student, options),
            (learn, rest, plan, objective, folder),
            states=states,
            note=_note(student, texts, learn),
            tracker="tensorboard" if tensorboard else None,
            on_progress=on_progress,
        )
    if is_first():
        for line in _summary(folder, report, learn, student):
            typer.echo(line)
    return 0


_BOUNDS = {
    "draft_steps": (1, 64),
    "layers": (1, 256),
    "block_size": (2, MAX_BLOCK),
    "markov_rank": (0, 1 << 16),
    "anchors": (1, 1 << 20),
}
"""Allowed values of some options."""
Named = tuple[LoadedModel, StudentOptions, LoadOptions]
"""A target, the draft that learns from it, and the options for loading that."""


def _train_draft(named: Named, given: tuple[Any, ...], **more: Any) -> Report:
    target, student, _ = named
    if student.start:
        tokens = None if student.vocabulary_size is None else (given[0], student.vocabulary_size)
        draft = resumed_draft(target, load_draft(student.start, kind=student.kind), tokens)  # type: ignore[arg-type]
    else:
        draft = new_draft(student.kind, target, given[0], student.shape(), given[2].seed)
    own = {"decay": student.decay, "steps": student.draft_steps, "anchors": student.anchors}
    more |= {name: value for name, value in own.items() if value is not None}
    return distil(target, draft, *given, **more)


def _train_model(named: Named, given: tuple[Any, ...], **more: Any) -> Report:
    target, student, options = named
    assert student.draft is not None
    weights, tokenizer = load_weights(student.draft, options)
    check_vocabularies(target.tokenizer, tokenizer, (target.name, student.draft))
    tokens = None if student.vocabulary is None else _kept_tokens(target, student.vocabulary, student.vocabulary_size)
    frozen = not student.all_weights
    return distil_model(target, weights, tokenizer, *given, freeze_embeddings=frozen, token_ids=tokens, **more)


def _kept_tokens(target: LoadedModel, path: Path, size: int | None) -> torch.Tensor:
    """The tokens that `model(..., vocabulary=path, vocabulary_size=size)` can propose."""
    table = NgramTable.load(path)
    check_table(table, target)
    return torch.tensor(table.draft_vocabulary(size, 1.0, target.eos_token_ids, target.model.vocab_size))


def _note(student: StudentOptions, texts: TextOptions, learn: Sequence[Text]) -> dict[str, Any]:
    """Provenance of a draft, for its folder."""
    tokens = sum(one.size for one in learn)
    return {"from": student.start, "outputs": texts.outputs, "text": texts.text, "texts": len(learn), "tokens": tokens}


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    try:
        return tuple(int(one) for one in text.split(","))
    except ValueError:
        raise ConfigError(f"--hidden-layers {text!r} must be numbers of layers, such as 2,15,27") from None


def _texts(target: LoadedModel, options: TextOptions) -> list[Text]:
    """Read all texts, recordings first."""
    tokenizer, size, length = target.tokenizer, target.model.vocab_size, options.sequence_length
    fingerprint = None if tokenizer is None else tokenizer_fingerprint(tokenizer)
    out = [one for path in options.outputs or () for one in read_outputs(path, size, fingerprint, length)]
    if options.text:
        if tokenizer is None:
            raise ConfigError("the model has no tokenizer, so --text cannot be read; give --outputs")
        out += texts_of((tokenizer(piece.text).input_ids for piece in CorpusReader(options.text).pieces()), length)
    return out


def _check_folder(folder: Path) -> None:
    if folder.is_file():
        raise ConfigError(f"{str(folder)!r} is a file; name a folder")
    ours = any((folder / name).exists() for name in (NOTE, LOG, CHECKPOINT))
    if folder.is_dir() and any(folder.iterdir()) and not ours:
        raise ConfigError(f"the folder {str(folder)!r} contains something else, and is not changed; name another")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make the folder {str(folder)!r}: {error.strerror}") from None


@contextmanager
def _progress() -> Iterator[Callable[[str, float, str], None]]:
    """Show a progress bar for each stage."""
    with advancing("Distilling") as advance:
        yield lambda stage, share, note: advance(round(100 * share), 100, f"{stage}: {note}")


def _summary(folder: Path, report: Report, learn: Sequence[Text], student: StudentOptions) -> Iterator[str]:
    lines = read_log(folder)
    best = lines[report.state.best_step]
    if not draw_curves(folder, lines):
        typer.echo("no curves.png without matplotlib: pip install 'foresay[lab]'", err=True)
    kind = json.loads((folder / NOTE).read_text(encoding="utf-8"))["kind"]
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
    if kind in KINDS:
        ids = read_draft(folder).token_ids
        if ids is not None:
            yield f"  it drafts {len(ids):,} tokens, {coverage(learn, ids):.1%} of those that the target generated"
        yield f"  draft with it: --drafter '{kind}({folder})'"
    elif student.vocabulary is None:
        yield f"  draft with it: --draft {folder}"
    else:
        cut = f"vocabulary={student.vocabulary}, vocabulary_size={student.vocabulary_size}"
        yield f"  draft with it: --drafter 'model({folder}, {cut})'"
