"""Drafts on held-out prompts: tokens per pass of the target, cost of drafting, and speed, by method and by kind of prompt.

    python benchmarks/drafts.py [--data FOLDER] [--head FOLDER] [--block FOLDER] [--real FILE --real-head FOLDER]
                                [--only PART ...] [--prompts N] [--quick] [--repeats N] [--write]

Greedy, batch 1, prompts included. SmolLM2 in bf16 and in 4 bits; `--real` is a model of real size, with a draft head that
`foresay distill` made for it. `--data` is a folder with mt_bench, humaneval and gsm8k/test, of which `--prompts` prompts each are
decoded; without it, the shipped prompts. No draft was trained on any of them. Tokens per pass depend on neither batch nor machine
and are counted in batches; speeds are medians of ratios to plain decoding next to them in time. Recurrent targets are in
recurrent.py.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from common import (
    CONTEXT,
    MODEL,
    Figures,
    Timings,
    arguments,
    compared,
    environment,
    filled,
    log,
    measured,
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
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import default_drafter
from foresay_lab.bench.runners import MethodRunner, PromptBlock
from foresay_lab.data.datasets import load_items, subset
from foresay_lab.data.items import PromptItem
from foresay_lab.data.requests import RequestBuilder
from foresay_lab.measure.live_run import run_live

SETS = (("mt_bench", "mt_bench"), ("humaneval", "humaneval"), ("gsm8k/test.jsonl", "gsm8k"))
PARTS = ("bf16", "int4", "real")
LEGEND = {
    "tokens_per_pass": ("most tokens per pass of any method", ">= 3.3"),
    "draft_cost_per_pass": ("drafting in a step of the default method / plain pass", "<= 0.2"),
    "draft_cost_per_token": ("pass of the draft head / pass of the target", "<= 0.12"),
    "speedup_vs_plain": ("fastest method / plain", ">= 2.2 on AVX-512, 1.8 on AVX2"),
    "adaptive_vs_best_constant": ("default / best constant length of its drafters", ">= 1.0"),
    "adaptive_vs_best_constant_by_kind": ("the same, on the kind of prompts where it is least", ">= 1.0"),
    "head_adaptive_vs_best_constant": ("head alone, adaptive / best constant length", ">= 1.0"),
    "int4_tokens_per_pass": ("4 bits: most tokens per pass of any method", ""),
    "int4_draft_cost_per_pass": ("4 bits: drafting in a step of the default method / plain pass", "<= 0.2"),
    "int4_draft_cost_per_token": ("4 bits: pass of the draft head / pass of the target", ""),
    "int4_adaptive_vs_best_constant": ("4 bits: default / best constant length of its drafters", ">= 1.0"),
    "int4_adaptive_vs_best_constant_by_kind": ("4 bits: the same, on the kind of prompts where it is least", ">= 1.0"),
    "int4_speedup_vs_plain": ("4 bits: fastest method / plain", ">= 2.2 on AVX-512, 1.8 on AVX2"),
    "real_size_tokens_per_pass": ("model of real size: most tokens per pass of any method", ""),
    "real_size_draft_cost_per_pass": ("model of real size: drafting in a step of the hybrid / plain pass", "<= 0.2"),
    "real_size_draft_cost_per_token": ("model of real size: pass of the draft head / pass of the target", ""),
    "real_size_suffix_speedup": ("model of real size: `suffix` alone / plain", ""),
    "real_size_speedup": ("model of real size: fastest method with its trained head / plain", ">= 2.0"),
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
        # trees are drafted for single rows
        live = run_live(method.generator(target, 1 if "nodes=" in method.drafter else 32), block.asks, block.params)
        assert live.outputs == wanted, f"{method.name} gives other output than plain decoding"
        out[method.name] = live.stats.block_efficiency or 0.0
        log(f"  {method.name:<60} {out[method.name]:.2f} tokens per pass")
    return out


def cost(target: foresay.Generator, drafter: str) -> float:
    """Time of a pass of a draft head over that of the target, one token each."""
    made: Any = foresay.change(target, drafter=drafter).make_drafter()
    head, model = made.context.reader, target.target.model
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


def drafting(speeds: dict[str, Timings], name: str) -> float:
    """Seconds of drafting in each step of a method, over those of a plain pass."""
    drafted, plain = speeds[name].stats, speeds[PLAIN].stats
    return float(drafted["draft_s"] / drafted["num_passes"] / (plain["total_s"] / plain["num_passes"]))


def by_kind(speeds: dict[str, Timings], name: str) -> dict[str, float]:
    """Speed of a method over plain decoding on each kind of prompt, in decoding steps alone."""

    def seconds(timings: Timings) -> dict[str, float]:
        out: defaultdict[str, float] = defaultdict(float)
        for run in timings.runs:
            for prompt in run.prompts:
                out[prompt.category] += prompt.spec_time / len(timings.runs)
        return out

    plain = seconds(speeds[PLAIN])
    return {kind: plain[kind] / spent for kind, spent in seconds(speeds[name]).items()}


@dataclass(frozen=True)
class Methods:
    """The methods of one target: counted alone, timed with constant lengths, and adaptive."""

    counted: Sequence[Method]
    constant: Sequence[Method]
    """Constant lengths of the default's drafters."""
    head_constant: Sequence[Method]
    others: Sequence[Method]
    head_adaptive: Method
    default: Method

    @property
    def timed(self) -> list[Method]:
        return [*self.head_constant, *self.constant, *self.others, self.head_adaptive, self.default]

    @classmethod
    def of(cls, head: str, block: str | None, default: str, acceptance: str | None) -> Methods:
        """head, block, acceptance: alias or folder of a draft head, a block drafter and an acceptance head."""
        alone = f"head({head})"
        hybrids = [Method(f"hybrid(suffix, head={head}; k={k})", "12") for k in (2, 4)]
        hybrids += [Method(f"hybrid(suffix, head({head}, nodes={n}); k={n})", "12") for n in (8, 12)]
        more = [Method(alone, str(k)) for k in (4, 6)]
        more += [Method(f"hybrid(suffix, head={head}; k=6)", "12")]
        more += [Method(f"head({head}, nodes={n})", str(n)) for n in (8, 15)]
        more += [Method(f"hybrid(suffix, head({head}, nodes=15); k=15)", "15")]
        others = [Method(alone, "confidence(0.4)"), Method("suffix", "throughput")]
        if acceptance:
            others += [Method(alone, f"acceptance({acceptance}, {h / 10})") for h in (3, 5, 7)]
        if block:
            others += [Method(f"block({block})", "throughput"), Method(f"hybrid(suffix, block={block})", "throughput")]
            more += [Method(f"block({block})", str(k)) for k in (3, 6)]
            more += [Method(f"block({block}, sample=false, nodes={n})", str(n)) for n in (12, 24)]
        return cls(
            more,
            [*hybrids, Method("suffix", "12")],
            [Method(alone, str(k)) for k in (2, 3)],
            others,
            Method(alone, "throughput"),
            Method(default, "throughput"),
        )


class Report:
    """The rows of the table that all parts share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows: list[tuple[object, ...]] = []
        self.text: list[str] = []

    def block(self, target: foresay.Generator, count: int) -> PromptBlock:
        asks = RequestBuilder(target).first(held_out(self.args.data, 1 if self.args.quick else count))
        return PromptBlock("held out", asks, 1, foresay.SamplingParams(max_new_tokens=16 if self.args.quick else 128))

    def timed(self, target: foresay.Generator, methods: Sequence[Method], block: PromptBlock) -> dict[str, Timings]:
        runners = [MethodRunner(target, one) for one in methods]
        return compared(plain_of(target), runners, block, 1 if self.args.quick else self.args.repeats, between=2)

    def add(self, name: str, passes: dict[str, float], speeds: dict[str, Timings], counts: tuple[int, int]) -> None:
        for method in dict.fromkeys((*passes, *speeds)):
            if method != PLAIN:
                known = method in speeds and speeds[method].stats
                kinds = by_kind(speeds, method) if known else {}
                self.rows.append(
                    (
                        name,
                        method,
                        f"{passes[method]:.2f}" if method in passes else "",
                        speeds.get(method, ""),
                        ", ".join(f"{kind} {gain:.2f}x" for kind, gain in kinds.items()),
                        f"{drafting(speeds, method):.2f}" if known else "",
                    )
                )
        self.text.append(
            f"{name}: {counts[0]} prompts for tokens per pass, {counts[1]} for speeds, up to 128 tokens each."
        )


def smollm2(report: Report, weights: str) -> Figures:
    """SmolLM2 in bf16, with all methods, or rounded to 4 bits, with the timed methods."""
    args = report.args
    is_all = weights == "bf16"
    target = foresay.load(MODEL, drafter="none", weights=weights)
    block = report.block(target, args.prompts)
    default = default_drafter(MODEL, LoadOptions()).replace(f"head({MODEL}", f"head({args.head}")
    methods = Methods.of(args.head, args.block, default, args.acceptance)
    some = [*methods.head_constant, *methods.constant]
    passes = counted(target, [*some, *methods.counted] if is_all else some, block)
    share = cost(target, methods.head_adaptive.drafter)
    few = replace(block, asks=block.asks[:: 20 if args.quick else max(len(block.asks) // 24, 1)])
    timed = methods.timed if is_all else [*methods.constant, methods.others[1], methods.default]
    speeds = report.timed(target, timed, few)
    gains = {method.name: speeds[method.name].gain for method in timed}
    report.add(f"SmolLM2, {weights}", passes, speeds, (len(block.asks), len(few.asks)))
    figures: Figures = {
        "tokens_per_pass": max(passes.values()),
        "draft_cost_per_pass": drafting(speeds, methods.default.name),
        "draft_cost_per_token": share,
        "speedup_vs_plain": max(gains.values()),
        **adaptive(speeds, methods.default, methods.constant),
    }
    if is_all:
        figures["head_adaptive_vs_best_constant"] = adaptive(speeds, methods.head_adaptive, methods.head_constant)[
            "adaptive_vs_best_constant"
        ]
    return figures if is_all else {f"int4_{key}": value for key, value in figures.items()}


def adaptive(speeds: dict[str, Timings], method: Method, constants: Sequence[Method]) -> Figures:
    """Adaptive lengths over the best constant ones, over all prompts and on the kind where that is least."""
    kinds = by_kind(speeds, method.name)
    best = {kind: max(by_kind(speeds, one.name)[kind] for one in constants) for kind in kinds}
    return {
        "adaptive_vs_best_constant": speeds[method.name].gain / max(speeds[one.name].gain for one in constants),
        "adaptive_vs_best_constant_by_kind": min(gain / best[kind] for kind, gain in kinds.items()),
    }


def real(report: Report) -> Figures:
    """A model of real size in its own file, with the head that was trained for it."""
    args, target = report.args, foresay.load(report.args.real, drafter="none")
    head = args.real_head
    block = report.block(target, args.prompts)
    few = replace(block, asks=block.asks[:: 20 if args.quick else 10])
    chain, hybrid = f"hybrid(suffix, head={head}; k=4)", f"hybrid(suffix, head({head}, nodes=15); k=15)"
    drafters = {name: Method(name, "throughput") for name in (chain, hybrid, "suffix")}
    passes = counted(target, [Method(f"head({head})", "4"), Method(chain, "12")], block)
    passes |= counted(target, [Method(f"hybrid(suffix, head({head}, nodes=8); k=8)", "12")], few)
    share = cost(target, f"head({head})")
    constant = [Method(f"hybrid(suffix, head={head}; k=3)", "12")]
    timed = [*constant, *drafters.values()]
    speeds = report.timed(target, timed, few)
    report.add(Path(args.real).stem, passes, speeds, (len(block.asks), len(few.asks)))
    return {
        "real_size_tokens_per_pass": max(passes.values()),
        "real_size_draft_cost_per_pass": drafting(speeds, drafters[hybrid].name),
        "real_size_draft_cost_per_token": share,
        "real_size_speedup": max(speeds[one.name].gain for one in timed if "head" in one.name),
        "real_size_suffix_speedup": speeds[drafters["suffix"].name].gain,
    }


def main() -> int:
    parser = arguments(__doc__, parts=PARTS, repeats=3)
    parser.add_argument("--data", type=Path, help="folder with mt_bench, humaneval and gsm8k/test.jsonl")
    parser.add_argument("--head", default=MODEL, help="draft head: an alias or a folder")
    parser.add_argument("--block", help="folder of a block drafter")
    parser.add_argument("--acceptance", help="folder of an acceptance head that ends drafts")
    parser.add_argument("--real", help="file of a model of real size")
    parser.add_argument("--real-head", help="folder of a draft head for it")
    parser.add_argument("--prompts", type=int, default=40, help="prompts of each data set (default: 40)")
    args = parsed(parser)
    if (args.real is None) != (args.real_head is None):
        parser.error("--real and --real-head go together")
    report = Report(args)
    parts = {name: partial(smollm2, report, name) for name in ("bf16", "int4")}
    if args.real:
        parts["real"] = partial(real, report)

    def written(figures: Figures) -> int:
        header = (
            "target",
            "method",
            "tokens per pass",
            "over plain",
            "by kind, decoding steps",
            "drafting / plain pass",
        )
        text = [*report.text, environment("as above"), table(header, report.rows)]
        names = {"bf16": f"{MODEL} in bf16", "int4": f"{MODEL} in 4 bits", "real": Path(args.real or "").stem}
        model = ", ".join(names[part] for part in args.only or parts)
        return publish("drafts", figures, args, legend=LEGEND, model=model, text=text)

    return measured(parts, args.only, written)


if __name__ == "__main__":
    sys.exit(main())
