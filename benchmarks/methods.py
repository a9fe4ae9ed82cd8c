"""Drafting methods on SmolLM2-135M by kind of prompt, against foresay's own plain decoding, in one run.

    python benchmarks/methods.py [--quick] [--only METHOD ...] [--categories NAME ...] [--write]

Each method decodes the same prompts of a category (batch 1, bf16, greedy, the same number of tokens); plain decoding runs after
every third method, so that a ratio compares neighbours in time. Speed-ups are over the time in decoding steps, prompts not
included. The bigram table is built from Python's standard library by `foresay distill --kind ngram`, never from the prompts.

Floor: a pass reads 269 MB of weights, 5 to 11 ms at 25 to 50 GB/s, however many tokens it scores; an n-gram drafter reads a few
dictionary entries. So a method's speed-up is at most its tokens per pass, and the difference is the larger pass.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from common import (
    HERE,
    MODEL,
    Figures,
    OwnDrafter,
    Timings,
    arguments,
    compared,
    log,
    parsed,
    plain_of,
    publish,
    spread,
    table,
)

import foresay
from foresay.decoding.proposal import Proposal
from foresay.decoding.rows import Row, Rows
from foresay.drafters import MaxGram
from foresay.generation.method import PLAIN
from foresay.lab.bench.runners import PromptBlock
from foresay.lab.data.datasets import load_items
from foresay.lab.data.requests import PromptRequest, RequestBuilder
from foresay.lab.measure.live_run import run_live
from foresay.lengths import ConstantLength

CATEGORIES = {
    "editing": "prompts.json",
    "completion": "methods_prompts.json",
    "code": "prompts.json",
    "maths": "prompts.json",
    "chat": "prompts.json",
    "summarising": "methods_prompts.json",
}
LEGEND = {
    "best_ngram": ("best n-gram drafter, by its mean", ""),
    "best_ngram_mean": ("its mean over the categories", ""),
    "best_ngram_edit": ("the same, editing", ""),
    "best_ngram_code": ("the same, completion of code", ""),
    "worst_under_throughput_policy": ("slowest method and category under the throughput length", ">= 0.97"),
    "worst_is": ("which", ""),
    "lookup_share_of_step": ("drafting at 8,000 tokens of context / plain step", ""),
    "plain_spread": ("difference between neighbouring runs of plain decoding", ""),
}


class Wrong(MaxGram):
    """Always proposes unlikely tokens: the cost of a bad draft."""

    def draft_tokens(self, row: Any, state: Any, count: int) -> list[int]:
        return [(int(row.tokens[-1]) * 7 + 1000 + i) % 40000 for i in range(count)]


class Slow(Wrong):
    """As wrong, and as slow per token as half a pass of the target."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: Any) -> Proposal:
        end = perf_counter() + 0.008 * max(budget)
        while perf_counter() < end:
            pass
        return super().propose(rows, budget, policy)


def constant(bigrams: Path) -> dict[str, tuple[str, int]]:
    """N-gram drafters of one draft length: name -> (drafter, length)."""
    return {
        "prompt_lookup, 8": ("prompt_lookup", 8),
        "max_gram, 10": ("max_gram", 10),
        "max_gram + bigrams, 10": (f"max_gram('{bigrams}')", 10),
        "ngram_store top-4, 8": ("ngram_store(filler_top_k=4)", 8),
        "suffix, 12": ("suffix(keep=false)", 12),
    }


def methods(bigrams: Path) -> dict[str, tuple[Any, Any]]:
    """Name -> (drafter, length)."""
    return constant(bigrams) | {
        "prompt_lookup, throughput": ("prompt_lookup", "throughput"),
        "max_gram + bigrams, throughput": (f"max_gram('{bigrams}')", "throughput"),
        "ngram_store top-4, throughput": ("ngram_store(filler_top_k=4)", "throughput"),
        "suffix, throughput": ("suffix(keep=false)", "throughput"),
        "always wrong, throughput": (Wrong, "throughput"),
        "slow and wrong, throughput": (Slow, "throughput"),
        "self 28 layers, throughput": ("self(28)", "throughput"),
    }


def bigram_table(folder: Path) -> Path:
    """A table of Python's standard library, code and documentation strings."""
    from foresay.cli.app import _run

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    path = folder / "bigrams.safetensors"
    texts = [word for file in files for word in ("--text", str(file))]
    code = _run(["distill", str(path), "--kind", "ngram", *texts, "--model", MODEL, "--order", "3"])
    assert code == 0
    return path


def requests(target: foresay.Generator, category: str, count: int) -> list[PromptRequest]:
    items = load_items(str(HERE / CATEGORIES[category]), category=category)
    return RequestBuilder(target).first(items[:: max(1, len(items) // count)][:count])


def draft_share(target: foresay.Generator, bigrams: Path, count: int) -> float:
    """Time of one draft at 8,000 tokens of context over a plain step at a short one; the slowest n-gram drafter.

    The context is made of the prompts, and grows by the tokens of a plain output.
    """
    ids = [token for name in CATEGORIES for ask in requests(target, name, count) for token in ask.token_ids]
    params = foresay.SamplingParams(max_new_tokens=64, ignore_eos=True)
    live = run_live(target, requests(target, "chat", 1), params)
    context, plain = (ids * (1 + 8000 // len(ids)))[:8000], live.stats.total_s / live.tokens
    shares = []
    for name, (drafter, length) in constant(bigrams).items():
        made = foresay.change(target, drafter=drafter, length=length).make_drafter()
        shares.append(propose_seconds(made, context, live.outputs[0], length) / plain)
        log(f"  {name}: {100 * shares[-1]:.2f}% of a step")
    return max(shares)


def propose_seconds(drafter: Any, context: list[int], tail: list[int], length: int) -> float:
    """Median seconds of one proposal, while the context grows by one token at a time."""
    row = Row(0, context, foresay.SamplingParams(max_new_tokens=200), limit=len(context) + 200)
    rows, policy = Rows([row]), ConstantLength(length)
    drafter.admit(rows, 0)
    drafter.propose(rows, [length], policy)  # the first reads the prompt
    times = []
    for token in tail:
        row.extend([token])
        began = perf_counter()
        drafter.propose(rows, [length], policy)
        times.append(perf_counter() - began)
    return statistics.median(times)


Results = Mapping[str, Mapping[str, Timings]]
"""Category -> method -> timings."""


def gain(timings: Timings) -> float:
    return statistics.median(timings.decoding_gains)


def methods_table(results: Results) -> str:
    rows = []
    for name in next(iter(results.values())):
        cells = [found[name] for found in results.values()]
        shown = [
            f"{gain(c):.2f}x ({c.stats['block_efficiency']:.2f}, {100 * (c.stats['draft_utilization'] or 0):.0f}%, "
            f"{100 * c.stats['draft_s'] / c.stats['total_s']:.1f}%)"
            for c in cells
        ]
        rows.append((name, *shown, f"{statistics.mean(map(gain, cells)):.2f}x"))
    return table(("method", *results, "mean"), rows)


def figures_of(results: Results, ngram: Sequence[str]) -> Figures:
    names = list(next(iter(results.values())))
    out: Figures = {}

    def mean(name: str) -> float:
        return statistics.mean(gain(found[name]) for found in results.values())

    if any(name in ngram for name in names):
        best = max((name for name in names if name in ngram), key=mean)
        out = {"best_ngram": best, "best_ngram_mean": mean(best)}
        for key, category in (("best_ngram_edit", "editing"), ("best_ngram_code", "completion")):
            if category in results:
                out[key] = gain(results[category][best])
    adaptive = {(n, c): gain(found[n]) for c, found in results.items() for n in names if n.endswith("throughput")}
    if adaptive:
        worst = min(adaptive, key=lambda key: adaptive[key])
        out |= {"worst_under_throughput_policy": adaptive[worst], "worst_is": " on ".join(worst)}
    return out


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--only", nargs="+", help="only methods whose names begin so")
    parser.add_argument("--categories", nargs="+", choices=CATEGORIES, default=list(CATEGORIES))
    args = parsed(parser)
    count, new = (2, 48) if args.quick else (5, 96)
    target = foresay.load(MODEL, drafter="none", dtype="bf16")
    results: dict[str, dict[str, Timings]] = {}
    apart: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        bigrams = bigram_table(Path(folder))
        share = draft_share(target, bigrams, count)
        for category in args.categories:
            log(category)
            chosen = [
                OwnDrafter(name, drafter, length).runner(target)
                for name, (drafter, length) in methods(bigrams).items()
                if not args.only or any(name.startswith(begin) for begin in args.only)
            ]
            params = foresay.SamplingParams(max_new_tokens=new, ignore_eos=True)
            block = PromptBlock(category, requests(target, category, count), 1, params)
            found = compared(plain_of(target), chosen, block, 1, between=3)
            apart.append(spread([run.seconds for run in found[PLAIN].runs]))
            results[category] = {name: one for name, one in found.items() if name != PLAIN}
        figures = figures_of(results, list(constant(bigrams)))
    figures |= {"lookup_share_of_step": share, "plain_spread": max(apart)}
    text = (
        "Speed-up over plain decoding (tokens per pass, share of draft tokens used, share of time drafting); batch 1, greedy, "
        f"{count} prompts x {new} tokens of each category."
    )
    return publish("methods", figures, args, legend=LEGEND, text=[text, methods_table(results)])


if __name__ == "__main__":
    sys.exit(main())
