"""A burst of requests, one of them long: the memory of the server during and after it, and how long the short ones wait.

    python benchmarks/memory.py [--tokens 4500] [--short 24] [--source PATH] [--write]

SmolLM2 in bf16. Memory is resident memory in MB: of the fresh server after one request, at the peak of the burst, and three
seconds after its end. The floor of the peak is the fresh server plus the tokens' keys and values, 23 kB each. --source: another
checkout, whose server is measured before this one's. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import httpx
import torch
from server import body, prompts, serving
from speed import section

from foresay.records.provenance import machine

HERE = Path(__file__).parent
WANTED = {"after_over_fresh": lambda x: x <= 1.3, "longest_wait_s": lambda x: x <= 0.5}


def resident_mb(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


async def _events(client: httpx.AsyncClient, asked: dict[str, Any], out: list[float]) -> None:
    """The time of each event of a stream, that of the request first."""
    out.append(perf_counter())
    async with client.stream("POST", "/v1/chat/completions", json={**asked, "stream": True}) as answer:
        assert answer.status_code == 200, await answer.aread()
        out += [perf_counter() async for line in answer.aiter_lines() if line.startswith("data: {")]


def long_text(tokens: int) -> str:
    """A text of about so many tokens."""
    words = " ".join(prompts(24)).split()
    return " ".join((words * (1 + tokens // len(words)))[: int(tokens * 0.72)])


def burst(url: str, process: int, tokens: int, short: int) -> dict[str, float]:
    """One long prompt, and short ones a second after it: memory, and the waits of the short ones."""
    httpx.post(f"{url}/v1/chat/completions", json=body("Hello", 8), timeout=300)
    fresh, sizes = resident_mb(process), []
    texts = (sorted(prompts(24), key=len)[:12] * short)[:short]
    short_times: list[list[float]] = [[] for _ in range(short)]

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=1200) as client:
            first = asyncio.create_task(_events(client, body(long_text(tokens), 16), []))
            await asyncio.sleep(1)
            asked = [body(text, 64) for text in texts]
            others = [
                asyncio.create_task(_events(client, one, times)) for one, times in zip(asked, short_times, strict=True)
            ]
            everyone = asyncio.gather(first, *others)
            while not everyone.done():
                sizes.append(resident_mb(process))
                await asyncio.sleep(0.05)
            await everyone

    asyncio.run(all_of_them())
    sleep(3)
    waits = [b - a for times in short_times for a, b in pairwise(times)]
    firsts = sorted(times[1] - times[0] for times in short_times)
    after = resident_mb(process)
    return {
        "fresh_mb": fresh,
        "peak_mb": max(sizes),
        "after_mb": after,
        "after_over_fresh": after / fresh,
        "first_token_median_s": firsts[len(firsts) // 2],
        "longest_wait_s": max(b for times in short_times for b in (y - x for x, y in pairwise(times[1:]))),
        "longest_first_s": max(firsts),
        "total_s": max(times[-1] for times in short_times) - min(times[0] for times in short_times),
        "waits": float(len(waits)),
    }


def text_of(figures: dict[str, dict[str, float]]) -> str:
    """The figures as they stand in RESULTS.md."""
    out = [
        f"{machine()['processor']}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "",
        f"| figure | {' | '.join(figures)} | met |",
        f"|---|{'---|' * len(figures)}---|",
    ]
    for key in figures["now"]:
        met = "" if key not in WANTED else "yes" if WANTED[key](figures["now"][key]) else "no"
        out.append(f"| {key} | {' | '.join(f'{one[key]:.2f}' for one in figures.values())} | {met} |")
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4500, help="tokens of the long prompt")
    parser.add_argument("--short", type=int, default=24, help="short requests")
    parser.add_argument("--source", help="another checkout, measured as well")
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    args = parser.parse_args()
    figures = {}
    sources = {**({"before": str(Path(args.source) / "src")} if args.source else {}), "now": None}
    for name, path in sources.items():
        saved = os.environ.get("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path
        try:
            with serving() as (url, process):
                figures[name] = burst(url, process, args.tokens, args.short)
        finally:
            os.environ.pop("PYTHONPATH", None) if saved is None else os.environ.update(PYTHONPATH=saved)
        print(name, {key: round(value, 2) for key, value in figures[name].items()}, flush=True)
    if args.write:
        section(HERE / "RESULTS.md", "memory", text_of(figures))
    print(json.dumps({key: round(value, 3) for key, value in figures["now"].items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
