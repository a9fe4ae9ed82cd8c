"""`foresay ngram`: make n-gram tables from text, and inspect them."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

from foresay.checks import check_int
from foresay.cli.common import check_output
from foresay.cli.options import ForceOption, TrustOption
from foresay.cli.progress import loading, progress_bar
from foresay.drafters.ngram_table import Corpus, NgramTable
from foresay.errors import ConfigError
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.loading import load_tokenizer
from foresay.text.tokenizer import own_size, tokenizer_fingerprint, tokenizer_size
from foresay.training import ngrams
from foresay.training.corpus import CorpusReader

_COVERAGES = (0.9, 0.95, 0.99)

TokenizerOption = Annotated[
    str | None, typer.Option(metavar="NAME", help="A tokenizer in place of a model: hub id or folder.")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model", "-m", metavar="MODEL", help="Model whose tokenizer is used: alias, hub id, folder or GGUF file."
    ),
]


def build(
    files: Annotated[list[str], typer.Argument(help="UTF-8 text or .jsonl files, also .gz; '-' is standard input.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="The table to write, a .safetensors file.")
    ],
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    order: Annotated[int, typer.Option(help="Longest n-gram, 2 to 5: the context's tokens and the one after it.")] = 2,
    min_count: Annotated[int, typer.Option(help="Drop n-grams that occur less often.")] = 1,
    max_entries: Annotated[
        int | None,
        typer.Option(help="Distinct n-grams in memory; beyond, the rarest are dropped.  [default: 10000000]"),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Stop after N tokens.")] = None,
    separator: Annotated[
        str,
        typer.Option(
            metavar="WHAT", help="End of a document: file (of a file or record only), also line, or blank-line."
        ),
    ] = "file",
    field: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Field of JSON records that has the text; '-' is then JSON lines.  [default: text]"
        ),
    ] = None,
    force: ForceOption = False,
    trust_remote_code: TrustOption = False,
) -> int:
    """Count the n-grams of text files; write a table.

    The table contains the most frequent next token of each context, for --drafter 'max_gram(table=FILE)'.
    """
    entries = ngrams.MAX_ENTRIES if max_entries is None else max_entries
    ngrams.check_counting(order, min_count, entries, max_tokens)
    reader = CorpusReader(files, separator=separator, field=field)
    if output.suffix != ".safetensors":
        raise ConfigError(f"--output {str(output)!r} must end in .safetensors")
    check_output(output, force=force)
    names = _tokenizer(model, tokenizer, trust_remote_code)
    columns = (BarColumn(), DownloadColumn(), TextColumn("{task.fields[speed]:,.0f} tokens/s"), TimeRemainingColumn())
    counter = ngrams.NgramCounter(order, tokenizer_size(names), min_count, entries)
    began = perf_counter()
    with progress_bar(*columns, total=reader.size, speed=0) as update:

        def show_speed(position: int, tokens: int) -> None:
            update(completed=position, speed=tokens / (perf_counter() - began))

        ngrams.count_corpus(counter, reader, names, max_tokens=max_tokens, on_progress=show_speed)
        if not counter.num_tokens:
            raise ConfigError(f"no text in {', '.join(files)}")
        table = counter.table(fingerprint=tokenizer_fingerprint(names), files=files)
        table.save(output)
    seconds = perf_counter() - began
    speed = f"{seconds:.1f} ({counter.num_tokens / seconds:,.0f} tokens/s)"
    _print(output, _made_from(table) | _contents(table, output) | {"seconds": speed})
    return 0


def show(
    table: Annotated[Path, typer.Argument(help="A table, or a bigram list of CS-Drafting (.json).")],
    model: ModelOption = None,
    tokenizer: TokenizerOption = None,
    top: Annotated[int, typer.Option(help="List the N most frequent tokens.")] = 10,
    trust_remote_code: TrustOption = False,
) -> int:
    """Describe an n-gram table.

    With --model or --tokenizer, tokens are shown as text.
    """
    check_int("top", top, 0)
    loaded = NgramTable.load(table)
    names = None
    if model is not None or tokenizer is not None:
        names = _tokenizer(model, tokenizer, trust_remote_code)
        loaded.check(tokenizer_fingerprint(names), tokenizer_size(names), own_size(names))
    mark = "no fingerprint" if loaded.fingerprint is None else f"fingerprint {loaded.fingerprint[:12]}"
    lines = {"order": str(loaded.order), "vocabulary": f"{loaded.vocab_size:,} tokens, {mark}"}
    _print(table, lines | _made_from(loaded) | _contents(loaded, table) | _frequent(loaded, top, names))
    return 0


def _tokenizer(model: str | None, tokenizer: str | None, trust_remote_code: bool) -> Any:
    if model is not None and tokenizer is not None:
        raise ConfigError(f"--model {model!r} and --tokenizer {tokenizer!r} both name a tokenizer; drop one")
    name = model if model is not None else tokenizer
    if name is None:
        raise ConfigError("no tokenizer: name the one of the table with --model or --tokenizer")
    with loading(f"Loading the tokenizer of {name}") as progress:
        return load_tokenizer(name, LoadOptions(trust_remote_code=trust_remote_code, progress=progress))


def _print(path: Path, lines: dict[str, str]) -> None:
    typer.echo(path)
    for name, value in lines.items():
        typer.echo(f"  {name}: {value}")


def _made_from(table: NgramTable) -> dict[str, str]:
    """Lines about the corpus of a table."""
    corpus = table.corpus
    if corpus is None:
        return {"corpus": "unknown"}
    lines = {
        "corpus": ", ".join(corpus.files) or "unnamed",
        "tokens": f"{corpus.num_tokens:,} in {corpus.num_documents:,} documents",
        "distinct n-grams": _by_length(corpus.num_ngrams, 2)
        + (f"; those that occur less than {corpus.min_count} times are dropped" if corpus.min_count > 1 else ""),
    }
    return lines | _pruned(corpus)


def _pruned(corpus: Corpus) -> dict[str, str]:
    if not corpus.num_pruned:
        return {}
    return {
        "pruned": f"{corpus.num_pruned:,} n-grams, dropped by --max-entries after up to {corpus.pruned_count} occurrences"
    }


def _contents(table: NgramTable, path: Path) -> dict[str, str]:
    return {"contexts": _by_length(table.num_contexts, 1), "size": f"{path.stat().st_size / 1e6:,.2f} MB"}


def _by_length(numbers: tuple[int, ...], first: int) -> str:
    counted = [f"{number:,} of {length}" for length, number in enumerate(numbers, first)]
    return ", ".join(counted) + (" token" if first == len(numbers) == 1 else " tokens")


def _frequent(table: NgramTable, top: int, names: Any) -> dict[str, str]:
    """Lines about the most frequent tokens, and about how many cover most of the corpus."""
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
