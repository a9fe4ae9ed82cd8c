"""`foresay demo`: a few prompts on a real model, with and without speculation."""

from __future__ import annotations

from time import perf_counter

from foresay.cli.colours import console, legend
from foresay.cli.command import Given
from foresay.cli.common import model_name
from foresay.cli.generate import stream
from foresay.cli.progress import loading
from foresay.cli.tables import first_difference, show_table
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine import Stats
from foresay.generation.load import load
from foresay.generation.method import PLAIN
from foresay.text.formatting import NOISE, REASON, is_noise, percent

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


def run(given: Given) -> int:
    """Run the command."""
    params = SamplingParams(max_new_tokens=given.max_new_tokens)
    model = model_name(given.model)
    with loading(f"Loading {model}") as progress:
        generator = load(model, progress=progress)
    generator.generate("Hello", max_new_tokens=4)  # the first passes allocate: time neither side's
    out = console()
    out.print(legend(out))
    totals, seconds, difference = [Stats(), Stats()], [0.0, 0.0], None
    for prompt in PROMPTS:
        out.print(f"\n> {prompt}\n", style="dim")
        request = [{"role": "user", "content": prompt}]
        times = [perf_counter()]
        fast = stream(generator, request, params, trace=True)
        times.append(perf_counter())
        plain = generator.plain().generate(request, params)
        times.append(perf_counter())
        for i, one in enumerate((fast, plain)):
            totals[i].merge(one.stats)
            seconds[i] += times[i + 1] - times[i]
        difference = difference or first_difference(plain, fast, generator.tokenizer)
    out.print()
    headings = ("", "tokens", "seconds", "tokens/s", "speed-up", "tokens/pass", "accepted")
    rows = [_row(PLAIN, totals[1], seconds[1], seconds[1]), _row("foresay", totals[0], seconds[0], seconds[1])]
    show_table(headings, rows)
    if rows[1][4].startswith(NOISE):
        out.print(REASON)
    out.print("identical output: yes" if difference is None else f"identical output: no, at {difference}")
    return 0 if difference is None else 1


def _row(name: str, stats: Stats, seconds: float, plain_s: float) -> list[str]:
    rate, passes = f"{stats.num_tokens / seconds:.1f}", f"{stats.block_efficiency or 0:.2f}"
    mark = NOISE * (name != PLAIN and is_noise(plain_s / seconds, 0, stats.block_efficiency))
    speed = f"{mark}{plain_s / seconds:.2f}x"
    return [name, str(stats.num_tokens), f"{seconds:.2f}", rate, speed, passes, percent(stats.acceptance_rate)]
