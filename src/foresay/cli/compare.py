"""`foresay compare`: one prompt, decoded plainly and with each method."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from foresay.checks import check_int
from foresay.cli.colours import console
from foresay.cli.common import as_prompt, fresh_seed, load_generator, model_expression, read_prompt
from foresay.cli.console import table
from foresay.cli.console.table import DEFAULT_METHODS
from foresay.cli.options import (
    DraftersOption,
    FileOption,
    MachineOptions,
    MethodOptions,
    ModelOptions,
    PromptArgument,
    RawOption,
    SamplingOptions,
)
from foresay.cli.progress import loading
from foresay.decoding.acceptance import RULES
from foresay.methods.expressions import parse, written
from foresay.methods.recipes import read_drafter, read_length, read_rule


def run(
    prompt: PromptArgument = None,
    file: FileOption = None,
    *,
    models: ModelOptions,
    drafter: DraftersOption = None,
    methods: MethodOptions,
    repeats: Annotated[int, typer.Option(help="Runs of each method, taking turns; the median counts.")] = 1,
    sampling: SamplingOptions,
    raw: RawOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of the table.")] = False,
    machine: MachineOptions,
) -> int:
    """Decode one prompt with each method, and set them side by side."""
    params = sampling.params()
    check_int("--repeats", repeats, 1, 1000)
    names = _methods(drafter or [], models, methods)
    text = read_prompt(prompt, file)
    plainly = MethodOptions(rule=methods.rule)
    generator = load_generator(ModelOptions(models.model), "none", plainly, machine)

    params = table.seeded(params, fresh_seed)
    settings: dict[str, Any] = {"num_draft_tokens": methods.num_draft_tokens, "length": methods.length}
    with loading("Preparing the drafters") as progress:
        request = as_prompt(text, generator, raw=raw)
        rows = table.plain_and(generator, request, [(name, settings) for name in names])
        if models.draft is not None:
            rows.insert(1, table.alone(generator, models.draft, lambda own: as_prompt(text, own, raw=raw)))
        table.measure(rows, params, repeats, progress)
    if as_json:
        rule = {"rule": written(generator.rule, RULES), "exact": generator.rule.exact}
        head = {"model": generator.target.name, **rule, "repeats": repeats}
        typer.echo(json.dumps(head | {"methods": table.records(rows, params)}, ensure_ascii=False))
    else:
        out = console()
        out.print(table.table(rows, params, out), soft_wrap=not out.is_terminal)
        for line in table.differences(rows, params, generator.tokenizer):
            typer.echo(line)
    return 1 if table.broken(rows, params) else 0


def _methods(named: list[str], models: ModelOptions, methods: MethodOptions) -> list[str]:
    """The drafters to compare, each once; a wrong expression raises before anything is loaded."""
    read_rule(methods.rule_name)
    if methods.length is not None:
        read_length(methods.length)
    draft = [] if models.draft is None else [model_expression(models.draft)]
    names: list[str] = []
    for name in (*DEFAULT_METHODS, *named, *draft):
        if name != "auto":
            read_drafter(name)
        if parse(name) not in map(parse, names):
            names.append(name)
    return names
