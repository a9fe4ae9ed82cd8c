"""The server against the library: the cost of HTTP, many clients at once, and a second turn that starts from the first.

    python benchmarks/server.py [--quick] [--vllm PYTHON] [--soak MINUTES] [--write]

SmolLM2 in bf16 over a loopback socket, shipped prompts, the server in a process of its own. The library decodes the same prompts
with the same settings in this process, in turn with the server. `--vllm`: a Python interpreter with vLLM, whose server then
answers the same requests in turn with foresay's, both in float32 where the processor would emulate bf16. `--soak`: minutes of
mixed requests, to measure by how much the server's memory grows.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import httpx
from common import MODEL, Figures, arguments, instruction_sets, log, measured, parsed, publish

import foresay
from foresay.integrations.vllm_arguments import model_folder
from foresay_lab.data.datasets import load_items, subset

LEGEND = {
    "latency_added_share": ("time per token that the server adds, one request at a time", "<= 0.03"),
    "ttft_added_ms": ("time to the first token that the server adds, ms", "<= 10"),
    "c32_vs_library": ("32 clients at once / the library's batch of the same prompts", ">= 0.9"),
    "c200_answered": ("share answered of 200 mixed requests at once", "== 1"),
    "c200_wrong": ("answers among them that are not the library's", "== 0"),
    "c200_gap_p99_ms": ("99% of gaps between their events are within, ms", ""),
    "turn2_ttft_share": ("time to the first token, second turn / first turn of 1,000 tokens", "<= 0.1"),
    "busy_share": ("speed next to a busy process / without", ">= 0.4"),
    "c8_tokens_per_s": ("8 clients, tokens/s", ""),
    "soak_growth_mb": ("memory growth under mixed requests, MB", ""),
    "vs_vllm_c8": ("8 clients / the same with vLLM's server", ">= 1.2"),
    "vs_vllm_c32": ("32 clients / the same with vLLM's server", ">= 1.0"),
    "burst_peak_over_fresh": ("a long prompt and 24 short ones: memory at its peak / of the fresh server", ""),
    "burst_after_over_fresh": ("the same three seconds later", "<= 1.3"),
    "burst_first_token_s": ("time to the first token of the short ones, median, s", ""),
    "burst_wait_s": ("their longest wait between two events, s", "<= 0.5"),
}


@contextmanager
def serving(
    model: str = MODEL, environment: Mapping[str, str] = os.environ, dtype: str = ""
) -> Iterator[tuple[str, int]]:
    """Start a server: its address and process id. dtype: by default bf16, or the blocks of a GGUF file as they are."""
    dtype = dtype or ("auto" if model.endswith(".gguf") else "bf16")
    options = ["--model", model, "--dtype", dtype, "--port", "0", "--warmup", "--max-waiting", "256"]
    command = [sys.executable, "-m", "foresay", "serve", *options]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=dict(environment))
    assert child.stderr is not None
    try:
        for line in child.stderr:
            if "listening at " in line:
                yield line.split()[-1].removesuffix("/v1"), child.pid
                return
        raise RuntimeError("the server did not start")
    finally:
        child.terminate()
        child.wait(60)


@contextmanager
def vllm_serving(python: str, dtype: str) -> Iterator[str]:
    """Start vLLM's server with the same weights: its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model_folder(MODEL)),
        "--dtype",
        dtype,
    ]
    command += ["--served-model-name", MODEL, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    quiet = subprocess.DEVNULL
    child = subprocess.Popen(command, stdout=quiet, stderr=quiet, env=environment, start_new_session=True)
    url, until = f"http://127.0.0.1:{port}", perf_counter() + 600
    try:
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            if child.poll() is not None or perf_counter() > until:
                raise RuntimeError("vLLM's server did not start")
            sleep(1)
        yield url
    finally:
        os.killpg(child.pid, signal.SIGTERM)
        child.wait(60)


def prompts(count: int) -> list[str]:
    """Texts of the shipped prompts."""
    return [item.prompt for item in subset(load_items(), count) if isinstance(item.prompt, str)]


def resident_mb(process: int) -> float:
    pages = int(Path(f"/proc/{process}/statm").read_text(encoding="utf-8").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def body(text: str, new: int, **more: Any) -> dict[str, Any]:
    """A request with one user message."""
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "temperature": 0, "max_tokens": new, "ignore_eos": True, **more}


def with_client(url: str, work: Callable[[httpx.AsyncClient], Awaitable[Any]]) -> Any:
    """Run a coroutine with a client of any number of connections."""

    async def run() -> Any:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=url, timeout=900, limits=limits) as client:
            return await work(client)

    return asyncio.run(run())


async def streamed(client: httpx.AsyncClient, request: dict[str, Any]) -> tuple[list[float], str]:
    """(time of each event that has text, the text)."""
    times, pieces = [], []
    async with client.stream("POST", "/v1/chat/completions", json=request | {"stream": True}) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                piece = json.loads(line[6:])["choices"][0]["delta"].get("content")
                if piece:  # the first event has the role alone
                    pieces.append(piece)
                    times.append(perf_counter())
    return times, "".join(pieces)


async def answered(client: httpx.AsyncClient, texts: Sequence[str], new: int) -> int:
    """Tokens of the answers to some texts, one request after the other."""
    tokens = 0
    for text in texts:
        answer = await client.post("/v1/chat/completions", json=body(text, new, model=MODEL))
        tokens += answer.json()["usage"]["completion_tokens"]
    return tokens


def clients_rate(url: str, texts: Sequence[str], new: int, clients: int) -> float:
    """Tokens per second of some clients at once, each of which sends its texts one after the other."""

    async def all_of_them(client: httpx.AsyncClient) -> int:
        return sum(await asyncio.gather(*(answered(client, texts[i::clients], new) for i in range(clients))))

    began = perf_counter()
    tokens: int = with_client(url, all_of_them)
    return tokens / (perf_counter() - began)


class Bench:
    """The library and a server, and the size of the measurements."""

    def __init__(self, url: str, process: int, quick: bool) -> None:
        self.url, self.process, self.quick = url, process, quick
        self.generator = foresay.load(MODEL, dtype="bf16")
        self.generator.generate("Hello", max_new_tokens=4)

    def alone(self) -> Figures:
        """Time that the server adds to one request at a time, measured in turn with the library.

        Without drafts, whose lengths adapt in each process by itself, and so that each token is an event. No two chats begin
        alike, so that the server has no part of a prompt in its cache.
        """
        new, plain = 32 if self.quick else 96, foresay.change(self.generator, drafter="none")
        shares, firsts = [], []
        for text in prompts(2 if self.quick else 8):
            system = {"role": "system", "content": f"Your number is {abs(hash(text))}."}
            chat = [system, {"role": "user", "content": text}]
            request = body(text, new, messages=chat, foresay={"drafter": "none"})
            library: list[tuple[float, float]] = []
            server: list[tuple[float, float]] = []
            for _ in range(3):
                began = perf_counter()
                times = [perf_counter() for one in plain.stream(chat, max_new_tokens=new, ignore_eos=True) if one.text]
                library.append((times[0] - began, times[-1] - times[0]))
                began = perf_counter()
                times, _ = with_client(self.url, partial(streamed, request=request))
                server.append((times[0] - began, times[-1] - times[0]))
            firsts.append((server[0][0] - library[0][0]) * 1e3)  # later the server has the prompt in its cache
            shares.append(min(total for _, total in server) / min(total for _, total in library) - 1)
        return {"latency_added_share": statistics.median(shares), "ttft_added_ms": statistics.median(firsts)}

    def together(self) -> Figures:
        """32 clients at once against the library's batch of the same prompts, which neither has seen."""
        new, ratios = 32 if self.quick else 64, []
        for turn in range(2):
            fresh = [f"{turn + 1}. {text}" for text in prompts(8 if self.quick else 32)]
            chats = [[{"role": "user", "content": text}] for text in fresh]
            began = perf_counter()
            done = self.generator.generate(chats, max_new_tokens=new, ignore_eos=True)
            library = sum(len(one.token_ids) for one in done) / (perf_counter() - began)
            served = clients_rate(self.url, fresh, new, len(fresh))
            log(f"  {len(fresh)} at once: library {library:.1f} tokens/s, server {served:.1f}")
            ratios.append(served / library)
        return {"c32_vs_library": statistics.mean(ratios)}

    def many(self) -> Figures:
        """200 mixed requests at once, sampled by the coupled rule, whose text is the library's."""
        texts, count, gaps = prompts(24), 24 if self.quick else 200, list[float]()
        requests = [
            body(texts[i % len(texts)], 8 + 5 * (i % 7), temperature=0.8, seed=i, foresay={"rule": "coupled"})
            for i in range(count)
        ]

        async def one(client: httpx.AsyncClient, request: dict[str, Any]) -> str | None:
            try:
                times, text = await streamed(client, request)
            except (httpx.HTTPError, KeyError, IndexError):
                return None
            gaps.extend(b - a for a, b in pairwise(times))
            return text

        async def all_of_them(client: httpx.AsyncClient) -> list[str | None]:
            return await asyncio.gather(*(one(client, request) for request in requests))

        answers: list[str | None] = with_client(self.url, all_of_them)
        params = [
            foresay.SamplingParams(max_new_tokens=one["max_tokens"], temperature=0.8, seed=one["seed"], ignore_eos=True)
            for one in requests
        ]
        wanted = foresay.change(self.generator, rule="coupled").generate([one["messages"] for one in requests], params)
        return {
            "c200_answered": sum(one is not None for one in answers) / count,
            "c200_wrong": sum(a is not None and a != w.text for a, w in zip(answers, wanted, strict=True)),
            "c200_gap_p99_ms": 1e3 * statistics.quantiles(gaps, n=100)[98],
        }

    def second_turn(self) -> Figures:
        """Time to the first token of a chat's second turn over that of its first, of about 1,000 tokens."""
        shares = []
        for seed in range(3):
            houses = (f"The {i}th house on the street has {i * 7 % 31} windows." for i in range(95))
            chat = [{"role": "user", "content": f"Number {seed}. {' '.join(houses)}"}]

            def turn(messages: list[dict[str, str]]) -> tuple[float, str]:
                request, began = body("", 16, messages=messages), perf_counter()
                times, text = with_client(self.url, partial(streamed, request=request))
                return times[0] - began, text

            first, text = turn(chat)
            again, _ = turn([*chat, {"role": "assistant", "content": text}, {"role": "user", "content": "Go on."}])
            shares.append(again / first)
        return {"turn2_ttft_share": statistics.median(shares)}

    def busy(self) -> Figures:
        """Speed next to a process that keeps one core busy, over the speed without."""
        texts = prompts(2 if self.quick else 4)
        idle = clients_rate(self.url, texts, 48, 1)
        other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            busy = clients_rate(self.url, texts, 48, 1)
        finally:
            other.kill()
            other.wait()
        return {"busy_share": busy / idle}

    def eight(self) -> Figures:
        """8 clients, each of which sends one request after the other."""
        texts, new = prompts(8 if self.quick else 24), 32 if self.quick else 96
        clients_rate(self.url, texts[:1], new, 1)
        return {"c8_tokens_per_s": clients_rate(self.url, texts, new, 8)}

    def burst(self) -> Figures:
        """One long prompt, and short ones a second later: memory of the server, and how long the short ones wait."""
        sizes, tokens = [resident_mb(self.process)], 600 if self.quick else 4500
        words = " ".join(prompts(24)).split()
        long = " ".join((words * (1 + tokens // len(words)))[: int(tokens * 0.72)])
        texts = (sorted(prompts(24), key=len)[:12] * 2)[: 6 if self.quick else 24]

        async def timed(client: httpx.AsyncClient, text: str, new: int) -> list[float]:
            began = perf_counter()
            return [began, *(await streamed(client, body(text, new)))[0]]

        async def all_of_them(client: httpx.AsyncClient) -> list[list[float]]:
            first = asyncio.create_task(timed(client, long, 16))
            await asyncio.sleep(1)
            others = asyncio.gather(*(timed(client, text, 64) for text in texts), first)
            while not others.done():
                sizes.append(resident_mb(self.process))
                await asyncio.sleep(0.05)
            return (await others)[:-1]

        times: list[list[float]] = with_client(self.url, all_of_them)
        sleep(3)
        return {
            "burst_peak_over_fresh": max(sizes) / sizes[0],
            "burst_after_over_fresh": resident_mb(self.process) / sizes[0],
            "burst_first_token_s": statistics.median(one[1] - one[0] for one in times),
            "burst_wait_s": max(b - a for one in times for a, b in pairwise(one[1:])),
        }

    def soak(self, minutes: float) -> Figures:
        """Growth of the server's memory over the last four fifths of some minutes of mixed requests."""
        texts, chance, sizes = prompts(24), random.Random(0), list[float]()
        until = perf_counter() + 60 * minutes

        async def client_of(client: httpx.AsyncClient, seed: int) -> int:
            done, chance = 0, random.Random(seed)
            while perf_counter() < until:
                more = {"n": chance.choice((1, 1, 2)), "temperature": chance.choice((0, 1))}
                request = body(chance.choice(texts), chance.randint(1, 80), **more)
                if chance.random() < 0.2:  # leaves before the end
                    with suppress(httpx.TimeoutException):
                        await client.post("/v1/chat/completions", json=request, timeout=0.2)
                else:
                    done += (await client.post("/v1/chat/completions", json=request)).status_code == 200
            return done

        async def watch() -> int:
            while perf_counter() < until:
                sizes.append(resident_mb(self.process))
                await asyncio.sleep(1)
            return 0

        async def both(client: httpx.AsyncClient) -> int:
            seeds = [chance.randint(0, 1 << 30) for _ in range(6)]
            return sum(await asyncio.gather(*(client_of(client, seed) for seed in seeds), watch()))

        done = with_client(self.url, both)
        early = statistics.median(sizes[len(sizes) // 5 : len(sizes) // 4 + 2])
        growth = statistics.median(sizes[-max(3, len(sizes) // 20) :]) - early
        log(f"  {done} answered in {minutes:g} minutes, memory {early:.0f} MB, {growth:+.0f} at the end")
        return {"soak_growth_mb": growth}


def against_vllm(python: str, quick: bool, running: ExitStack) -> Figures:
    """Tokens per second of 8 clients over those with vLLM's server; in float32 where the processor emulates bf16.

    running: the server of the other parts, which is stopped first.
    """
    running.close()
    dtype, theirs_in = ("bf16", "bfloat16") if "BF16" in instruction_sets() else ("fp32", "float32")
    new, rates = 32 if quick else 96, list[dict[str, tuple[float, float]]]()

    def measured_at(url: str, turn: int) -> dict[str, float]:
        out = {}
        for clients in (8, 32):
            fresh = [f"{turn + 1}. {clients}. {text}" for text in prompts(8 if quick else min(60, 3 * clients))]
            clients_rate(url, fresh[:1], new, 1)
            out[f"c{clients}"] = clients_rate(url, fresh, new, clients)
        return out

    for turn in range(1 if quick else 2):
        with serving(dtype=dtype) as (url, _):
            ours = measured_at(url, turn)
        with vllm_serving(python, theirs_in) as url:
            theirs = measured_at(url, turn)
        rates.append({key: (ours[key], theirs[key]) for key in ours})
        log(f"  {theirs_in}: " + ", ".join(f"{key} {a:.1f} / {b:.1f} tokens/s" for key, (a, b) in rates[-1].items()))
    return {f"vs_vllm_{key}": sum(one[key][0] for one in rates) / sum(one[key][1] for one in rates) for key in rates[0]}


PARTS = {
    "burst": Bench.burst,
    "alone": Bench.alone,
    "together": Bench.together,
    "many": Bench.many,
    "second_turn": Bench.second_turn,
    "busy": Bench.busy,
    "eight": Bench.eight,
}


def main() -> int:
    parser = arguments(__doc__, parts=(*PARTS, "soak", "vllm"))
    parser.add_argument("--vllm", help="Python interpreter of an environment with vLLM")
    parser.add_argument("--soak", type=float, default=0.0, help="minutes of mixed requests")
    args = parsed(parser)
    with ExitStack() as stack:
        bench = Bench(*stack.enter_context(serving()), args.quick)
        parts: dict[str, Callable[[], Figures]] = {name: partial(part, bench) for name, part in PARTS.items()}
        if args.soak:
            parts["soak"] = partial(bench.soak, args.soak)
        if args.vllm:
            parts["vllm"] = partial(against_vllm, args.vllm, args.quick, stack)
        return measured(parts, args.only, partial(publish, "server", args=args, legend=LEGEND))


if __name__ == "__main__":
    sys.exit(main())
