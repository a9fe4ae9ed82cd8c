"""`foresay check`: recorded prompts decoded again, compared with the recording and an earlier result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from foresay.checks import check_float
from foresay.cli.common import load_generator
from foresay.cli.options import (
    MODEL,
    DrafterOption,
    JsonOption,
    MachineOptions,
    MaxBatchOption,
    MethodOptions,
    ModelOptions,
)
from foresay.cli.progress import advancing
from foresay.cli.tables import show_table
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay.lab.check import compare, decoding
from foresay.lab.check.compare import Change, Check, Difference
from foresay.lab.check.result import CheckResult, Counts
from foresay.records.recording import Recording

RecordedModelOption = Annotated[
    str | None, typer.Option("--model", "-m", metavar="MODEL", help=f"{MODEL}  [default: the recording's]")
]
SaveOption = Annotated[Path | None, typer.Option(metavar="FILE", help="Write this run's tokens per pass.")]
AgainstOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Compare tokens per pass with those of a file from --save.")
]
ToleranceOption = Annotated[
    float | None,
    typer.Option(
        help=f"Accept this relative loss of tokens per pass.  [default: {compare.TOLERANCE}]", metavar="SHARE"
    ),
]


def run(
    recording: Annotated[Path, typer.Argument(help="The recording, from foresay record.")],
    *,
    model: RecordedModelOption = None,
    drafter: DrafterOption = "auto",
    methods: MethodOptions,
    batch_size: MaxBatchOption = None,
    limit: Annotated[int | None, typer.Option(help="Decode the first N prompts only.")] = None,
    save: SaveOption = None,
    against: AgainstOption = None,
    tolerance: ToleranceOption = None,
    as_json: JsonOption = False,
    machine: MachineOptions,
) -> int:
    """Check that outputs and tokens per pass did not change.

    A test for continuous integration. Exit code 1 if an output differs from the recorded one, or if tokens per pass of all
    prompts, or of a category with at least 500 tokens, fell by more than --tolerance since the file of --against. The draft
    length is constant by default, and --length throughput is refused: it depends on time.
    """
    if tolerance is not None and against is None:
        raise ConfigError(f"--tolerance {tolerance:g} is for --against, which is not given; drop it")
    allowed = check_float("tolerance", compare.TOLERANCE if tolerance is None else tolerance, 0, 1)
    _check_save(save, against)
    recorded = decoding.read_recording(recording, limit)
    was = None if against is None else CheckResult.load(against)
    decoding.check_settings(drafter, methods.length)
    generator = _loaded(recording, recorded, model, (drafter, methods, machine), batch_size)
    reason = decoding.why_not_compared(recorded, generator)
    if reason is not None and save is None and was is None:
        raise ConfigError(f"there is nothing to compare: {reason}; add --against or --save")
    if was is not None:
        compare.check_comparable(decoding.settings_of(generator, recorded), was)
    total = len(recorded.records)
    with advancing("Checking") as advance:
        advance(0, total)
        done = decoding.decode(generator, recorded, lambda count, tokens: advance(count, total, f"{tokens} tokens"))
    result = decoding.result_of(generator, recorded, done)
    found = Check(
        result,
        () if reason else compare.text_differences(recorded.records, [one.token_ids for one in done]),
        reason,
        () if was is None else compare.changes(result, was, allowed),
        compare.notes(recorded, result, was),
    )
    if save is not None:
        result.save(save)
    if as_json:
        typer.echo(json.dumps(found.as_record(), ensure_ascii=False))
    else:
        _show(found, was, generator)
    return 0 if found.passed else 1


def _check_save(save: Path | None, against: Path | None) -> None:
    """Raise ConfigError for a file that could not be written in the end, or would replace what it is compared with."""
    if save is None:
        return
    if save.is_dir():
        raise ConfigError(f"--save {str(save)!r} is a folder; name a file")
    if not save.parent.is_dir():
        raise ConfigError(f"--save {str(save)!r}: the folder {str(save.parent)!r} does not exist")
    if against is not None and save.resolve() == against.resolve():
        raise ConfigError(f"--save and --against name the same file, {str(save)!r}; name another one")


def _loaded(
    path: Path,
    recorded: Recording,
    model: str | None,
    named: tuple[str, MethodOptions, MachineOptions],
    batch_size: int | None,
) -> Generator:
    """Return the target with a drafter whose draft length does not depend on time."""
    name = model or recorded.model
    if not name:
        raise ConfigError(f"{str(path)!r} does not name the model that generated it; give --model")
    loaded = load_generator(ModelOptions(name), *named, max_batch_size=batch_size)
    decoding.check_vocabulary(recorded, loaded)
    return decoding.repeatable(loaded)


def _show(found: Check, was: CheckResult | None, generator: Generator) -> None:
    """Print the table, each failure, and the outcome in one line."""
    result = found.result
    _show_counts(found, was)
    sys.stdout.write(f"drafter {result.drafter}, length {result.length}, rule {result.rule}, model {result.model}\n")
    if found.differences:
        sys.stdout.write(f"DIFFERENT OUTPUT: {_difference(found.differences[0], generator)}\n")
    for one in found.changes:
        if one.fell or one.rose:
            title = "FEWER TOKENS PER PASS" if one.fell else "more tokens per pass"
            sys.stdout.write(f"{title}: {_title(one.category)}: {_change(one)}\n")
    if not found.passed:
        for note in found.notes:
            sys.stdout.write(f"note: {note}\n")
    sys.stdout.write(_outcome(found) + "\n")


def _show_counts(found: Check, was: CheckResult | None) -> None:
    """Print a row for each category, if there are several, and one for all prompts."""
    every: list[tuple[str | None, Counts]] = list(found.result.categories.items())
    rows = []
    for name, counts in [*(every if len(every) > 1 else []), (None, found.result.total)]:
        wrong = sum(name in (None, one.category) for one in found.differences)
        row = [_title(name), str(counts.prompts), str(counts.tokens)]
        row += [] if found.not_compared else [str(counts.prompts - wrong)]
        row += [f"{counts.tokens_per_pass:.2f}"]
        before = None if was is None else was.total if name is None else was.categories.get(name)
        if was is not None:
            row += ["-", "-"] if before is None else _before(counts, before)
        rows.append(row)
    same = [] if found.not_compared else ["same"]
    earlier = [] if was is None else ["was", "change"]
    show_table(["category", "prompts", "tokens", *same, "per pass", *earlier], rows)


def _before(counts: Counts, before: Counts) -> list[str]:
    earlier = before.tokens_per_pass
    return [f"{earlier:.2f}", _relative(counts.tokens_per_pass / earlier - 1)]


def _title(category: str | None) -> str:
    return "total" if category is None else category or "none"


def _relative(value: float) -> str:
    return f"{value:+.1%}"


def _change(one: Change) -> str:
    return f"{one.now:.2f}, was {one.was:.2f} ({_relative(one.relative)})"


def _difference(one: Difference, generator: Generator) -> str:
    """Describe the first differing token with its text."""
    recorded, decoded = (_token(token, generator) for token in (one.recorded, one.decoded))
    return f"prompt {one.id!r}, token {one.position}: recorded {recorded}, now {decoded}"


def _token(token: int | None, generator: Generator) -> str:
    if token is None:
        return "the end"
    tokenizer = generator.tokenizer
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return f"{text!r} ({token})"


def _outcome(found: Check) -> str:
    prompts = found.result.total.prompts
    texts = f"{prompts - len(found.differences)} of {prompts} are the same"
    if found.not_compared:
        texts = f"not compared ({found.not_compared})"
    total = f"{found.result.total.tokens_per_pass:.2f}" if not found.changes else _change(found.changes[0])
    return f"texts: {texts}; tokens per pass: {total}"
