"""`foresay ngram`: make n-gram tables from text, and look into them."""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from foresay.checks import check_int
from foresay.cli.options import TrustOption
from foresay.cli.progress import loading, progress_bar
from foresay.drafters.ngram_table import Corpus, NgramTable
from foresay.errors import ConfigError
from foresay.models.sources.catalog import load_tokenizer
from foresay.models.sources.load_options import LoadOptions
from foresay.text.tokenizer import own_size, tokenizer_fingerprint, tokenizer_size
from foresay.training import ngrams
from foresay.training.corpus import CorpusReader

_COVERAGES = (0.9, 0.95, 0.99)

ModelOption = Annotated[
    str | None, typer.Option(help="The model whose tokenizer to use: alias, hub id, folder or GGUF.")
]


def build(
    files: Annotated[list[str], typer.Argument(help="UTF-8 text or .jsonl, also as .gz; '-' is standard input.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The table to write, a .safetensors file.")],
    model: ModelOption = None,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer instead: hub id or folder.")] = None,
    order: Annotated[int, typer.Option(help="Longest n-gram, 2 to 5: the context's tokens and the one after it.")] = 2,
    min_count: Annotated[int, typer.Option(help="Leave out n-grams seen less often.")] = 1,
    max_entries: Annotated[
        int | None, typer.Option(help="Distinct n-grams to hold; beyond, the rarest are dropped.  [default: 10000000]")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after so many tokens.")] = None,
    separator: Annotated[
        str,
        typer.Option(help="What ends a document besides a file's or record's end: file (nothing), line, blank-line."),
    ] = "file",
    field: Annotated[
        str | None, typer.Option(help="Where JSON records have their text; '-' is JSON lines then.  [default: text]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an output that exists.")] = False,
    trust_remote_code: TrustOption = False,
) -> int:
    """Count a corpus; write the likeliest next tokens."""
    entries = ngrams.MAX_ENTRIES if max_entries is None else max_entries
    ngrams.check_counting(order, min_count, entries, max_tokens)
    reader = CorpusReader(files, separator=separator, field=field)
    _check_output(output, force=force)
    names = _tokenizer(model, tokenizer, trust_remote_code)
    columns = (BarColumn(), DownloadColumn(), TextColumn("{task.fields[speed]:,.0f} tokens/s"), TimeRemainingColumn())
    counter = ngrams.NgramCounter(order, tokenizer_size(names), min_count, entries)
    began = perf_counter()
    with progress_bar(*columns, total=reader.size, speed=0) as update:

        def show_speed(position: int, tokens: int) -> None:
            update(completed=position, speed=tokens / (perf_counter() - began))

        ngrams.count_corpus(counter, reader, names, max_tokens=max_tokens, on_progress=show_speed)
        if not counter.num_tokens:
            raise ConfigError(f"there is no text in {', '.join(files)}")
        table = counter.table(fingerprint=tokenizer_fingerprint(names), files=files)
        table.save(output)
    seconds = perf_counter() - began
    speed = f"{seconds:.1f} ({counter.num_tokens / seconds:,.0f} tokens/s)"
    _print(output, _made_from(table) | _holds(table, output) | {"seconds": speed})
    return 0


def show(
    table: Annotated[Path, typer.Argument(help="A table, or a bigram list of CS-Drafting (.json).")],
    model: ModelOption = None,
    tokenizer: Annotated[str | None, typer.Option(help="A tokenizer instead: hub id or folder.")] = None,
    top: Annotated[int, typer.Option(help="How many of the most frequent tokens to list.")] = 10,
    trust_remote_code: TrustOption = False,
) -> int:
    """Say what a table holds; with --model, in words."""
    check_int("top", top, 0)
    loaded = NgramTable.load(table)
    names = None
    if model is not None or tokenizer is not None:
        names = _tokenizer(model, tokenizer, trust_remote_code)
        loaded.check(tokenizer_fingerprint(names), tokenizer_size(names), own_size(names))
    mark = "no fingerprint" if loaded.fingerprint is None else f"fingerprint {loaded.fingerprint[:12]}"
    lines = {"order": str(loaded.order), "vocabulary": f"{loaded.vocab_size:,} tokens, {mark}"}
    _print(table, lines | _made_from(loaded) | _holds(loaded, table) | _frequent(loaded, top, names))
    return 0


def _tokenizer(model: str | None, tokenizer: str | None, trust_remote_code: bool) -> Any:
    if model is not None and tokenizer is not None:
        raise ConfigError("--model and --tokenizer both name a tokenizer; give one of them")
    name = model if model is not None else tokenizer
    if name is None:
        raise ConfigError("a table is for one tokenizer: name it with --model, or with --tokenizer")
    with loading(f"Loading the tokenizer of {name}") as progress:
        return load_tokenizer(name, LoadOptions(trust_remote_code=trust_remote_code, progress=progress))


def _check_output(output: Path, *, force: bool) -> None:
    """Refuse now what could not be written after an hour of counting."""
    if output.suffix != ".safetensors":
        raise ConfigError(f"--output {str(output)!r} must end in .safetensors")
    if output.is_dir():
        raise ConfigError(f"--output {str(output)!r} is a folder")
    if output.exists() and not force:
        raise ConfigError(f"{str(output)!r} exists; add --force to replace it")
    if not output.parent.is_dir():
        raise ConfigError(f"--output {str(output)!r}: there is no folder {str(output.parent)!r}")
    if not os.access(output.parent, os.W_OK):
        raise ConfigError(f"--output {str(output)!r}: the folder {str(output.parent)!r} is not writable")


def _print(path: Path, lines: dict[str, str]) -> None:
    typer.echo(path)
    for name, value in lines.items():
        typer.echo(f"  {name}: {value}")


def _made_from(table: NgramTable) -> dict[str, str]:
    """The corpus of a table."""
    corpus = table.corpus
    if corpus is None:
        return {"corpus": "not known"}
    lines = {
        "corpus": ", ".join(corpus.files) or "not named",
        "tokens": f"{corpus.num_tokens:,} in {corpus.num_documents:,} documents",
        "distinct n-grams": _by_length(corpus.num_ngrams, 2)
        + (f"; left out when seen less than {corpus.min_count} times" if corpus.min_count > 1 else ""),
    }
    return lines | _pruned(corpus)


def _pruned(corpus: Corpus) -> dict[str, str]:
    if not corpus.num_pruned:
        return {}
    return {
        "pruned": f"{corpus.num_pruned:,} n-grams, seen up to {corpus.pruned_count} times when they were dropped for want of "
        "room (--max-entries)"
    }


def _holds(table: NgramTable, path: Path) -> dict[str, str]:
    return {"contexts": _by_length(table.num_contexts, 1), "size": f"{path.stat().st_size / 1e6:,.2f} MB"}


def _by_length(numbers: tuple[int, ...], first: int) -> str:
    counted = [f"{number:,} of {length}" for length, number in enumerate(numbers, first)]
    return ", ".join(counted) + (" token" if first == len(numbers) == 1 else " tokens")


def _frequent(table: NgramTable, top: int, names: Any) -> dict[str, str]:
    """Which tokens are the most frequent, and how many cover most of the corpus."""
    if table.counts is None or not table.counts.any():
        return {"token counts": "none"}
    shares = [f"{100 * share:.0f}% by {len(table.frequent(coverage=share)):,}" for share in _COVERAGES]
    lines = {"coverage": f"{', '.join(shares)} tokens"}
    if top:
        counts = table.counts
        ids = sorted(table.frequent(min(top, table.vocab_size)).tolist(), key=lambda i: (-counts[i], i))
        words = [f"{i if names is None else repr(names.decode([i]))} {counts[i]:,}" for i in ids if counts[i]]
        lines["most frequent"] = ", ".join(words)
    return lines
