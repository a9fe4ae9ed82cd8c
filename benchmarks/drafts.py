"""The default draft on prompts it never saw: tokens per pass of the target, what a draft token costs, and the speed that is left.

    python benchmarks/drafts.py [--data FOLDER] [--head FOLDER] [--prompts N] [--quick] [--repeats N] [--write]

SmolLM2 in bf16 (named, not `auto`), greedy, batch 1, prompts included. `--data` is a folder with mt_bench, humaneval and
gsm8k/test in it, of which 20 prompts each are decoded, or as many as `--prompts` says; without it, the shipped prompts, which no
draft was trained on either. Tokens per pass do not depend on the batch or the machine, and are counted in batches; speeds are
medians of ratios to our plain decoding next to them in time. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from speed import section

import foresay
from foresay.decoding.protocols import Logits, ModelInput
from foresay.generation.method import Method
from foresay.lab.bench.peers import open_peer
from foresay.lab.bench.runners import MethodRunner, PeerRunner, PromptBlock
from foresay.lab.bench.turns import take_turns
from foresay.lab.data.datasets import load_items, subset
from foresay.lab.data.items import PromptItem
from foresay.lab.data.requests import RequestBuilder
from foresay.lab.measure.live_run import run_live
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import default_drafter
from foresay.records.provenance import machine
from foresay.records.results import Run

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
SETS = (("mt_bench", "mt_bench"), ("humaneval", "humaneval"), ("gsm8k/test.jsonl", "gsm8k"))
WANTED = {"tokens_per_pass": 2.0, "speedup_vs_plain": 1.5, "adaptive_vs_best_constant": 1.05}
AT_MOST = {"draft_cost_per_token": 0.12}


def held_out(folder: Path | None, count: int) -> list[PromptItem]:
    """`count` prompts of each set, or three times as many shipped ones."""
    if folder is None:
        return subset(load_items(), 3 * count)
    out = []
    for place, kind in SETS:
        path = folder / place
        file = path if path.is_file() else next(p for p in sorted(path.iterdir()) if ".jsonl" in p.name)
        items = subset(load_items(str(file), format=kind), count)
        out += [replace(item, id=f"{kind}-{item.id}", category=kind, followups=()) for item in items]
    return out


def log(text: str) -> None:
    print(text, flush=True)


def counted(target: foresay.Generator, methods: Sequence[Method], block: PromptBlock) -> dict[str, float]:
    """Tokens per pass of each method, over all prompts; every output is compared with plain decoding."""
    wanted = run_live(target.with_settings(max_batch_size=32), block.asks, block.params).outputs
    out = {}
    for method in methods:
        live = run_live(method.generator(target, 32), block.asks, block.params)
        assert live.outputs == wanted, f"{method.name} writes something else"
        out[method.name] = live.stats.block_efficiency or 0.0
        log(f"  {method.name:<60} {out[method.name]:.2f} tokens per pass")
    return out


def timed(
    target: foresay.Generator, methods: Sequence[Method], block: PromptBlock, repeats: int
) -> dict[str, list[float]]:
    """Speed-ups over plain decoding next to each run; transformers among them."""
    peer = open_peer("transformers", model=MODEL, dtype="bf16", threads=torch.get_num_threads())
    runners: list[Any] = [
        *(MethodRunner(target, method) for method in methods),
        PeerRunner(peer, target.target.eos_token_ids),
    ]
    turns = [(repeat, runner) for repeat in range(repeats) for runner in runners]
    out: dict[str, list[float]] = {}
    try:
        for run, _ in take_turns(
            MethodRunner(target, Method("none")), turns, block, warm=replace(block, asks=block.asks[:1]), between=2
        ):
            if isinstance(run, Run) and run.speed_up is not None:
                out.setdefault(run.cell.method, []).append(run.speed_up)
                log(f"  {run.cell.method:<60} {run.tokens_per_s:6.1f} tokens/s, {run.speed_up:.2f}x")
            elif not isinstance(run, Run):
                log(f"  {run.cell.method} failed: {run.error}")
    finally:
        peer.close()
    return {name: sorted(found) for name, found in out.items()}


def cost(target: foresay.Generator, drafter: str) -> float:
    """Seconds of one pass of a head over those of the target's, one column each behind 128 tokens, in turns."""
    generator = foresay.change(target, drafter=drafter)
    made: Any = generator.make_drafter()
    head, model = made.context.head, target.target.model
    ids = torch.randint(5, 40000, (1, 128), generator=torch.Generator().manual_seed(0))
    caches: list[Any] = [model.new_cache(), head.new_cache()]
    for cache in caches:
        cache.add_rows(1)
    hidden = model.forward(
        ModelInput(ids, [128], logits=Logits.NONE, hidden_layers=head.hidden_layers), caches[0]
    ).hidden
    features = head.features(hidden)
    head.forward(ModelInput(ids, [128], logits=Logits.NONE, features=features), caches[1])
    one = features[:, -1:].contiguous()
    took: list[list[float]] = [[], []]
    works: list[Callable[[], Any]] = [
        lambda: model.forward(ModelInput(ids[:, :1], [1]), caches[0]),
        lambda: head.forward(ModelInput(ids[:, :1], [1], logits=Logits.LAST, features=one), caches[1]),
    ]
    for _ in range(60):
        for which, work in enumerate(works):
            began = perf_counter()
            work()
            took[which].append(perf_counter() - began)
            caches[which].truncate([128])
    log(
        f"  a pass of the target {statistics.median(took[0]) * 1e3:.2f} ms, of the head {statistics.median(took[1]) * 1e3:.2f} ms"
    )
    return statistics.median(took[1]) / statistics.median(took[0])


def text_of(figures: dict[str, float], passes: dict[str, float], speeds: dict[str, list[float]]) -> str:
    """The figures as they stand in RESULTS.md."""
    out = [f"{machine()['processor']}, {torch.get_num_threads()} threads, torch {torch.__version__}", ""]
    out += ["| figure | measured | wanted |", "|---|---|---|"]
    for key, value in figures.items():
        wanted = f">= {WANTED[key]:g}" if key in WANTED else f"<= {AT_MOST[key]:g}" if key in AT_MOST else ""
        out.append(f"| {key} | {value:.3f} | {wanted} |")
    out += ["", "| method | tokens per pass | over our plain |", "|---|---|---|"]
    for name in dict.fromkeys((*passes, *speeds)):
        found = speeds.get(name)
        gain = "" if not found else f"{statistics.median(found):.2f}x ({found[0]:.2f} to {found[-1]:.2f})"
        out.append(f"| {name} | {f'{passes[name]:.2f}' if name in passes else ''} | {gain} |")
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="a folder with mt_bench, humaneval and gsm8k/test.jsonl")
    parser.add_argument("--head", default=MODEL, help="the head to draft with")
    parser.add_argument("--prompts", type=int, default=20, help="of each set")
    parser.add_argument("--quick", action="store_true", help="fewer prompts, tokens and repeats")
    parser.add_argument("--repeats", type=int, default=3, help="of each contender's timed run")
    parser.add_argument("--acceptance", help="an acceptance head to end drafts with")
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    args = parser.parse_args()
    target = foresay.load(MODEL, drafter="none", dtype="bf16")
    items, new = held_out(args.data, 4 if args.quick else args.prompts), 32 if args.quick else 128
    asks = RequestBuilder(target).first(items)
    block = PromptBlock("held out", asks, 1, foresay.SamplingParams(max_new_tokens=new))
    head = f"head({args.head})"
    default = default_drafter(MODEL, LoadOptions()).replace(f"head({MODEL}", f"head({args.head}")
    constants = [Method(head, str(k)) for k in range(1, 9)]
    others = [Method("suffix", "12"), *(Method(f"hybrid(suffix, head={args.head}; k={k})", "12") for k in (2, 3, 4, 5))]
    adaptive = [Method(head, length) for length in ("heuristic", *(f"confidence({t})" for t in (0.2, 0.4, 0.6)))]
    if args.acceptance:
        adaptive += [Method(head, f"acceptance({args.acceptance}, {h / 10})") for h in (1, 3, 5, 7, 9)]
    passes = counted(target, [*constants, *others, *adaptive], block)
    share = cost(target, head)
    few = replace(block, asks=asks[:: 20 if args.quick else 4])
    throughput = [Method(head, "throughput"), Method(default, "throughput"), Method("suffix", "throughput")]
    speeds = timed(
        target, [*constants[1:4], *others[:3], *adaptive[1:], *throughput], few, 1 if args.quick else args.repeats
    )
    median = {name: statistics.median(found) for name, found in speeds.items()}
    ours = {name: gain for name, gain in median.items() if name != "transformers"}
    best = max(ours, key=lambda name: ours[name])
    constant = max(median[m.name] for m in constants[1:4])
    figures = {
        "tokens_per_pass": max(passes.values()),
        "speedup_vs_plain": ours[best],
        "draft_cost_per_token": share,
        "adaptive_vs_best_constant": max(median[m.name] for m in (*adaptive[1:], throughput[0])) / constant,
    }
    if "transformers" in median:
        figures["speedup_vs_transformers"] = ours[best] / median["transformers"]
    log(f"best: {best}")
    if args.write:
        section(HERE / "RESULTS.md", "drafts", text_of(figures, passes, speeds))
    print(json.dumps({key: round(value, 4) for key, value in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
