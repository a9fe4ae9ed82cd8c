"""Speed and memory of the engine on SmolLM2-135M, as ratios measured in one run.

    python benchmarks/engine.py [--quick] [--only PART ...] [--write]

The floor of a bf16 decoding step on a CPU is the weights' bytes over the memory bandwidth: 269 MB at 25 to 50 GB/s are 5 to
11 ms. transformers and foresay decode the same prompts in turn, with the same weights, threads and number of tokens.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from common import (
    HERE,
    MODEL,
    Figures,
    OwnDrafter,
    arguments,
    compared,
    measured,
    opened,
    parsed,
    plain_of,
    publish,
    spread,
)

import foresay
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy, ModelInput
from foresay.decoding.rows import Rows
from foresay.generation.method import PLAIN, Method
from foresay.lab.bench.runners import MethodRunner, PromptBlock
from foresay.lab.data.datasets import load_items
from foresay.lab.data.requests import PromptRequest, RequestBuilder
from foresay.lab.measure.live_run import run_live
from foresay.models.cache.slot_cache import SlotCache

LOOKUP = Method("prompt_lookup", "8")
LEGEND = {
    "plain_vs_transformers": ("plain / transformers at its best, batch 1", ">= 1.25"),
    "plain_tokens_per_s": ("plain, batch 1, tokens/s", ""),
    "plain_spread": ("difference between neighbouring runs of plain decoding", ""),
    "batch32_vs_transformers_batch1": ("plain, batch 32 / transformers, batch 1", ">= 12"),
    "batch32_vs_transformers_batch32": ("plain / transformers, batch 32", ">= 1"),
    "overhead_share_b1": ("share of a step outside the model, batch 1", "<= 0.05"),
    "overhead_share_b32": ("share of a step outside the model, batch 32", "<= 0.1"),
    "top_p_nucleus_adds_b1": ("time that top-p 0.9 adds to a step, batch 1", "<= 0.1"),
    "top_p_nucleus_adds_b32": ("time that top-p 0.9 adds to a step, batch 32", "<= 0.1"),
    "top_p_wide_adds_b1": ("time that top-p 0.98 at temperature 1.5 adds, batch 1", "<= 0.25"),
    "top_p_wide_adds_b32": ("time that top-p 0.98 at temperature 1.5 adds, batch 32", "<= 0.25"),
    "lookup_edit_speedup": ("prompt lookup / plain, editing and extraction", ">= 1.5"),
    "lookup_edit_tokens_per_pass": ("its tokens per pass", ""),
    "lookup_chat_speedup": ("prompt lookup / plain, chat", ">= 0.97"),
    "lookup_chat_tokens_per_pass": ("its tokens per pass", ""),
    "bf16_identical_share": ("bf16 outputs that are those of plain decoding at batch 1", ">= 1"),
    "bf16_compared": ("outputs compared", ""),
    "peak_above_loaded_mb": ("peak memory of a batch of 16 above the loaded model, caches not counted, MB", "<= 300"),
    "cache_mb": ("its caches, MB", ""),
}


class Bench:
    """The target, its prompts, and the memory of the process when it was loaded."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.quick: bool = args.quick
        self.target = foresay.load(MODEL, drafter="none", dtype="bf16")
        self.loaded_bytes = peak_bytes()
        self.items = load_items(str(HERE / "prompts.json"))

    def requests(self, *categories: str) -> list[PromptRequest]:
        items = [item for item in self.items if not categories or item.category in categories]
        return RequestBuilder(self.target).first(items)

    def block(self, asks: Sequence[PromptRequest], batch: int, new: int) -> PromptBlock:
        new = new // 8 if self.quick else new
        return PromptBlock("prompts", asks, batch, foresay.SamplingParams(max_new_tokens=new, ignore_eos=True))

    def outputs(self, runner: MethodRunner, block: PromptBlock) -> list[list[int]]:
        runner.prepare(block)
        return runner.run(block, block.asks).outputs


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory(bench: Bench) -> Figures:
    """Peak memory of a long batch above the loaded model, the caches not counted."""
    session = foresay.change(bench.target, drafter="prompt_lookup", length=8, max_batch_size=16).session()
    params = foresay.SamplingParams(max_new_tokens=32 if bench.quick else 128, ignore_eos=True)
    for ask in bench.requests("editing")[:16]:
        session.submit(list(ask.token_ids), params, text=False)
    cache_bytes = 0
    while session.has_work:
        session.step()
        if isinstance(session.engine.cache, SlotCache):
            cache_bytes = max(cache_bytes, session.engine.cache.nbytes)
    above = peak_bytes() - bench.loaded_bytes - cache_bytes
    return {"peak_above_loaded_mb": above / 1e6, "cache_mb": cache_bytes / 1e6}


def transformers(bench: Bench) -> Figures:
    """Plain decoding against transformers: its better cache at batch 1, and its left-padded batch of 32."""
    asks = bench.requests("chat")
    few, many = bench.block(asks[:2], 1, 128), bench.block(asks[:32], 32, 128)
    repeats = 1 if bench.quick else 3
    with opened(["transformers", "transformers(cache=static)"], bench.target, "bf16") as (dynamic, static):
        plain, turns = plain_of(bench.target), []
        for _ in range(repeats):
            one = compared(plain, [dynamic, static], few, 1, same_output=False)
            turns.append((one, compared(plain, [dynamic], many, 1, same_output=False)))
    names = (dynamic.name, static.name)
    best = max(names, key=lambda name: statistics.median(one[name].gain for one, _ in turns))
    ratios = {
        "plain_vs_transformers": [1 / one[best].gain for one, _ in turns],
        "plain_tokens_per_s": [one[PLAIN].rate for one, _ in turns],
        "batch32_vs_transformers_batch1": [more[PLAIN].rate / one[dynamic.name].rate for one, more in turns],
        "batch32_vs_transformers_batch32": [1 / more[dynamic.name].gain for _, more in turns],
    }
    apart = spread([run.seconds for one, _ in turns for run in one[PLAIN].runs])
    return {key: statistics.median(found) for key, found in ratios.items()} | {"plain_spread": apart}


def overhead(bench: Bench) -> Figures:
    """Time of a step outside the model's forward passes, greedy and sampled, as shares of a greedy step."""
    asks, out = bench.requests("chat")[:32], Figures()
    kinds = {"greedy": (0.0, 1.0), "nucleus": (0.7, 0.9), "wide": (1.5, 0.98)}
    for name, rows, new in (("b1", asks[:1], 128), ("b32", asks, 48)):
        block = bench.block(rows, len(rows), new)
        generator = bench.target.with_settings(max_batch_size=len(rows))
        outside: dict[str, list[float]] = {kind: [] for kind in kinds}
        steps = []
        for repeat in range(1 if bench.quick else 3):
            for kind, (temperature, top_p) in kinds.items():
                params = replace(block.params, temperature=temperature, top_p=top_p, seed=repeat)
                stats = run_live(generator, rows, params).stats
                outside[kind].append((stats.total_s - stats.target_s) / stats.num_tokens)
                if kind == "greedy":
                    steps.append(stats.total_s / stats.num_tokens)
        step, median = statistics.median(steps), {k: statistics.median(v) for k, v in outside.items()}
        out[f"overhead_share_{name}"] = median["greedy"] / step
        for kind in ("nucleus", "wide"):
            out[f"top_p_{kind}_adds_{name}"] = (median[kind] - median["greedy"]) / step
    return out


def lookup(bench: Bench) -> Figures:
    """Prompt lookup where the prompt contains much of the answer, and where it does not."""
    out = Figures()
    method = Method("prompt_lookup").fixed
    for name, categories, every in (("edit", ("editing", "extraction"), 4), ("chat", ("chat",), 6)):
        asks = bench.requests(*categories)[:: 2 * every if bench.quick else every]
        block = bench.block(asks, 1, 128)
        runner = MethodRunner(bench.target, method)
        found = compared(plain_of(bench.target), [runner], block, 1 if bench.quick else 2)[method.name]
        out[f"lookup_{name}_speedup"] = found.gain
        out[f"lookup_{name}_tokens_per_pass"] = found.stats["block_efficiency"]
    return out


class Recorded:
    """Drafts of recorded outputs with an error now and then, so that every draft length is accepted and rejected."""

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, outputs: dict[tuple[int, ...], list[int]]) -> None:
        """outputs: by the token ids of the prompt."""
        self.outputs = outputs

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        drafts = []
        for row, n in zip(rows, budget, strict=True):
            n = min(n, 1 + row.size % 8)
            output = self.outputs[tuple(map(int, row.tokens[: row.prompt_length]))]
            draft = list(output[row.num_new : row.num_new + n])
            if draft and row.size % 3 == 0:
                draft[-1] = (draft[-1] + 1) % 40000
            drafts.append(draft)
        width = max(map(len, drafts))
        padded = [draft + [0] * (width - len(draft)) for draft in drafts]
        return Proposal(torch.tensor(padded, dtype=torch.int64).view(len(rows), width), list(map(len, drafts)))

    def admit(self, *args: Any) -> None: ...

    def observe(self, *args: Any) -> None: ...

    def rearrange(self, *args: Any) -> None: ...

    def reset(self) -> None: ...


def identical(bench: Bench) -> Figures:
    """The share of greedy bf16 outputs, with drafts and in batches of 8, that are those of plain decoding at batch 1."""
    asks = bench.requests()[: 100 : 10 if bench.quick else 1]
    params = foresay.SamplingParams(max_new_tokens=128, ignore_eos=True)
    alone, eight = (PromptBlock("prompts", asks, batch, params) for batch in (1, 8))
    plain = plain_of(bench.target)
    wanted = bench.outputs(plain, alone)
    known = {tuple(ask.token_ids): output for ask, output in zip(asks, wanted, strict=True)}
    drafted = (
        MethodRunner(bench.target, LOOKUP),
        OwnDrafter("recorded", lambda: Recorded(known), 8).runner(bench.target),
    )
    sides = [(one, block) for block in (alone, eight) for one in (plain, *drafted)][1:]
    same = total = 0
    for runner, block in sides:
        for ask, a, b in zip(asks, wanted, bench.outputs(runner, block), strict=True):
            total, same = total + 1, same + (a == b)
            if a != b:
                print(f"  {runner.name}, batch {block.batch_size}, {ask.id}: {difference(bench, ask, a, b)}")
    return {"bf16_identical_share": same / total, "bf16_compared": total}


def difference(bench: Bench, ask: PromptRequest, a: Sequence[int], b: Sequence[int]) -> str:
    """The first position at which two outputs differ, and the margin between the two highest scores there."""
    position = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    model: Any = bench.target.target.model
    cache = model.new_cache()
    cache.add_rows(1)
    context = [*ask.token_ids, *a[:position]]
    top = (
        model.forward(ModelInput(torch.tensor([context]), [len(context)]), cache).scores()[0, -1].float().topk(2).values
    )
    return f"other token at position {position}, margin {float(top[0] - top[1]):.4f}"


PARTS: dict[str, Callable[[Bench], Figures]] = {
    "memory": memory,
    "transformers": transformers,
    "overhead": overhead,
    "lookup": lookup,
    "identical": identical,
}


def main() -> int:
    args = parsed(arguments(__doc__, parts=PARTS))
    bench = Bench(args)
    parts = {name: partial(part, bench) for name, part in PARTS.items()}
    return measured(parts, args.only, partial(publish, "engine", args=args, legend=LEGEND))


if __name__ == "__main__":
    sys.exit(main())
