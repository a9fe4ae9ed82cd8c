"""`foresay memory`: the texts that a server keeps with --memory, and merging them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from foresay.drafters import Memory
from foresay.errors import ConfigError

FolderArgument = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a memory.")]


def show(folder: FolderArgument) -> int:
    """Show how much a memory has kept."""
    memory = _opened(folder)
    owners = [store for _, store in memory.owners()]
    tokens = sum(store.size for store in owners)
    texts = sum(1 for store in owners for _ in store.texts())
    typer.echo(f"{folder}: {texts:,} texts of {len(owners)} owners, {tokens:,} tokens, {8 * tokens / 1e6:.1f} MB")
    memory.close()
    return 0


def merge(
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="Memory to add to; created if it is missing.")],
    inputs: Annotated[list[Path], typer.Argument(metavar="DIR...", help="Memories to add.")],
) -> int:
    """Add the texts of memories to another one, by owner.

    Texts that it has already are left out.
    """
    if output.resolve() in {one.resolve() for one in inputs}:
        raise ConfigError(f"{str(output)!r} is the output and an input; name another output")
    sources = [_opened(one) for one in inputs]
    names = {one.fingerprint for one in sources}
    if len(names) > 1:
        raise ConfigError("the memories have texts of different vocabularies, so they cannot be merged")
    target = Memory(output, fingerprint=names.pop())
    if not target.writes:
        raise ConfigError(f"another process writes to {str(output)!r}; stop it first")
    for one in sources:
        typer.echo(f"{one.folder}: added {target.merge(one):,} texts")
        one.close()
    target.close()
    return 0


def _opened(folder: Path) -> Memory:
    if not (folder / "memory.json").is_file():
        raise ConfigError(
            f"{str(folder)!r} is no memory: it has no memory.json; `foresay serve --memory DIR` makes one"
        )
    return Memory(folder, reads_only=True)
