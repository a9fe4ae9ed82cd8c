"""`foresay report`: a report of benchmark results."""

from __future__ import annotations

import click

from foresay.cli.command import Given
from foresay_lab.report.report import read_report, write


def run(given: Given) -> int:
    """Run the command."""
    report = read_report(given.results, title=given.title)
    for line in (write(report, given.output), *report.summary):
        click.echo(line)
    return 0
