"""`foresay compare`: decode one prompt without speculation and with each method."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from foresay.checks import check_int
from foresay.cli.colours import console
from foresay.cli.common import load_generator, model_expression, read_prompt
from foresay.cli.console import table
from foresay.cli.options import (
    DraftersOption,
    FileOption,
    JsonOption,
    MachineOptions,
    MethodOptions,
    ModelOptions,
    PromptArgument,
    RawOption,
    SamplingOptions,
)
from foresay.cli.progress import loading
from foresay.decoding.acceptance import RULES
from foresay.errors import ConfigError
from foresay.generation.method import Method
from foresay.generation.method import methods as every
from foresay.lab.data.items import PromptItem
from foresay.lab.tune import DRAFTERS
from foresay.spec.expressions import parse, to_expression


def run(
    prompt: PromptArgument = None,
    file: FileOption = None,
    *,
    models: ModelOptions,
    drafter: DraftersOption = None,
    methods: MethodOptions,
    repeats: Annotated[int, typer.Option(help="Runs of each method, in turns; the median is shown.")] = 1,
    sampling: SamplingOptions,
    raw: RawOption = False,
    as_json: JsonOption = False,
    machine: MachineOptions,
) -> int:
    """Decode one prompt with each method, side by side.

    Exit code 1 if a method's output differs from plain decoding's under an exact rule, or if every method failed.
    """
    params = sampling.params()
    check_int("repeats", repeats, 1, 1000)
    named = _methods(drafter or [], models, methods)
    text = read_prompt(prompt, file)
    plain = MethodOptions(rule=methods.rule)
    generator = load_generator(ModelOptions(models.model), "none", plain, machine, later=named)
    with loading("Preparing the drafters") as progress:
        rows = table.compare(generator, PromptItem("", text, raw=raw), named, models.draft, params, repeats, progress)
    if as_json:
        rule = {"rule": to_expression(generator.rule, RULES), "exact": generator.rule.exact}
        head = {"model": generator.target.name, **rule, "repeats": repeats}
        typer.echo(json.dumps(head | {"methods": list(map(table.record, rows))}, ensure_ascii=False))
    else:
        out = console()
        out.print(table.table(rows, out), soft_wrap=not out.is_terminal)
        for line in table.differences(rows, generator.tokenizer):
            typer.echo(line)
    return 1 if table.broken(rows) or not any(row.runs for row in rows[1:]) else 0


def _methods(named: list[str], models: ModelOptions, options: MethodOptions) -> list[Method]:
    """Return the methods to compare, each once. Raises ConfigError for a wrong expression, before anything is loaded."""
    number, length = options.num_draft_tokens, options.length
    if number is not None and length is not None:
        raise ConfigError(f"--num-draft-tokens {number} and --length {length} contradict; drop one")
    if "none" in named:
        raise ConfigError("--drafter none is plain decoding, which is always compared; drop it")
    draft = [] if models.draft is None else [model_expression(models.draft)]
    names = [str(parse(name)) for name in (*DRAFTERS, *named, *draft) if name != "auto"]  # auto is one of the others
    lengths = [str(one) for one in (number, length) if one is not None]
    return every(names, lengths, options.rule_name)
