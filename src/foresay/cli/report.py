"""`foresay report`: a report of benchmark results."""

from __future__ import annotations

from pathlib import Path

import click

from foresay.cli.command import Given, argument, command, option
from foresay.lab.report.report import read_report, write


@command(
    argument("RESULTS...", "Results of foresay bench; several are merged.", Path),
    option("-o --output FOLDER", "The folder to write to.", "report"),
    option("--title TEXT", "Title of the report."),
    examples="foresay report results.jsonl -o report",
)
def run(given: Given) -> int:
    """Write a report of benchmark results.

    The folder gets report.html, report.md and the figures.
    """
    report = read_report(given.results, title=given.title)
    for line in (*write(report, given.output), *report.summary):
        click.echo(line)
    return 0
