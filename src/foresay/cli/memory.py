"""`foresay memory`: the texts that a server keeps with --memory, and merging them."""

from __future__ import annotations

from pathlib import Path

import click

from foresay.cli.command import Given
from foresay.drafters import Memory
from foresay.errors import ConfigError


def run(given: Given) -> int:
    """Run the command."""
    if given.add:
        _merge(given.dir, given.add)
    memory = _opened(given.dir)
    owners = memory.owners()
    texts = sum(map(len, owners.values()))
    size = f"{memory.size:,} tokens, {memory.num_bytes / 1e6:.1f} MB"
    click.echo(f"{given.dir}: {texts:,} texts of {len(owners)} owners, {size}")
    memory.close()
    return 0


def _merge(output: Path, inputs: tuple[Path, ...]) -> None:
    if output.resolve() in {one.resolve() for one in inputs}:
        raise ConfigError("is the output and an input; name another output", param="output", value=output)
    sources = [_opened(one) for one in inputs]
    names = {one.fingerprint for one in sources}
    if len(names) > 1:
        raise ConfigError("have texts of different vocabularies, and cannot be merged", param="inputs", value=inputs)
    target = Memory(output, fingerprint=names.pop())
    if not target.writes:
        raise ConfigError("can only be read; name another output", param="output", value=output)
    for one in sources:
        click.echo(f"{one.folder}: added {target.merge(one):,} texts")
        one.close()
    target.close()


def _opened(folder: Path) -> Memory:
    if not (folder / "memory.db").is_file():
        raise ConfigError("has no memory.db; `foresay serve --memory DIR` makes one", param="folder", value=folder)
    return Memory(folder, reads_only=True)
