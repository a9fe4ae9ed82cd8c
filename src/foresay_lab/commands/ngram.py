"""N-gram tables from text, for `foresay distill --kind ngram`."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from rich.progress import DownloadColumn

from foresay.cli.command import Given
from foresay.cli.common import check_output, target_name
from foresay.cli.ngram import contents, lines_of, made_from, tokenizer_of
from foresay.cli.progress import advancing
from foresay.errors import ConfigError
from foresay.text.tokenizer import tokenizer_fingerprint, tokenizer_size
from foresay_lab.training import ngrams
from foresay_lab.training.corpus import CorpusReader


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
    names = tokenizer_of(target_name(given.model), given)
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
    yield from lines_of(output, made_from(table) | contents(table, output) | {"seconds": speed})
