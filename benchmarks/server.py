"""The server beside the library: what HTTP adds, many clients at once, and a second turn that starts from the first.

    python benchmarks/server.py [--quick] [--write]

SmolLM2 in bf16 over a loopback socket, the shipped prompts, the server in a process of its own. The library decodes the same
prompts with the same settings in this process, in turns with the server. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import torch
from speed import section

import foresay
from foresay.lab.data.datasets import load_items, subset
from foresay.records.provenance import machine

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
WANTED: dict[str, Callable[[float], bool]] = {
    "latency_added_share": lambda x: x <= 0.03,
    "ttft_added_ms": lambda x: x <= 10,
    "c32_vs_library": lambda x: x >= 0.9,
    "c200_answered": lambda x: x == 1,
    "c200_wrong": lambda x: x == 0,
    "turn2_ttft_share": lambda x: x <= 0.2,
    "busy_share": lambda x: x >= 0.4,
}


def log(text: str) -> None:
    print(text, flush=True)


@contextmanager
def serving() -> Iterator[str]:
    """A server in a process of its own, and where it is."""
    command = [
        sys.executable,
        "-m",
        "foresay",
        "serve",
        "--model",
        MODEL,
        "--port",
        "0",
        "--warmup",
        "--max-waiting",
        "256",
    ]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    try:
        for line in child.stderr:
            if "listening at " in line:
                yield line.split()[-1].removesuffix("/v1")
                return
        raise RuntimeError("the server did not begin")
    finally:
        child.terminate()
        child.wait(60)


def prompts(count: int) -> list[str]:
    """Texts of the shipped prompts."""
    return [item.prompt for item in subset(load_items(), count) if isinstance(item.prompt, str)]


def body(text: str, new: int, **more: Any) -> dict[str, Any]:
    """A request of one user's message."""
    return {
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": new,
        "ignore_eos": True,
        **more,
    }


async def streamed(client: httpx.AsyncClient, asked: dict[str, Any]) -> tuple[list[float], str]:
    """(time of each event that has text, the text)."""
    times, pieces = [], []
    async with client.stream("POST", "/v1/chat/completions", json=asked | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                choice = json.loads(line[6:])["choices"][0]
                pieces.append(choice["delta"].get("content", ""))
                times.append(perf_counter())
    return times, "".join(pieces)


def alone(generator: foresay.Generator, url: str, texts: list[str], new: int) -> tuple[float, float]:
    """(share of a token's time, milliseconds to the first) that the server adds, one request at a time, in turns."""
    shares, firsts = [], []

    async def one(text: str) -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            began = perf_counter()
            times, _ = await streamed(client, body(text, new))
            return times[0] - began, times[-1] - times[0]

    for text in texts:
        ours: list[tuple[float, float]] = []
        theirs: list[tuple[float, float]] = []
        for _ in range(2):
            began, talk = perf_counter(), [{"role": "user", "content": text}]
            times = [perf_counter() for _ in generator.stream(talk, max_new_tokens=new, ignore_eos=True)]
            ours.append((times[0] - began, times[-1] - times[0]))
            theirs.append(asyncio.run(one(text)))
        # the second time the server has the prompt's slots; the first tells what a new prompt costs
        firsts.append((theirs[0][0] - ours[0][0]) * 1e3)
        shares.append(min(t[1] for t in theirs) / min(o[1] for o in ours) - 1)
    return statistics.median(shares), statistics.median(firsts)


def together(generator: foresay.Generator, url: str, texts: list[str], new: int) -> float:
    """Tokens a second of 32 clients at once, over those of the library's batch of the same prompts."""

    async def all_of_them(texts: list[str]) -> int:
        async with httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None)) as client:
            answers = await asyncio.gather(
                *(client.post("/v1/chat/completions", json=body(text, new)) for text in texts)
            )
        return sum(one.json()["usage"]["completion_tokens"] for one in answers)

    ratios = []
    for turn in range(2):  # prompts that neither has seen
        fresh = [f"{turn + 1}. {text}" for text in texts]
        began = perf_counter()
        talks = [[{"role": "user", "content": text}] for text in fresh]
        written = sum(len(one.token_ids) for one in generator.generate(talks, max_new_tokens=new, ignore_eos=True))
        library = written / (perf_counter() - began)
        began = perf_counter()
        served = asyncio.run(all_of_them(fresh)) / (perf_counter() - began)
        log(f"  32 at once: library {library:.1f} tokens/s, server {served:.1f}")
        ratios.append(served / library)
    return statistics.mean(ratios)


def many(generator: foresay.Generator, url: str, count: int) -> tuple[float, int, float]:
    """(share answered, how many wrong, 99% of times between two events in seconds) of mixed requests all at once."""
    texts = prompts(24)
    asked = [
        body(texts[i % len(texts)], 8 + 5 * (i % 7), temperature=0.8, seed=i, foresay={"rule": "coupled"})
        for i in range(count)
    ]
    gaps: list[float] = []

    async def one(client: httpx.AsyncClient, request: dict[str, Any]) -> str | None:
        try:
            times, text = await streamed(client, request)
        except (httpx.HTTPError, KeyError, IndexError):
            return None
        gaps.extend(b - a for a, b in pairwise(times))
        return text

    async def all_of_them() -> list[str | None]:
        async with httpx.AsyncClient(base_url=url, timeout=900, limits=httpx.Limits(max_connections=None)) as client:
            return await asyncio.gather(*(one(client, request) for request in asked))

    answers = asyncio.run(all_of_them())
    coupled = foresay.change(generator, rule="coupled")
    params = [
        foresay.SamplingParams(max_new_tokens=one["max_tokens"], temperature=0.8, seed=one["seed"], ignore_eos=True)
        for one in asked
    ]
    wanted = coupled.generate([one["messages"] for one in asked], params)
    wrong = sum(a is not None and a != w.text for a, w in zip(answers, wanted, strict=True))
    return sum(one is not None for one in answers) / count, wrong, statistics.quantiles(gaps, n=100)[98]


def second_turn(url: str) -> float:
    """Time to the first token of a chat's second turn over that of its first, of about 1,000 tokens."""
    shares = []
    for seed in range(3):
        text = f"Number {seed}. " + " ".join(
            f"The {i}th house on the street has {i * 7 % 31} windows." for i in range(95)
        )
        talk = [{"role": "user", "content": text}]

        async def turn(messages: list[dict[str, str]]) -> tuple[float, str]:
            async with httpx.AsyncClient(base_url=url, timeout=120) as client:
                began = perf_counter()
                times, said = await streamed(client, body("", 16) | {"messages": messages})
                return times[0] - began, said

        first, said = asyncio.run(turn(talk))
        then, _ = asyncio.run(
            turn([*talk, {"role": "assistant", "content": said}, {"role": "user", "content": "Go on."}])
        )
        shares.append(then / first)
    return statistics.median(shares)


def busy(url: str, texts: list[str], new: int) -> float:
    """Speed beside a process that keeps one core busy, over the speed without."""

    async def speed() -> float:
        async with httpx.AsyncClient(base_url=url, timeout=300) as client:
            began, written = perf_counter(), 0
            for text in texts:
                answer = await client.post("/v1/chat/completions", json=body(text, new))
                written += answer.json()["usage"]["completion_tokens"]
            return written / (perf_counter() - began)

    idle = asyncio.run(speed())
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        beside = asyncio.run(speed())
    finally:
        other.kill()
        other.wait()
    log(f"  idle {idle:.1f} tokens/s, beside a busy process {beside:.1f}")
    return beside / idle


def text_of(figures: dict[str, float]) -> str:
    """The figures as they stand in RESULTS.md."""
    out = [
        f"{machine()['processor']}, {torch.get_num_threads()} threads, torch {torch.__version__}",
        "",
        "| figure | measured | met |",
        "|---|---|---|",
    ]
    for key, value in figures.items():
        met = "" if key not in WANTED else "yes" if WANTED[key](value) else "no"
        out.append(f"| {key} | {value:.3f} | {met} |")
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts and requests")
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    args = parser.parse_args()
    generator = foresay.load(MODEL)
    generator.generate("Hello", max_new_tokens=4)
    few, new, count = (2, 32, 24) if args.quick else (8, 96, 200)
    with serving() as url:
        share, first = alone(generator, url, prompts(few), new)
        log(f"  alone: {share:+.3f} per token, {first:+.1f} ms to the first")
        at_once = together(generator, url, prompts(8 if args.quick else 32), 32 if args.quick else 64)
        answered, wrong, slow = many(generator, url, count)
        log(f"  {count} at once: {answered:.3f} answered, {wrong} wrong, 99% of gaps within {slow * 1e3:.0f} ms")
        turn = second_turn(url)
        beside = busy(url, prompts(2 if args.quick else 4), 48)
    figures = {
        "latency_added_share": share,
        "ttft_added_ms": first,
        "c32_vs_library": at_once,
        "c200_answered": answered,
        "c200_wrong": wrong,
        "c200_gap_p99_ms": slow * 1e3,
        "turn2_ttft_share": turn,
        "busy_share": beside,
    }
    if args.write:
        section(HERE / "RESULTS.md", "server", text_of(figures))
    print(json.dumps({key: round(value, 4) for key, value in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
