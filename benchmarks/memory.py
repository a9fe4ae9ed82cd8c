"""Memory of the server during and after a burst of requests, one of them long, and how long the short ones wait.

    python benchmarks/memory.py [--model MODEL] [--tokens 4500] [--short 24] [--source PATH] [--write]

The model runs in bf16 unless it is a GGUF file, whose blocks stay as they are. Memory is resident memory in MB: of the fresh
server after one request, at the peak of the burst, and three seconds after its end. The floor of the peak is the fresh server
plus the keys and values of the tokens, 23 kB each for SmolLM2. `--source` measures the server of another checkout first.
"""

from __future__ import annotations

import asyncio
import os
import sys
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import httpx
from common import MODEL, Figures, arguments, log, parsed, publish, shown, table
from server import body, prompts, resident_mb, serving

LEGEND = {
    "fresh_mb": ("memory of the fresh server, MB", ""),
    "peak_mb": ("memory at the peak, MB", ""),
    "after_mb": ("memory 3 s after the burst, MB", ""),
    "after_over_fresh": ("after / fresh", "<= 1.3"),
    "first_token_median_s": ("short requests: time to the first token, median, s", ""),
    "longest_first_s": ("short requests: longest time to the first token, s", ""),
    "longest_wait_s": ("short requests: longest wait between two events, s", "<= 0.5"),
    "total_s": ("short requests: first request to last token, s", ""),
}


async def events(client: httpx.AsyncClient, request: dict[str, Any], out: list[float]) -> None:
    """Append the time of the request and of each event of its stream."""
    out.append(perf_counter())
    async with client.stream("POST", "/v1/chat/completions", json={**request, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        out += [perf_counter() async for line in answer.aiter_lines() if line.startswith("data: {")]


def long_text(tokens: int) -> str:
    """A text of about `tokens` tokens."""
    words = " ".join(prompts(24)).split()
    return " ".join((words * (1 + tokens // len(words)))[: int(tokens * 0.72)])


def burst(url: str, process: int, tokens: int, short: int) -> dict[str, float]:
    """Send one long prompt, and short ones a second later: memory of the server, and how long the short ones wait."""
    httpx.post(f"{url}/v1/chat/completions", json=body("Hello", 8), timeout=300)
    fresh, sizes = resident_mb(process), []
    texts = (sorted(prompts(24), key=len)[:12] * short)[:short]
    short_times: list[list[float]] = [[] for _ in range(short)]

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=1200) as client:
            first = asyncio.create_task(events(client, body(long_text(tokens), 16), []))
            await asyncio.sleep(1)
            requests = [body(text, 64) for text in texts]
            others = [
                asyncio.create_task(events(client, one, times))
                for one, times in zip(requests, short_times, strict=True)
            ]
            everyone = asyncio.gather(first, *others)
            while not everyone.done():
                sizes.append(resident_mb(process))
                await asyncio.sleep(0.05)
            await everyone

    asyncio.run(all_of_them())
    sleep(3)
    firsts = sorted(times[1] - times[0] for times in short_times)
    after = resident_mb(process)
    return {
        "fresh_mb": fresh,
        "peak_mb": max(sizes),
        "after_mb": after,
        "after_over_fresh": after / fresh,
        "first_token_median_s": firsts[len(firsts) // 2],
        "longest_wait_s": max(b - a for times in short_times for a, b in pairwise(times[1:])),
        "longest_first_s": max(firsts),
        "total_s": max(times[-1] for times in short_times) - min(times[0] for times in short_times),
    }


def main() -> int:
    parser = arguments(__doc__, quick=False)
    parser.add_argument("--model", default=MODEL, help=f"alias, folder, hub id or GGUF file (default: {MODEL})")
    parser.add_argument("--tokens", type=int, default=4500, help="tokens of the long prompt (default: 4500)")
    parser.add_argument("--short", type=int, default=24, help="short requests (default: 24)")
    parser.add_argument("--source", type=Path, help="another checkout, measured first")
    args = parsed(parser)
    found: dict[str, Figures] = {}
    for name, source in (("before", args.source), ("now", None)):
        if name == "now" or source is not None:
            more = {} if source is None else {"PYTHONPATH": str(source / "src")}
            with serving(args.model, os.environ | more) as (url, process):
                found[name] = burst(url, process, args.tokens, args.short)
            log(f"{name}: {', '.join(f'{key} {shown(value)}' for key, value in found[name].items())}")
    text = []
    if "before" in found:
        text = [
            f"The same with {args.source.name}:",
            table(("figure", "before"), ((k, shown(v)) for k, v in found["before"].items())),
        ]
    model = f"{args.model}, one prompt of {args.tokens} tokens and {args.short} short ones"
    return publish("memory", found["now"], args, legend=LEGEND, model=model, text=text)


if __name__ == "__main__":
    sys.exit(main())
