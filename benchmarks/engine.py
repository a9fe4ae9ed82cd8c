"""Speed and memory of the engine on SmolLM2-135M, as ratios measured in one run.

    python benchmarks/engine.py [--quick] [--only NAME ...] [--write]

The floor of a bf16 decoding step on a CPU is the weights' bytes over the memory bandwidth: 269 MB at 25 to 50 GB/s are 5 to
11 ms. transformers and foresay decode the same prompts with the same weights, threads and number of tokens; repeats are
interleaved and medians reported, with the spread of two runs of the same thing. `--write` puts the figures into
benchmarks/RESULTS.md. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from transformers import AutoModelForCausalLM

import foresay
from foresay.decoding.outcome import Step
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy, ModelInput
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import PromptLookup
from foresay.engine import Engine
from foresay.lengths import ConstantLength
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import converted

HERE = Path(__file__).parent
MODEL = "smollm2-135m"


def prompts(*categories: str) -> list[str]:
    rows = json.loads((HERE / "prompts.json").read_text())
    return [row["prompt"] for row in rows if not categories or row["category"] in categories]


class Bench:
    """The two systems over the same weights, and how long each takes."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.ours = foresay.load(MODEL, drafter="none", dtype="bf16")
        self.rss_loaded = _peak_rss()
        self.tokenizer = self.ours.tokenizer
        self._theirs: Any = None

    @property
    def theirs(self) -> Any:
        if self._theirs is None:
            folder = converted(MODEL, LoadOptions())
            self._theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        return self._theirs

    def chat(self, text: str) -> list[int]:
        message = [{"role": "user", "content": text}]
        tokenizer: Any = self.tokenizer
        ids: list[int] = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        return ids

    def engine(self, drafter: Any = None, gamma: int = 0, batch: int = 32, target: Any = None) -> Engine:
        rule = self.ours.rule
        return Engine(target or self.ours.target.model, drafter, rule, ConstantLength(gamma), max_batch_size=batch)

    def run(self, ids: Sequence[Sequence[int]], new: int, drafter: Any = None, gamma: int = 0, **kwargs: Any) -> Run:
        engine = self.engine(drafter, gamma, kwargs.pop("batch", 32), kwargs.pop("target", None))
        params = SamplingParams(max_new_tokens=new, ignore_eos=True, **kwargs)
        outputs: dict[int, list[int]] = {}
        began = perf_counter()
        for prompt in ids:
            outputs[engine.submit(prompt, params)] = []
        steps: list[Step] = []
        held = 0
        while engine.has_work:
            for step in engine.step():
                outputs[step.request_id] += step.token_ids
                steps.append(step)
            if isinstance(engine.cache, SlotCache):
                held = max(held, engine.cache.nbytes)
        return Run(list(outputs.values()), perf_counter() - began, steps, held)

    def transformers_one(self, ids: Sequence[int], new: int, static: bool) -> float:
        x = torch.tensor([ids])
        began = perf_counter()
        self.theirs.generate(
            x,
            attention_mask=torch.ones_like(x),
            do_sample=False,
            max_new_tokens=new,
            min_new_tokens=new,
            cache_implementation="static" if static else None,
        )
        return perf_counter() - began

    def transformers_batch(self, ids: Sequence[Sequence[int]], new: int) -> float:
        width = max(map(len, ids))
        x = torch.tensor([[2] * (width - len(row)) + list(row) for row in ids])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in ids])
        began = perf_counter()
        self.theirs.generate(x, attention_mask=mask, do_sample=False, max_new_tokens=new, min_new_tokens=new)
        return perf_counter() - began


class Run:
    def __init__(self, outputs: list[list[int]], seconds: float, steps: list[Step], cache_bytes: int) -> None:
        self.outputs, self.seconds, self.steps, self.cache_bytes = outputs, seconds, steps, cache_bytes

    @property
    def tokens(self) -> int:
        return sum(map(len, self.outputs))

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def _peak_rss() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def interleaved(repeats: int, **sides: Callable[[], float]) -> dict[str, list[float]]:
    """Run the sides in turn; one warm-up each."""
    for side in sides.values():
        side()
    out: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            out[name].append(side())
    return out


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def spread(values: Sequence[float]) -> float:
    """Half the range over the median: how far runs of the same thing lie apart."""
    return (max(values) - min(values)) / 2 / statistics.median(values)


def plain(bench: Bench) -> dict[str, Any]:
    """Batch 1, bf16, greedy, 128 tokens: foresay's plain decoding against transformers' best."""
    ids = [bench.chat(text) for text in prompts("chat")[:2]]
    new = 64 if bench.quick else 128
    times = interleaved(
        2 if bench.quick else 3,
        ours=lambda: sum(bench.run([one], new).seconds for one in ids),
        dynamic=lambda: sum(bench.transformers_one(one, new, False) for one in ids),
        static=lambda: sum(bench.transformers_one(one, new, True) for one in ids),
    )
    best = min(("dynamic", "static"), key=lambda name: statistics.median(times[name]))
    count = new * len(ids)
    return {
        "plain_vs_transformers": median_ratio(times[best], times["ours"]),
        "plain_tokens_per_s": count / statistics.median(times["ours"]),
        "transformers_tokens_per_s": count / statistics.median(times[best]),
        "transformers_cache": best,
        "plain_spread": spread(times["ours"]),
    }


def batch32(bench: Bench) -> dict[str, Any]:
    """Batch 32 against transformers' batch 1 and its left-padded batch 32, prefill included on both sides."""
    ids = [bench.chat(text) for text in prompts("chat")[:32]]
    new = 32 if bench.quick else 128
    times = interleaved(
        1 if bench.quick else 2,
        ours=lambda: bench.run(ids, new).seconds / len(ids),
        padded=lambda: bench.transformers_batch(ids, new) / len(ids),
        one=lambda: bench.transformers_one(ids[0], new, False),
    )
    return {
        "batch32_vs_transformers_batch1": median_ratio(times["one"], times["ours"]),
        "batch32_vs_transformers_batch32": median_ratio(times["padded"], times["ours"]),
        "batch32_tokens_per_s": new / statistics.median(times["ours"]),
        "transformers_batch32_tokens_per_s": new / statistics.median(times["padded"]),
    }


class Timed:
    """A model whose forwards are timed."""

    def __init__(self, model: Any) -> None:
        self._model, self.seconds = model, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        began = perf_counter()
        out = self._model.forward(*args, **kwargs)
        self.seconds += perf_counter() - began
        return out


def _overhead(bench: Bench, ids: Sequence[Sequence[int]], new: int, **kwargs: Any) -> tuple[float, float]:
    """(share of the wall time outside the models' forwards, seconds outside per step), prefill not counted."""
    timed = Timed(bench.ours.target.model)
    engine = bench.engine(None, 0, len(ids), timed)
    for i, prompt in enumerate(ids):
        seed: dict[str, Any] = {"seed": i} if kwargs else {}
        engine.submit(prompt, SamplingParams(max_new_tokens=new, ignore_eos=True, **kwargs, **seed))
    engine.step()
    timed.seconds, began, count = 0.0, perf_counter(), 0
    while engine.has_work:
        engine.step()
        count += 1
    wall = perf_counter() - began
    return (wall - timed.seconds) / wall, (wall - timed.seconds) / count


def overhead(bench: Bench) -> dict[str, Any]:
    """What is not a model's forward, greedy and sampled, as shares of a step."""
    ids = [bench.chat(text) for text in prompts("chat")[:32]]
    out: dict[str, Any] = {}
    for name, rows, new in (("b1", ids[:1], 128), ("b32", ids, 48)):
        new = new // 2 if bench.quick else new
        repeats = 1 if bench.quick else 3
        _overhead(bench, rows, 8)
        shares = [_overhead(bench, rows, new) for _ in range(repeats)]
        greedy = statistics.median(share for share, _ in shares)
        step = statistics.median(seconds / share for share, seconds in shares)
        base = statistics.median(seconds for _, seconds in shares)
        out[f"overhead_share_{name}"] = greedy
        for kind, top_p, temperature in (("nucleus", 0.9, 0.7), ("wide", 0.98, 1.5)):
            timed = [_overhead(bench, rows, new, temperature=temperature, top_p=top_p) for _ in range(repeats)]
            out[f"top_p_{kind}_adds_{name}"] = (statistics.median(seconds for _, seconds in timed) - base) / step
    return out


def _per_prompt(bench: Bench, ids: Sequence[Sequence[int]], new: int, repeats: int) -> tuple[float, float]:
    """Speed-up of prompt lookup over plain decoding, the median over repeats of the total, and tokens per pass."""
    spec = foresay.load(bench.ours.target, drafter="prompt_lookup")
    gamma = spec.policy.num_draft_tokens  # type: ignore[attr-defined]
    last: list[Run] = []

    def fast() -> float:
        last[:] = [bench.run([one], new, PromptLookup(), gamma) for one in ids]
        return sum(run.seconds for run in last)

    times = interleaved(repeats, plain=lambda: sum(bench.run([one], new).seconds for one in ids), fast=fast)
    tokens = sum(run.tokens for run in last)
    return median_ratio(times["plain"], times["fast"]), tokens / sum(len(run.steps) for run in last)


def lookup(bench: Bench) -> dict[str, Any]:
    """Prompt lookup where there is something to look up, and where there is not."""
    new, repeats = (64, 1) if bench.quick else (128, 2)
    edit = [bench.chat(text) for text in prompts("editing", "extraction")[:: 8 if bench.quick else 4]]
    talk = [bench.chat(text) for text in prompts("chat")[:: 10 if bench.quick else 6]]
    edit_speed, edit_block = _per_prompt(bench, edit, new, repeats)
    chat_speed, chat_block = _per_prompt(bench, talk, new, repeats)
    return {
        "lookup_edit_speedup": edit_speed,
        "lookup_edit_tokens_per_pass": edit_block,
        "lookup_chat_speedup": chat_speed,
        "lookup_chat_tokens_per_pass": chat_block,
    }


class Recorded:
    """Guesses from recorded outputs with an error now and then: every block length, accepted and rejected."""

    hidden_layers: tuple[int, ...] = ()

    def __init__(self, outputs: Sequence[Sequence[int]]) -> None:
        self.outputs = outputs

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        drafts = []
        for row, n in zip(rows, budget, strict=True):
            n = min(n, 1 + row.size % 8)
            draft_tokens = list(self.outputs[row.request_id][row.num_new : row.num_new + n])
            if draft_tokens and row.size % 3 == 0:
                draft_tokens[-1] = (draft_tokens[-1] + 1) % 40000
            drafts.append(draft_tokens)
        width = max(map(len, drafts))
        padded = [g + [0] * (width - len(g)) for g in drafts]
        return Proposal(torch.tensor(padded, dtype=torch.int64).view(len(rows), width), [len(g) for g in drafts])

    def admit(self, *args: Any) -> None: ...

    def observe(self, *args: Any) -> None: ...

    def rearrange(self, *args: Any) -> None: ...

    def reset(self) -> None: ...


def identical(bench: Bench) -> dict[str, Any]:
    """bf16 greedy output with speculation on against off, batch 1 and 8: the share that is the same, bit for bit."""
    texts = prompts()[:100:10] if bench.quick else prompts()[:100]
    ids = [bench.chat(text) for text in texts]
    new = 128
    plain_one = [run.outputs[0] for run in (bench.run([one], new) for one in ids)]
    sides = {
        "batch 1, prompt lookup": [bench.run([one], new, PromptLookup(), 8).outputs[0] for one in ids],
        "batch 1, recorded": [
            bench.run([o], new, Recorded([w]), 8).outputs[0] for o, w in zip(ids, plain_one, strict=True)
        ],
        "batch 8, plain": bench.run(ids, new, batch=8).outputs,
        "batch 8, prompt lookup": bench.run(ids, new, PromptLookup(), 8, batch=8).outputs,
        "batch 8, recorded": bench.run(ids, new, Recorded(plain_one), 8, batch=8).outputs,
    }
    same = total = 0
    differences = []
    for name, outputs in sides.items():
        for i, (a, b) in enumerate(zip(plain_one, outputs, strict=True)):
            total += 1
            same += a == b
            if a != b:
                differences.append(_difference(bench, name, i, ids[i], a, b))
    return {"bf16_identical_share": same / total, "bf16_compared": total, "bf16_differences": differences}


def _difference(
    bench: Bench, name: str, prompt: int, ids: Sequence[int], a: Sequence[int], b: Sequence[int]
) -> dict[str, Any]:
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    model = bench.ours.target.model
    cache = model.new_cache()
    cache.add_rows(1)  # type: ignore[attr-defined]
    context = [*ids, *a[:place]]
    logits = model.forward(ModelInput(torch.tensor([context]), [len(context)]), cache).scores()[0, -1].float()
    top = logits.topk(2).values
    return {"where": name, "prompt": prompt, "token": place, "margin": float(top[0] - top[1])}


def memory(bench: Bench) -> dict[str, Any]:
    """Peak memory of a long batch above the loaded process, the caches not counted."""
    ids = [bench.chat(text) for text in prompts("editing")[:16]]
    run = bench.run(ids, 32 if bench.quick else 128, PromptLookup(), 8)
    return {
        "peak_above_loaded_mb": (_peak_rss() - bench.rss_loaded - run.cache_bytes) / 1e6,
        "cache_mb": run.cache_bytes / 1e6,
    }


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "memory": memory,
    "plain": plain,
    "batch32": batch32,
    "overhead": overhead,
    "lookup": lookup,
    "identical": identical,
}
BOUNDS: dict[str, tuple[str, float]] = {
    "plain_vs_transformers": (">=", 1.25),
    "batch32_vs_transformers_batch1": (">=", 12.0),
    "batch32_vs_transformers_batch32": (">=", 1.0),
    "overhead_share_b1": ("<=", 0.05),
    "overhead_share_b32": ("<=", 0.10),
    "top_p_nucleus_adds_b1": ("<=", 0.10),
    "top_p_nucleus_adds_b32": ("<=", 0.10),
    "top_p_wide_adds_b1": ("<=", 0.25),
    "top_p_wide_adds_b32": ("<=", 0.25),
    "lookup_edit_speedup": (">=", 1.5),
    "lookup_chat_speedup": (">=", 0.97),
    "bf16_identical_share": (">=", 1.0),
    "peak_above_loaded_mb": ("<=", 300.0),
}
JSON_KEYS = (
    "plain_vs_transformers",
    "batch32_vs_transformers_batch1",
    "batch32_vs_transformers_batch32",
    "overhead_share_b1",
    "overhead_share_b32",
    "lookup_edit_speedup",
    "lookup_chat_speedup",
    "bf16_identical_share",
)


def machine() -> str:
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        model = names[0] if names else model
    threads = f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    return f"{model}, {threads}, torch {torch.__version__}, python {platform.python_version()}"


def table(figures: dict[str, Any]) -> str:
    lines = ["| figure | measured | wanted |", "|---|---|---|"]
    for name, value in figures.items():
        if isinstance(value, float | int) and not isinstance(value, bool):
            bound = BOUNDS.get(name)
            lines.append(f"| {name} | {value:.3f} | {f'{bound[0]} {bound[1]:g}' if bound else ''} |")
    return "\n".join(lines)


def write(figures: dict[str, Any]) -> None:
    """Replace this benchmark's section of RESULTS.md."""
    path = HERE / "RESULTS.md"
    begin, end = "<!-- engine -->", "<!-- /engine -->"
    old = path.read_text() if path.exists() else f"# Results\n\n{begin}\n{end}\n"
    differences = "\n".join(f"- {json.dumps(d)}" for d in figures.get("bf16_differences", []))
    body = f"\n## benchmarks/engine.py\n\n{machine()}\n\n{table(figures)}\n"
    body += f"\nFirst divergences in bf16:\n\n{differences}\n" if differences else ""
    head, _, rest = old.partition(begin)
    path.write_text(head + begin + body + end + rest.partition(end)[2])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts, tokens and repeats")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="some parts only")
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    args = parser.parse_args()
    bench = Bench(args.quick)
    print(machine())
    figures: dict[str, Any] = {}
    for name in args.only or PARTS:
        began = perf_counter()
        found = PARTS[name](bench)
        figures |= found
        print(f"\n{name} ({perf_counter() - began:.0f} s)")
        for key, value in found.items():
            print(f"  {key}: {value:.3f}" if isinstance(value, float) else f"  {key}: {value}")
        sys.stdout.flush()
    if args.write:
        write(figures)
    print(json.dumps({key: round(figures[key], 4) for key in JSON_KEYS if key in figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
