"""The server beside the library: what HTTP adds, many clients at once, and a second turn that starts from the first.

    python benchmarks/server.py [--quick] [--vllm PYTHON] [--soak MINUTES] [--write]

SmolLM2 in bf16 over a loopback socket, the shipped prompts, the server in a process of its own. The library decodes the same
prompts with the same settings in this process, in turns with the server. --vllm: a Python with vLLM, whose server then answers
the same requests in turns with ours, in float32 where the processor would emulate bf16 for it. --soak: mixed requests for so
long, and how much the server's memory grew. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import httpx
import torch
from speed import section

import foresay
from foresay.lab.bench.peers.base import model_folder
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
def serving(dtype: str = "bf16") -> Iterator[tuple[str, int]]:
    """A server in a process of its own: where it is, and the process."""
    options = ["--model", MODEL, "--dtype", dtype, "--port", "0", "--warmup", "--max-waiting", "256"]
    child = subprocess.Popen([sys.executable, "-m", "foresay", "serve", *options], stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    try:
        for line in child.stderr:
            if "listening at " in line:
                yield line.split()[-1].removesuffix("/v1"), child.pid
                return
        raise RuntimeError("the server did not begin")
    finally:
        child.terminate()
        child.wait(60)


@contextmanager
def vllm_serving(python: str, dtype: str) -> Iterator[str]:
    """vLLM's server over the same weights, and where it is."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    folder = model_folder(MODEL)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", dtype]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    child = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment, start_new_session=True
    )
    url, until = f"http://127.0.0.1:{port}", perf_counter() + 600
    try:
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.HTTPError:
                sleep(1)
            if child.poll() is not None or perf_counter() > until:
                raise RuntimeError("vLLM's server did not begin")
        yield url
    finally:
        os.killpg(child.pid, signal.SIGTERM)
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
                piece = json.loads(line[6:])["choices"][0]["delta"].get("content")
                if piece:  # the first event only says who speaks, before anything is written
                    pieces.append(piece)
                    times.append(perf_counter())
    return times, "".join(pieces)


def alone_talk(text: str) -> list[dict[str, str]]:
    """A chat whose beginning no other has, so that a server has nothing of it already."""
    return [{"role": "system", "content": f"{abs(hash(text))} is your number."}, {"role": "user", "content": text}]


def alone(generator: foresay.Generator, url: str, texts: list[str], new: int) -> tuple[float, float]:
    """(share of a token's time, milliseconds to the first) that the server adds, one request at a time, in turns.

    Without drafts, whose lengths adapt in each process by itself; so that there is an event for every token too.
    """
    shares, firsts, plain = [], [], foresay.change(generator, drafter="none")

    async def one(text: str) -> tuple[float, float]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            began = perf_counter()
            times, _ = await streamed(client, body(text, new, messages=alone_talk(text), foresay={"drafter": "none"}))
            return times[0] - began, times[-1] - times[0]

    for text in texts:
        ours: list[tuple[float, float]] = []
        theirs: list[tuple[float, float]] = []
        for _ in range(3):
            began, talk = perf_counter(), alone_talk(text)
            times = [perf_counter() for one in plain.stream(talk, max_new_tokens=new, ignore_eos=True) if one.text]
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


def eight(url: str, texts: list[str], new: int) -> float:
    """Tokens a second of 8 clients, each of which asks for one text after the other."""

    async def client_of(texts: list[str]) -> int:
        written = 0
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            for text in texts:
                answer = await client.post("/v1/chat/completions", json=body(text, new) | {"model": MODEL})
                written += answer.json()["usage"]["completion_tokens"]
        return written

    async def all_of_them() -> int:
        return sum(await asyncio.gather(*(client_of(texts[i::8]) for i in range(8))))

    asyncio.run(client_of(texts[:1]))
    began = perf_counter()
    return asyncio.run(all_of_them()) / (perf_counter() - began)


def beside_vllm(python: str, texts: list[str], new: int) -> float:
    """Tokens a second of 8 clients over those of vLLM's server; in float32 where bf16 is emulated there."""
    ours_in, theirs_in = (
        ("bf16", "bfloat16") if "AVX512" in torch.backends.cpu.get_cpu_capability() else ("fp32", "float32")
    )
    ours, theirs = [], []
    for turn in range(2):
        fresh = [f"{turn + 1}. {text}" for text in texts]
        with serving(ours_in) as (url, _):
            ours.append(eight(url, fresh, new))
        with vllm_serving(python, theirs_in) as url:
            theirs.append(eight(url, fresh, new))
        log(f"  8 clients in {theirs_in}: {ours[-1]:.1f} tokens/s, vLLM {theirs[-1]:.1f}")
    return statistics.mean(ours) / statistics.mean(theirs)


def soak(url: str, process: int, minutes: float) -> float:
    """Megabytes that the server's memory grew by in the last four fifths of so many minutes of mixed requests."""
    texts, chance = prompts(24), random.Random(0)
    until, sizes = perf_counter() + 60 * minutes, list[float]()

    def size() -> float:
        pages = int(Path(f"/proc/{process}/statm").read_text(encoding="utf-8").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    async def client_of(seed: int) -> int:
        done, chance = 0, random.Random(seed)
        async with httpx.AsyncClient(base_url=url, timeout=600) as client:
            while perf_counter() < until:
                more = {"n": chance.choice((1, 1, 2)), "temperature": chance.choice((0, 1))}
                asked = body(chance.choice(texts), chance.randint(1, 80), **more)
                if chance.random() < 0.2:  # leaves before the end
                    with suppress(httpx.TimeoutException):
                        await client.post("/v1/chat/completions", json=asked, timeout=0.2)
                else:
                    done += (await client.post("/v1/chat/completions", json=asked)).status_code == 200
        return done

    async def watch() -> None:
        while perf_counter() < until:
            sizes.append(size())
            await asyncio.sleep(1)

    async def both() -> int:
        done = await asyncio.gather(*(client_of(chance.randint(0, 1 << 30)) for _ in range(6)), watch())
        return sum(count or 0 for count in done)

    answered = asyncio.run(both())
    early = statistics.median(sizes[len(sizes) // 5 : len(sizes) // 4 + 2])
    grown = statistics.median(sizes[-max(3, len(sizes) // 20) :]) - early
    log(f"  {answered} answered in {minutes:g} minutes, memory {early:.0f} MB, {grown:+.0f} in the end")
    return grown


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
    parser.add_argument("--vllm", help="a Python that has vLLM")
    parser.add_argument("--soak", type=float, default=0.0, help="minutes of mixed requests")
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    args = parser.parse_args()
    generator = foresay.load(MODEL, dtype="bf16")
    generator.generate("Hello", max_new_tokens=4)
    few, new, count = (2, 32, 24) if args.quick else (8, 96, 200)
    with serving() as (url, process):
        share, first = alone(generator, url, prompts(few), new)
        log(f"  alone: {share:+.3f} per token, {first:+.1f} ms to the first")
        at_once = together(generator, url, prompts(8 if args.quick else 32), 32 if args.quick else 64)
        answered, wrong, slow = many(generator, url, count)
        log(f"  {count} at once: {answered:.3f} answered, {wrong} wrong, 99% of gaps within {slow * 1e3:.0f} ms")
        turn = second_turn(url)
        beside = busy(url, prompts(2 if args.quick else 4), 48)
        ours = eight(url, prompts(8 if args.quick else 24), new)
        grown = soak(url, process, args.soak) if args.soak else None
    figures = {
        "latency_added_share": share,
        "ttft_added_ms": first,
        "c32_vs_library": at_once,
        "c200_answered": answered,
        "c200_wrong": wrong,
        "c200_gap_p99_ms": slow * 1e3,
        "turn2_ttft_share": turn,
        "busy_share": beside,
        "c8_tokens_per_s": ours,
    }
    if grown is not None:
        figures["soak_growth_mb"] = grown
    if args.vllm:
        figures["vs_vllm_c8"] = beside_vllm(args.vllm, prompts(8 if args.quick else 24), new)
    if args.write:
        section(HERE / "RESULTS.md", "server", text_of(figures))
    print(json.dumps({key: round(value, 4) for key, value in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
