"""N-gram tables, as `foresay info` describes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from foresay.cli.command import Given
from foresay.cli.common import load_options
from foresay.cli.progress import loading
from foresay.drafters.ngram_table import Corpus, NgramTable
from foresay.models.sources.loading import load_tokenizer
from foresay.text.tokenizer import own_size, tokenizer_fingerprint, tokenizer_size

_COVERAGES = (0.9, 0.95, 0.99)
_TOP = 10
"""Most frequent tokens that are listed."""


def is_table(name: str | None) -> bool:
    """True if a name is that of an n-gram table's file, and not of a model."""
    return name is not None and name.endswith((".safetensors", ".json"))


def described(name: str, given: Given) -> Iterator[str]:
    """Lines about a table; its most frequent tokens as text if --model names the tokenizer."""
    loaded, path, names = NgramTable.load(name), Path(name), None
    if given.model is not None:
        names = tokenizer_of(given.model, given)
        loaded.check(tokenizer_fingerprint(names), tokenizer_size(names), own_size(names))
    mark = "no fingerprint" if loaded.fingerprint is None else f"fingerprint {loaded.fingerprint[:12]}"
    lines = {"order": str(loaded.order), "vocabulary": f"{loaded.vocab_size:,} tokens, {mark}"}
    yield from lines_of(path, lines | made_from(loaded) | contents(loaded, path) | _frequent(loaded, names))


def tokenizer_of(name: str, given: Given) -> Any:
    """Load the tokenizer of a model."""
    with loading(f"Loading the tokenizer of {name}") as progress:
        return load_tokenizer(name, load_options(given, progress=progress))


def lines_of(path: Path, lines: dict[str, str]) -> Iterator[str]:
    """Yield the name of a file, and lines about it below."""
    yield str(path)
    yield from (f"  {name}: {value}" for name, value in lines.items())


def made_from(table: NgramTable) -> dict[str, str]:
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


def contents(table: NgramTable, path: Path) -> dict[str, str]:
    """Lines about the size of a table."""
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
