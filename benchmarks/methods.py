"""Drafting methods on SmolLM2-135M by kind of prompt, against foresay's own plain decoding, in one run.

    python benchmarks/methods.py [--quick] [--only METHOD ...] [--write]

For each category every method decodes the same prompts (batch 1, bf16, greedy, the same number of tokens); plain decoding
runs after every third, over the same prompt, so that a ratio compares neighbours in time, and the spread of plain with
itself is reported. The n-gram table is made from the package's and Python's own source files and documentation by `foresay ngram
build`, never from the prompts. `--write` puts the table into benchmarks/RESULTS.md. The last line is one JSON object.

Floor: a pass reads 269 MB of weights, 5 to 11 ms at 25 to 50 GB/s, whatever it scores; a look-up reads a few dictionary
entries. So a method's speed-up is at most its tokens per pass, and what is lost against that is the wider pass.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from engine import machine

import foresay
from foresay.decoding.outcome import Step
from foresay.decoding.proposal import Proposal
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import MaxGram
from foresay.engine import Stats
from foresay.generation.generator import Generator

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
CATEGORIES = {
    "editing": ("prompts.json", "editing"),
    "completion": ("methods_prompts.json", "completion"),
    "code": ("prompts.json", "code"),
    "maths": ("prompts.json", "maths"),
    "chat": ("prompts.json", "chat"),
    "summarising": ("methods_prompts.json", "summarising"),
}


_BETWEEN = 3
"""Methods measured between two runs of plain decoding."""


class Wrong(MaxGram):
    """Always proposes something unlikely: what a bad draft costs."""

    def draft_tokens(self, row: Any, state: Any, count: int) -> list[int]:
        return [(int(row.tokens[-1]) * 7 + 1000 + i) % 40000 for i in range(count)]


class Slow(Wrong):
    """As wrong, and as slow per token as half a pass of the target."""

    def propose(self, rows: Rows, budget: Sequence[int], policy: Any) -> Proposal:
        end = perf_counter() + 0.008 * max(budget)
        while perf_counter() < end:
            pass
        return super().propose(rows, budget, policy)


def methods(table: Path) -> dict[str, tuple[Any, Any]]:
    """Name -> (drafter, length)."""
    return {
        "prompt_lookup, 8": ("prompt_lookup", 8),
        "max_gram, 10": ("max_gram", 10),
        "max_gram + bigrams, 10": (f"max_gram('{table}')", 10),
        "ngram_store top-4, 8": ("ngram_store(filler_top_k=4)", 8),
        "suffix, 12": ("suffix(keep=false)", 12),
        "prompt_lookup, throughput": ("prompt_lookup", "throughput"),
        "max_gram + bigrams, throughput": (f"max_gram('{table}')", "throughput"),
        "ngram_store top-4, throughput": ("ngram_store(filler_top_k=4)", "throughput"),
        "suffix, throughput": ("suffix(keep=false)", "throughput"),
        "always wrong, throughput": (Wrong, "throughput"),
        "slow and wrong, throughput": (Slow, "throughput"),
        "self 28 layers, throughput": ("self(28)", "throughput"),
    }


NGRAM = (
    "prompt_lookup, 8",
    "max_gram, 10",
    "max_gram + bigrams, 10",
    "ngram_store top-4, 8",
    "suffix, 12",
)


def corpus_table(folder: Path) -> Path:
    """A bigram table of Python's standard library and its documentation strings: code and English, no prompt of ours."""
    from foresay.cli.app import _run

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    path = folder / "bigrams.safetensors"
    code = _run(["ngram", "build", *map(str, files), "--model", MODEL, "--order", "3", "--output", str(path)])
    assert code == 0
    return path


def spread(ratios: Sequence[float]) -> float:
    """How far two runs of the same thing lie apart, nine times out of ten."""
    return sorted(abs(ratio - 1) for ratio in ratios)[int(0.9 * len(ratios))]


@dataclass(slots=True)
class Cell:
    """One method on one category."""

    seconds: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    identical: bool = True

    @property
    def speed_up(self) -> float:
        return sum(self.plain) / sum(self.seconds)


class Bench:
    def __init__(self, quick: bool, table: Path) -> None:
        self.count, self.new, self.repeats = (2, 48, 1) if quick else (5, 96, 1)
        self.plain = foresay.load(MODEL, drafter="none", dtype="bf16")
        self.methods = methods(table)
        self._plain_outputs: dict[str, dict[int, list[int]]] = {}
        self.apart: list[float] = []
        """Ratios of neighbouring runs of plain decoding over the same prompt."""

    def prompts(self, category: str) -> list[list[int]]:
        file, name = CATEGORIES[category]
        rows = [row for row in json.loads((HERE / file).read_text()) if row["category"] == name]
        step = max(1, len(rows) // self.count)
        return [self._ids(row) for row in rows[::step][: self.count]]

    def _ids(self, row: dict[str, Any]) -> list[int]:
        tokenizer: Any = self.plain.tokenizer
        if row.get("raw"):
            return list(tokenizer(row["prompt"]).input_ids)
        chat = [{"role": "user", "content": row["prompt"]}]
        return list(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])

    def run(self, generator: Generator, prompts: Sequence[Sequence[int]]) -> tuple[float, Stats, list[list[int]]]:
        """Seconds of decoding alone (prompts are filled before the clock starts), counts and outputs."""
        seconds, stats, outputs = 0.0, Stats(), []
        for ids in prompts:
            engine = generator.engine()
            engine.submit(ids, SamplingParams(max_new_tokens=self.new, ignore_eos=True))
            out: list[int] = []
            first = engine.step()
            while not first:
                first = engine.step()
            began = perf_counter()
            steps = list(first)
            while engine.has_work:
                steps += engine.step()
            seconds += perf_counter() - began
            for step in steps:
                stats.add(step)
                out += step.token_ids
            assert engine.draft_failures == 0, engine.drafter and engine.drafter.last_error
            outputs.append(out)
        return seconds, stats, outputs

    def plain_run(self, category: str, place: int, prompt: Sequence[int]) -> float:
        seconds, _, outputs = self.run(self.plain, [prompt])
        known = self._plain_outputs.setdefault(category, {}).setdefault(place, outputs[0])
        assert known == outputs[0]
        return seconds

    def category(self, category: str, names: Sequence[str]) -> dict[str, Cell]:
        prompts = self.prompts(category)
        cells = {name: Cell() for name in names}
        generators = {name: self._generator(name, prompts) for name in names}
        for place, prompt in [*enumerate(prompts)] * self.repeats:
            before = self.plain_run(category, place, prompt)
            for begin in range(0, len(names), _BETWEEN):
                some = names[begin : begin + _BETWEEN]
                for name in some:
                    self._measure(cells[name], generators[name], self._plain_outputs[category][place], prompt)
                after = self.plain_run(category, place, prompt)
                for name in some:
                    cells[name].plain.append((before + after) / 2)
                self.apart.append(after / before)
                before = after
        return cells

    def _generator(self, name: str, prompts: Sequence[Sequence[int]]) -> Generator:
        drafter, length = self.methods[name]
        generator = foresay.change(self.plain, drafter=drafter, length=length)
        if length == "throughput":  # its warm-up is not what is measured
            self.run(generator, prompts[:1])
        return generator

    def _measure(self, cell: Cell, generator: Generator, wanted: list[int], prompt: Sequence[int]) -> None:
        seconds, stats, outputs = self.run(generator, [prompt])
        cell.seconds.append(seconds)
        cell.stats.merge(stats)
        cell.identical &= outputs[0] == wanted


def look_up_share(bench: Bench) -> dict[str, float]:
    """Seconds of proposing at 8k tokens of context, as a share of a plain SmolLM2 step at a short one (the stricter way).

    The context is made of the prompts, and grows by the tokens of a plain output.
    """
    ids = [token for category in CATEGORIES for prompt in bench.prompts(category) for token in prompt]
    context = (ids * (1 + 8000 // len(ids)))[:8000]
    engine = bench.plain.engine()
    engine.submit(bench.prompts("chat")[0], SamplingParams(max_new_tokens=64, ignore_eos=True))
    steps: list[Step] = []
    while engine.has_work:
        steps += engine.step()
    plain = statistics.median(step.total_s for step in steps)
    tail = [token for step in steps for token in step.token_ids]
    out: dict[str, float] = {}
    for name in NGRAM:
        drafter, length = bench.methods[name]
        generator = foresay.change(bench.plain, drafter=drafter, length=length)
        drafter_of = generator.engine().drafter
        assert drafter_of is not None
        out[name] = _propose_seconds(drafter_of, context, tail, length) / plain
    return out


def _propose_seconds(drafter: Any, context: list[int], tail: list[int], length: int) -> float:
    """Median seconds of one proposal and what it observes, while the context grows by a token a time."""
    from foresay.decoding.rows import Row
    from foresay.lengths import ConstantLength

    row = Row(0, context, SamplingParams(max_new_tokens=200), limit=len(context) + 200)
    rows = Rows([row])
    drafter.admit(rows, 0)
    policy = ConstantLength(length)
    drafter.propose(rows, [length], policy)  # the first reads the prompt
    times = []
    for token in tail:
        row.extend([token])
        began = perf_counter()
        drafter.propose(rows, [length], policy)
        times.append(perf_counter() - began)
    return statistics.median(times)


def table_of(results: dict[str, dict[str, Cell]]) -> str:
    categories = list(results)
    lines = [f"| method | {' | '.join(categories)} | mean |", "|---|" + "---|" * (len(categories) + 1)]
    for name in next(iter(results.values())):
        cells = [results[category][name] for category in categories]
        shown = [
            f"{c.speed_up:.2f}x ({c.stats.block_efficiency or 0:.2f}, {100 * (c.stats.draft_utilization or 0):.0f}%, "
            f"{100 * c.stats.draft_s / c.stats.total_s:.1f}%)"
            for c in cells
        ]
        mean = statistics.mean(c.speed_up for c in cells)
        lines.append(f"| {name} | {' | '.join(shown)} | {mean:.2f}x |")
    return "\n".join(lines)


def figures(results: dict[str, dict[str, Cell]], shares: dict[str, float], apart: float) -> dict[str, Any]:
    def mean(name: str) -> float:
        return statistics.mean(cells[name].speed_up for cells in results.values())

    some = next(iter(results.values()))
    best = max((n for n in some if n.split(",")[0] in {m.split(",")[0] for m in NGRAM}), key=mean)
    policy = {(n, c): cells[n].speed_up for c, cells in results.items() for n in some if n.endswith("throughput")}
    out: dict[str, Any] = {"best_ngram": best, "best_ngram_mean": mean(best)}
    if "editing" in results:
        out["best_ngram_edit"] = results["editing"][best].speed_up
    if "completion" in results:
        out["best_ngram_code"] = results["completion"][best].speed_up
    if policy:
        worst = min(policy, key=lambda key: policy[key])
        out |= {"worst_under_throughput_policy": policy[worst], "worst_is": " on ".join(worst)}
    if shares:
        out["lookup_share_of_step"] = max(shares.values())
    out["plain_spread"] = apart
    out["identical"] = all(c.identical for cells in results.values() for c in cells.values())
    return out


def write_section(name: str, text: str) -> None:
    """Replace one benchmark's section of RESULTS.md."""
    path = HERE / "RESULTS.md"
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = path.read_text()
    if begin not in old:
        old = f"{old.rstrip()}\n\n{begin}\n{end}\n"
    head, _, rest = old.partition(begin)
    path.write_text(head + begin + text + end + rest.partition(end)[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts, tokens and repeats")
    parser.add_argument("--only", nargs="+", help="some methods only, by the beginning of their names")
    parser.add_argument("--categories", nargs="+", choices=CATEGORIES, default=list(CATEGORIES))
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args.quick, corpus_table(Path(folder)))
        names = [n for n in bench.methods if not args.only or any(n.startswith(o) for o in args.only)]
        shares = look_up_share(bench)
        print("share of a step spent looking up, at 8k tokens of context:")
        for name, share in shares.items():
            print(f"  {name}: {100 * share:.2f}%")
        results: dict[str, dict[str, Cell]] = {}
        for category in args.categories:
            began = perf_counter()
            results[category] = bench.category(category, names)
            print(
                f"\n{category} ({perf_counter() - began:.0f} s; plain {bench.new} tokens, spread of plain with itself "
                f"{100 * spread(bench.apart):.0f}%)"
            )
            for name, cell in results[category].items():
                stats = cell.stats
                print(
                    f"  {name:32} {cell.speed_up:.2f}x  {stats.block_efficiency or 0:.2f} tokens/pass  "
                    f"used {100 * (stats.draft_utilization or 0):.0f}%  drafting {100 * stats.draft_s / stats.total_s:.1f}%"
                    f"{'' if cell.identical else '  DIFFERENT OUTPUT'}"
                )
            sys.stdout.flush()
    found = figures(results, shares, spread(bench.apart))
    text = f"""
## benchmarks/methods.py

{machine()}

Speed-up over foresay's plain decoding (tokens per pass, share of drafted tokens that were used, share of time drafting);
batch 1, bf16, greedy, {bench.count} prompts x {bench.new} tokens a category, plain decoding interleaved.

{table_of(results)}

{chr(10).join(f"- {key}: {value:.3f}" if isinstance(value, float) else f"- {key}: {value}" for key, value in found.items())}
"""
    if args.write:
        write_section("methods", text)
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
