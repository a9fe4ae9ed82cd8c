"""`foresay check`: recorded prompts decoded again, compared with the recording and an earlier result."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from foresay.checks import check_float
from foresay.cli.command import Given
from foresay.cli.common import check_output, load_generator
from foresay.cli.progress import advancing
from foresay.cli.tables import show_table
from foresay.errors import ConfigError
from foresay.generation.generator import Generator
from foresay_lab.check import compare, decoding
from foresay_lab.check.compare import Change, Check, CheckResult, Counts


def run(given: Given) -> int:
    """Run the command."""
    if given.tolerance is not None and given.against is None:
        raise ConfigError("is for --against, which is not given; drop it", param="tolerance", value=given.tolerance)
    allowed = check_float("tolerance", compare.TOLERANCE if given.tolerance is None else given.tolerance, 0, 1)
    if given.save is not None:  # what could not be written in the end
        check_output(given.save, force=True, name="save")
        if given.against is not None and given.save.resolve() == given.against.resolve():
            raise ConfigError("is the file of --against, too; name another one", param="save", value=given.save)
    recorded = decoding.read_recording(given.recording, given.limit)
    was = None if given.against is None else CheckResult.load(given.against)
    decoding.check_settings(given.drafter, given.length)
    given.model = given.model or recorded.model
    if not given.model:
        raise ConfigError("does not name its model; give --model", param="recording", value=given.recording)
    loaded = load_generator(given, max_batch_size=given.batch_size)
    decoding.check_vocabulary(recorded, loaded)
    generator = decoding.repeatable(loaded)
    reason = decoding.why_not_compared(recorded, generator)
    if reason is not None and given.save is None and was is None:
        text = f"cannot be compared: {reason}; add --against, --save"
        raise ConfigError(text, param="recording", value=given.recording)
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
    if given.save is not None:
        result.save(given.save)
    if given.json:
        click.echo(json.dumps(found.as_record(), ensure_ascii=False))
    else:
        _show_counts(found, was)
        for line in _outcome(found, generator):
            click.echo(line)
    return 0 if found.passed else 1


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
            now, earlier = counts.tokens_per_pass, before and before.tokens_per_pass
            row += [f"{earlier:.2f}", f"{now / earlier - 1:+.1%}"] if earlier else ["-", "-"]
        rows.append(row)
    same = [] if found.not_compared else ["same"]
    last = [] if was is None else ["was", "change"]
    show_table(["category", "prompts", "tokens", *same, "per pass", *last], rows)


def _title(category: str | None) -> str:
    return "total" if category is None else category or "none"


def _change(one: Change) -> str:
    return f"{one.now:.2f}, was {one.was:.2f} ({one.relative:+.1%})"


def _token(token: int | None, generator: Generator) -> str:
    if token is None:
        return "the end"
    tokenizer = generator.tokenizer
    if tokenizer is None:
        return str(token)
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return f"{text!r} ({token})"


def _outcome(found: Check, generator: Generator) -> Iterator[str]:
    """Lines about the settings, each failure, and the whole."""
    result = found.result
    yield f"drafter {result.drafter}, length {result.length}, rule {result.rule}, model {result.model}"
    for one in found.differences[:1]:
        recorded, decoded = (_token(token, generator) for token in (one.recorded, one.decoded))
        yield f"DIFFERENT OUTPUT: prompt {one.id!r}, token {one.position}: recorded {recorded}, now {decoded}"
    for change in found.changes:
        if change.fell or change.rose:
            title = "FEWER TOKENS PER PASS" if change.fell else "more tokens per pass"
            yield f"{title}: {_title(change.category)}: {_change(change)}"
    yield from (f"note: {note}" for note in found.notes if not found.passed)
    prompts = result.total.prompts
    texts = f"{prompts - len(found.differences)} of {prompts} are the same"
    texts = f"not compared ({found.not_compared})" if found.not_compared else texts
    total = f"{result.total.tokens_per_pass:.2f}" if not found.changes else _change(found.changes[0])
    yield f"texts: {texts}; tokens per pass: {total}"
