"""`foresay report`: a report of benchmark results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foresay.lab.report.report import read_report, write


def run(
    results: Annotated[list[Path], typer.Argument(help="Results of foresay bench; several are merged.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="The folder to write to.")] = Path(
        "report"
    ),
    title: Annotated[str | None, typer.Option(help="Title of the report.")] = None,
) -> int:
    """Write a report of benchmark results.

    The folder gets report.html, report.md and the figures.
    """
    report = read_report(results, title=title)
    for path in write(report, output):
        typer.echo(path)
    for line in report.summary:
        typer.echo(line)
    return 0
