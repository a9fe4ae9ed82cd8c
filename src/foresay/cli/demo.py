"""`foresay demo`: the main job on a real model, both ways, side by side."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from foresay.cli.common import ThreadsOption, loading, use_threads

if TYPE_CHECKING:
    from foresay.generator import Generation, Generator

PROMPTS = (
    "Rewrite this note with every 'Tuesday' changed to 'Friday' and nothing else changed:\n"
    "The plumber comes on Tuesday at nine. Please leave the key under the blue pot, feed the cat before you go, and put "
    "the bins out on Tuesday evening. Mrs Okafor from number twelve has a spare key if the door sticks.",
    "Copy the function and give every parameter a type hint:\n\n"
    "def find_cheapest(offers, budget, currency):\n"
    "    matching = [offer for offer in offers if offer.currency == currency]\n"
    "    affordable = [offer for offer in matching if offer.price <= budget]\n"
    "    return min(affordable, key=lambda offer: offer.price, default=None)\n",
    "List the e-mail addresses in this text, one per line:\n"
    "Write to anna.lindqvist@harbour-museum.example for tickets, to the archive at records@harbour-museum.example for "
    "photographs, and to tomas.brandt@quayworks.example about the crane.",
    "Why do leaves change colour in autumn? Answer in three sentences.",
)


def run(
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", help="Tokens per prompt at most.")] = 128,
    model: Annotated[str, typer.Option(help="Alias, hub id, folder or GGUF file.")] = "smollm2-135m",
    threads: ThreadsOption = None,
) -> int:
    """Decode a few prompts with and without speculation, and compare; 1 if any output differs."""
    from foresay.cli.trace import comparison, console, first_difference, legend
    from foresay.engine import Stats
    from foresay.loading import load

    use_threads(threads)
    with loading(f"Loading {model}") as progress:
        generator = load(model, progress=progress)
    generator.generate("Hello", max_new_tokens=4)  # the first passes allocate; neither side pays for them
    out = console()
    out.print(legend())
    totals = [Stats(), Stats()]
    seconds = [0.0, 0.0]
    difference = None
    for prompt in PROMPTS:
        out.print(f"\n> {prompt}\n", style="dim")
        fast, fast_s = _streamed(generator, prompt, max_new_tokens)
        plain, plain_s = _plain(generator, prompt, max_new_tokens)
        for i, (one, elapsed) in enumerate(((plain, plain_s), (fast, fast_s))):
            totals[i].merge(one.stats)
            seconds[i] += elapsed
        difference = difference or first_difference(plain, fast, generator.tokenizer)
    out.print()
    out.print(comparison(seconds[0], totals[0], seconds[1], totals[1], out.width))
    out.print("identical output: yes" if difference is None else f"identical output: no, at {difference}")
    return 0 if difference is None else 1


def _streamed(generator: Generator, prompt: str, new: int) -> tuple[Generation, float]:
    from foresay.cli.trace import coloured, console

    out = console()
    began = perf_counter()
    whole = None
    for chunk in generator.stream([{"role": "user", "content": prompt}], max_new_tokens=new):
        out.print(coloured(chunk.pieces), end="")
        sys.stdout.flush()
        whole = chunk.generation or whole
    out.print()
    assert whole is not None
    return whole, perf_counter() - began


def _plain(generator: Generator, prompt: str, new: int) -> tuple[Generation, float]:
    began = perf_counter()
    done = generator.plain().generate([{"role": "user", "content": prompt}], max_new_tokens=new)
    return done, perf_counter() - began
