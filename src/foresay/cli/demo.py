"""`foresay demo`: a few prompts on a real model, with and without speculation."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Annotated

import typer

from foresay.cli.colours import coloured, console, legend
from foresay.cli.common import model_name, use_threads
from foresay.cli.options import ModelChoice, ThreadsOption
from foresay.cli.progress import loading
from foresay.cli.tables import comparison, first_difference
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Stats
from foresay.generation.generator import Generator
from foresay.generation.load import load
from foresay.generation.result import Generation

PROMPTS = (
    "Correct the spelling mistakes in this note and repeat the rest as it is:\n"
    "The plumber comes on Tuesday at nine. Please leeve the key under the blue pot, feed the cat before you go, and put "
    "the bins out in the evning. Mrs Okafor from number twelve has a spare key if the door sticks.",
    "Turn this into a numbered list and keep the words:\n"
    "Soak the beans overnight in cold water; rinse them well and drain them; fry the onion slowly until it is soft; add "
    "the beans, the stock and a bay leaf; simmer for an hour and salt at the end.",
    "Repeat the code with the comments in capital letters:\n\n"
    "# open the file\nwith open(path) as file:\n    # read every line\n    lines = file.readlines()\n"
    "# count the words\ntotal = sum(len(line.split()) for line in lines)\n",
    "Why do leaves change colour in autumn? Answer in three sentences.",
)


def run(
    *,
    which: ModelChoice,
    max_new_tokens: Annotated[
        int, typer.Option("--max-new-tokens", "-n", help="Generate at most N tokens per prompt.")
    ] = 128,
    threads: ThreadsOption = None,
) -> int:
    """Decode a few prompts with and without speculation.

    Exit code 1 if an output differs.
    """
    SamplingParams(max_new_tokens=max_new_tokens)  # a wrong number must fail before the model is loaded
    use_threads(threads)
    model = model_name(which.name)
    with loading(f"Loading {model}") as progress:
        generator = load(model, progress=progress)
    generator.generate("Hello", max_new_tokens=4)  # the first passes allocate: time neither side's
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
    out.print(comparison(seconds[0], totals[0], seconds[1], totals[1], out), soft_wrap=not out.is_terminal)
    out.print("identical output: yes" if difference is None else f"identical output: no, at {difference}")
    return 0 if difference is None else 1


def _streamed(generator: Generator, prompt: str, new: int) -> tuple[Generation, float]:
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
