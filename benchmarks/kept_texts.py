"""Two days of an agent's repetitive work: what a server with --memory gains on the second day; and its memory after a burst.

    python benchmarks/kept_texts.py FILE [--quick] [--write]

FILE: a GGUF file of real size. An agent on call gets alerts, for which it writes runbooks, and tickets about functions of
Python's library, which it explains and tests. On the second day, after a restart, the same alerts and tickets come with other
numbers, hosts and dates, some of them with other wishes, and a third is new. Greedy, one request at a time, drafter `suffix`; the
same two days without --memory are the control. The burst: 32 requests of 2,048 tokens at once, then ten seconds of rest; the
resident memory is compared with the file's size.
"""

from __future__ import annotations

import difflib
import heapq
import inspect
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import httpx
from common import Figures, arguments, environment, log, parsed, publish, table

FUNCTIONS: list[Callable[..., Any]] = [heapq.merge, statistics.quantiles, difflib.get_close_matches]
TASKS = (
    "Explain step by step what the function does. Mention {wish}.",
    "Write three unit tests with unittest. Mention {wish} in a comment.",
)
WISHES = ("its complexity", "its limits")
ALERTS = (
    "disk usage above 90% on a database host",
    "a certificate expires in seven days",
    "the queue of background jobs grows",
    "the 99th percentile of latency is above two seconds",
    "a replica lags by 60 seconds",
    "a nightly backup has failed",
)
SYSTEM = "You are a maintenance agent. Answer with the result only."
LEGEND = {
    "memory_speedup": ("tokens/s of the second day over the first, with --memory", ">= 1.5"),
    "without_memory": ("the same without", ""),
    "memory_repeated": ("the second day with --memory over without: tickets with other numbers and dates", ""),
    "memory_similar": ("tickets with other wishes, too", ""),
    "memory_new": ("tickets about new functions", ""),
    "rss_over_model": ("resident memory after a burst / size of the model's file", "<= 2"),
    "rss_burst_over_model": ("the same at most during the burst", ""),
    "identical_share": ("share of second-day outputs that equal those without memory", "== 1"),
}
Ticket = tuple[str, str]
"""Kind ("repeated", "similar" or "new") and text."""


def tickets(day: int, quick: bool) -> list[Ticket]:
    """The alerts and tickets of a day: the last alerts and the last function are new on the second."""
    out = []
    for i, alert in enumerate(ALERTS[: 4 if day == 1 else None]):
        head = f"Alert {day * 1000 + 17 * i} at 2026-11-{day + 9:02} 0{i}:1{day}, host db-{3 * i + day}: {alert}."
        out.append(("new" if i > 3 else "repeated", f"{head} Write the runbook for the person on call, with commands."))
    for i, function in enumerate(FUNCTIONS[: 2 if day == 1 else None]):
        code = textwrap.dedent(inspect.getsource(function))
        for j, task in enumerate(TASKS):
            kind = "new" if i > 1 else "similar" if j else "repeated"
            wish = WISHES[1 if day == 2 and kind == "similar" else 0]
            head = f"Ticket {day * 1000 + 17 * i + j}, 2026-11-{day + 9:02}. {task.format(wish=wish)}"
            out.append((kind, f"{head}\n```python\n{code}```"))
    return out[:: 3 if quick else 1]


@contextmanager
def serving(file: str, memory: Path | None) -> Iterator[tuple[str, int]]:
    """Start a server; return its address and process id."""
    command = [sys.executable, "-m", "foresay", "serve", "-m", file, "--port", "0", "--warmup", "--drafter", "suffix"]
    command += [] if memory is None else ["--memory", str(memory)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as child:
        assert child.stderr is not None
        address = next(line.split()[-1] for line in child.stderr if "listening at " in line)
        try:
            yield address.removesuffix("/v1"), child.pid
        finally:
            child.terminate()
            child.communicate()


def worked(url: str, ticket: str, new: int) -> tuple[float, int, str]:
    """Seconds after the first token, tokens after it, and text."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ticket}]
    body = {"messages": messages, "temperature": 0, "max_tokens": new, "stream": True}
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    first, text, counted, begun = 0.0, "", 0, 0
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, **options}, timeout=600) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            counted = event["usage"]["completion_tokens"]
            piece = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if piece and not first:
                first, begun = perf_counter(), counted
            text += piece or ""
    return perf_counter() - first, counted - begun, text


def day(url: str, number: int, quick: bool) -> list[tuple[str, float, int, str]]:
    out = [(kind, *worked(url, text, 48 if quick else 160)) for kind, text in tickets(number, quick)]
    rate = sum(one[2] for one in out) / sum(one[1] for one in out)
    log(f"  day {number}: {len(out)} tickets, {rate:.1f} tokens/s")
    return out


def speed(found: list[tuple[str, float, int, str]], kind: str = "") -> float:
    chosen = [one for one in found if kind in ("", one[0])]
    return sum(one[2] for one in chosen) / sum(one[1] for one in chosen)


def resident(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def burst(file: str, quick: bool) -> Figures:
    """Resident memory over the size of the model's file: at most during a burst, and after it."""
    dice, count, length = random.Random(0), 4 if quick else 32, 256 if quick else 2048
    sizes = []
    with serving(file, None) as (url, process), ThreadPoolExecutor(count) as clients:
        bodies = [
            {"prompt": [dice.randrange(1000, 50_000) for _ in range(length)], "max_tokens": 8, "ignore_eos": True}
            for _ in range(count)
        ]
        calls = [clients.submit(httpx.post, f"{url}/v1/completions", json=one, timeout=1800) for one in bodies]
        while not all(call.done() for call in calls):
            sizes.append(resident(process))
            sleep(0.5)
        assert all(call.result().status_code == 200 for call in calls)
        sleep(10)
        after = resident(process)
        log(
            "\n".join(
                line for line in httpx.get(f"{url}/metrics").text.splitlines() if "_bytes " in line and line[0] != "#"
            )
        )
    size = Path(file).stat().st_size
    return {"rss_over_model": after / size, "rss_burst_over_model": max(sizes) / size}


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("file")
    parser.add_argument("--no-burst", action="store_true", help="leave the burst out")
    args = parsed(parser)
    days: dict[bool, list[list[tuple[str, float, int, str]]]] = {}
    for with_memory in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            days[with_memory] = []
            for number in (1, 2):
                with serving(args.file, Path(folder) if with_memory else None) as (url, _):
                    days[with_memory].append(day(url, number, args.quick))
    (first, second), (plain_first, plain_second) = days[True], days[False]
    same = [one[3] == other[3] for one, other in zip(second, plain_second, strict=True)]
    figures: Figures = {
        "memory_speedup": speed(second) / speed(first),
        "without_memory": speed(plain_second) / speed(plain_first),
        **{
            f"memory_{kind}": speed(second, kind) / speed(plain_second, kind) for kind in ("repeated", "similar", "new")
        },
        "identical_share": sum(same) / len(same),
        **({} if args.no_burst else burst(args.file, args.quick)),
    }
    rows = [
        [
            ("with" if key else "without") + " --memory",
            f"day {i + 1}",
            len(one),
            sum(t[2] for t in one),
            f"{speed(one):.1f}",
        ]
        for key, found in days.items()
        for i, one in enumerate(found)
    ]
    about = f"{Path(args.file).name}, {Path(args.file).stat().st_size / 1e9:.2f} GB"
    text = table(["server", "day", "tickets", "tokens", "tokens/s"], rows)
    return publish(
        "kept_texts", figures, args, legend=LEGEND, model=about, text=[f"The days: {environment(about)}", text]
    )


if __name__ == "__main__":
    sys.exit(main())
