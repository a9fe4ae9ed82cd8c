"""The default draft head on held-out prompts: tokens per pass of the target, cost of a draft token, and speed.

    python benchmarks/drafts.py [--data FOLDER] [--head FOLDER] [--prompts N] [--quick] [--repeats N] [--write]

SmolLM2 in bf16, greedy, batch 1, prompts included. `--data` is a folder with mt_bench, humaneval and gsm8k/test, of which
`--prompts` prompts each are decoded; without it, the shipped prompts, on which no draft head was trained either. Tokens per pass
depend on neither batch nor machine and are counted in batches; speeds are medians of ratios to plain decoding next to them in
time.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import (
    CONTEXT,
    MODEL,
    arguments,
    compared,
    environment,
    filled,
    log,
    opened,
    parsed,
    pass_seconds,
    plain_of,
    publish,
    random_prompt,
    table,
)

import foresay
from foresay.decoding.protocols import Logits, ModelInput
from foresay.generation.method import PLAIN, Method
from foresay.lab.bench.runners import MethodRunner, PromptBlock, Runner
from foresay.lab.data.datasets import load_items, subset
from foresay.lab.data.items import PromptItem
from foresay.lab.data.requests import RequestBuilder
from foresay.lab.measure.live_run import run_live
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import default_drafter

SETS = (("mt_bench", "mt_bench"), ("humaneval", "humaneval"), ("gsm8k/test.jsonl", "gsm8k"))
LEGEND = {
    "tokens_per_pass": ("most tokens per pass of any method", ">= 2"),
    "draft_cost_per_token": ("pass of the draft head / pass of the target", "<= 0.12"),
    "speedup_vs_plain": ("fastest method / plain", ">= 1.5"),
    "adaptive_vs_best_constant": ("best adaptive length / best constant length, head alone", ">= 1.05"),
    "speedup_vs_transformers": ("fastest method / transformers", ""),
}


def held_out(folder: Path | None, count: int) -> list[PromptItem]:
    """`count` prompts of each data set, or three times as many shipped ones without a folder."""
    if folder is None:
        return subset(load_items(), 3 * count)
    out = []
    for place, kind in SETS:
        path = folder / place
        file = path if path.is_file() else next(p for p in sorted(path.iterdir()) if ".jsonl" in p.name)
        items = subset(load_items(str(file), format=kind), count)
        out += [replace(item, id=f"{kind}-{item.id}", category=kind, followups=()) for item in items]
    return out


def counted(target: foresay.Generator, methods: Sequence[Method], block: PromptBlock) -> dict[str, float]:
    """Tokens per pass of each method over all prompts; every output must be that of plain decoding."""
    wanted = run_live(target.with_settings(max_batch_size=32), block.asks, block.params).outputs
    out = {}
    for method in methods:
        live = run_live(method.generator(target, 32), block.asks, block.params)
        assert live.outputs == wanted, f"{method.name} gives other output than plain decoding"
        out[method.name] = live.stats.block_efficiency or 0.0
        log(f"  {method.name:<60} {out[method.name]:.2f} tokens per pass")
    return out


def cost(target: foresay.Generator, drafter: str) -> float:
    """Time of a pass of a draft head over that of the target, one token each."""
    made: Any = foresay.change(target, drafter=drafter).make_drafter()
    head, model = made.context.head, target.target.model
    ids, layers = random_prompt(vocabulary=40000), head.hidden_layers
    cache: Any = model.new_cache()
    cache.add_rows(1)
    hidden = model.forward(ModelInput(ids, [CONTEXT], logits=Logits.NONE, hidden_layers=layers), cache).hidden
    features = head.features(head.joined(hidden))
    one = ModelInput(ids[:, :1], [1], logits=Logits.LAST, features=features[:, -1:].contiguous())
    head_cache = filled(head, ids, features=features)
    target_s, head_s = pass_seconds([(model, cache, ModelInput(ids[:, :1], [1])), (head, head_cache, one)])
    log(f"  a pass of the target takes {target_s * 1e3:.2f} ms, of the draft head {head_s * 1e3:.2f} ms")
    return head_s / target_s


def main() -> int:
    parser = arguments(__doc__, repeats=3)
    parser.add_argument("--data", type=Path, help="folder with mt_bench, humaneval and gsm8k/test.jsonl")
    parser.add_argument("--head", default=MODEL, help="draft head: an alias or a folder")
    parser.add_argument("--prompts", type=int, default=20, help="prompts of each data set (default: 20)")
    parser.add_argument("--acceptance", help="folder of an acceptance head that ends drafts")
    args = parsed(parser)
    target = foresay.load(MODEL, drafter="none", dtype="bf16")
    asks = RequestBuilder(target).first(held_out(args.data, 1 if args.quick else args.prompts))
    params = foresay.SamplingParams(max_new_tokens=16 if args.quick else 128)
    block = PromptBlock("held out", asks, 1, params)
    head = f"head({args.head})"
    default = default_drafter(MODEL, LoadOptions()).replace(f"head({MODEL}", f"head({args.head}")
    constants = [Method(head, str(k)) for k in range(1, 9)]
    others = [Method("suffix", "12"), *(Method(f"hybrid(suffix, head={args.head}; k={k})", "12") for k in (2, 3, 4, 5))]
    adaptive = [Method(head, length) for length in ("heuristic", *(f"confidence({t})" for t in (0.2, 0.4, 0.6)))]
    if args.acceptance:
        adaptive += [Method(head, f"acceptance({args.acceptance}, {h / 10})") for h in (1, 3, 5, 7, 9)]
    passes = counted(target, [*constants, *others, *adaptive], block)
    share = cost(target, head)
    timed = [*constants[1:4], *others[:3], *adaptive[1:]]
    timed += [Method(head, "throughput"), Method(default, "throughput"), Method("suffix", "throughput")]
    with opened(["transformers"], target, "bf16") as peers:
        runners: list[Runner] = [*(MethodRunner(target, method) for method in timed), *peers]
        few = replace(block, asks=asks[:: 20 if args.quick else 4])
        speeds = compared(plain_of(target), runners, few, 1 if args.quick else args.repeats, between=2)
    ours = {method.name: speeds[method.name].gain for method in timed}
    constant = max(ours[method.name] for method in constants[1:4])
    figures = {
        "tokens_per_pass": max(passes.values()),
        "draft_cost_per_token": share,
        "speedup_vs_plain": max(ours.values()),
        "adaptive_vs_best_constant": max(ours[m.name] for m in (*adaptive[1:], timed[-3])) / constant,
    }
    if peers[0].name in speeds:
        figures["speedup_vs_transformers"] = max(ours.values()) / speeds[peers[0].name].gain
    rows = [
        (name, f"{passes[name]:.2f}" if name in passes else "", speeds.get(name, ""))
        for name in dict.fromkeys((*passes, *speeds))
        if name != PLAIN
    ]
    text = (
        f"{len(asks)} prompts for tokens per pass, {len(few.asks)} for speeds, {params.max_new_tokens} tokens each. "
        f"{environment(f'{MODEL} in bf16')}"
    )
    methods = table(("method or engine", "tokens per pass", "over plain"), rows)
    return publish("drafts", figures, args, legend=LEGEND, text=[text, methods])


if __name__ == "__main__":
    sys.exit(main())
