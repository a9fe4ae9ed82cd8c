"""N-gram tables: `foresay distill --kind ngram` makes one from text, and `foresay info` describes one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.progress import DownloadColumn

from foresay.cli.command import Given
from foresay.cli.common import check_output, load_options, target_name
from foresay.cli.progress import advancing, loading
from foresay.drafters.ngram_table import Corpus, NgramTable
from foresay.errors import ConfigError
from foresay.models.sources.loading import load_tokenizer
from foresay.text.tokenizer import own_size, tokenizer_fingerprint, tokenizer_size
from foresay.training import ngrams
from foresay.training.corpus import CorpusReader

_COVERAGES = (0.9, 0.95, 0.99)
_TOP = 10
"""Most frequent tokens that are listed."""


def build(given: Given) -> Iterator[str]:
    """Count the n-grams of text files, write a table, and return lines about it.

    The table contains the most frequent next token of each context, for --drafter 'max_gram(table=FILE)'.
    """
    output, files = given.output, list(given.text)
    ngrams.check_counting(given.order, given.min_count, ngrams.MAX_ENTRIES, given.max_tokens)
    reader = CorpusReader(files, separator=given.separator, field=given.field)
    if output.suffix != ".safetensors":
        raise ConfigError("must end in .safetensors", param="output", value=output)
    check_output(output, force=given.force, name="OUTPUT")
    names = _tokenizer(target_name(given.model), given)
    counter = ngrams.NgramCounter(given.order, tokenizer_size(names), given.min_count, ngrams.MAX_ENTRIES)
    began = perf_counter()
    with advancing("Counting", DownloadColumn()) as advance:

        def show_speed(position: int, tokens: int) -> None:
            advance(position, reader.size, f"{tokens / (perf_counter() - began):,.0f} tokens/s")

        ngrams.count_corpus(counter, reader, names, max_tokens=given.max_tokens, on_progress=show_speed)
        if not counter.num_tokens:
            raise ConfigError(f"has no words in {', '.join(files)}", param="text")
        table = counter.table(fingerprint=tokenizer_fingerprint(names), files=files)
        table.save(output)
    seconds = perf_counter() - began
    speed = f"{seconds:.1f} ({counter.num_tokens / seconds:,.0f} tokens/s)"
    yield from _lines(output, _made_from(table) | _contents(table, output) | {"seconds": speed})


def is_table(name: str | None) -> bool:
    """True if a name is that of an n-gram table's file, and not of a model."""
    return name is not None and name.endswith((".safetensors", ".json"))


def described(name: str, given: Given) -> Iterator[str]:
    """Lines about a table; its most frequent tokens as text if --model names the tokenizer."""
    loaded, path, names = NgramTable.load(name), Path(name), None
    if given.model is not None:
        names = _tokenizer(given.model, given)
        loaded.check(tokenizer_fingerprint(names), tokenizer_size(names), own_size(names))
    mark = "no fingerprint" if loaded.fingerprint is None else f"fingerprint {loaded.fingerprint[:12]}"
    lines = {"order": str(loaded.order), "vocabulary": f"{loaded.vocab_size:,} tokens, {mark}"}
    yield from _lines(path, lines | _made_from(loaded) | _contents(loaded, path) | _frequent(loaded, names))


def _tokenizer(name: str, given: Given) -> Any:
    with loading(f"Loading the tokenizer of {name}") as progress:
        return load_tokenizer(name, load_options(given, progress=progress))


def _lines(path: Path, lines: dict[str, str]) -> Iterator[str]:
    yield str(path)
    yield from (f"  {name}: {value}" for name, value in lines.items())


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
        "pruned": f"{corpus.num_pruned:,} n-grams, dropped for want of memory after up to {corpus.pruned_count} occurrences"
    }


def _contents(table: NgramTable, path: Path) -> dict[str, str]:
    return {"contexts": _by_length(table.num_contexts, 1), "size": f"{path.stat().st_size / 1e6:,.2f} MB"}


def _by_length(numbers: tuple[int, ...], first: int) -> str:
    counted = [f"{number:,} of {length}" for length, number in enumerate(numbers, first)]
    return ", ".join(counted) + (" token" if first == len(numbers) == 1 else " tokens")


def _frequent(table: NgramTable, names: Any) -> dict[str, str]:
    """Lines about the most frequent tokens, and about how many cover most of the corpus."""
    counts = table.counts
    if counts is None or not counts.any():
        return {"token counts": "none"}
    shares = [f"{100 * share:.0f}% by {len(table.frequent(coverage=share)):,}" for share in _COVERAGES]
    ids = sorted(table.frequent(min(_TOP, table.vocab_size)).tolist(), key=lambda i: (-counts[i], i))
    words = [f"{i if names is None else repr(names.decode([i]))} {counts[i]:,}" for i in ids if counts[i]]
    return {"coverage": f"{', '.join(shares)} tokens", "most frequent": ", ".join(words)}
