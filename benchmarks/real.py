"""A GGUF file of real size: passes, prompts, long contexts, whole texts and loading, compared with llama.cpp on the same file.

    python benchmarks/real.py FILE [--draft FILE] [--llamacpp PYTHON] [--only PART ...] [--repeats 9] [--write]

Whole texts are 64 tokens after each of 12 shipped prompts of three kinds, greedy, batch 1, all methods in turns. llama.cpp
runs in an environment of its own with llama-cpp-python, and each of its measurements follows one of ours, so that both see the
same machine. A pass scores some tokens after 128 others; floors are bytes of weights (and of keys and values) over the memory
bandwidth measured here. `FORESAY_ISA=avx2` measures the kernels for fewer instructions than the processor has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from common import (
    CONTEXT,
    Engine,
    EngineRunner,
    Figures,
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
from foresay.files import cache_dir
from foresay.generation.method import Method
from foresay.models.cpu.build import instructions
from foresay_lab.bench.runners import MethodRunner, PromptBlock, Runner
from foresay_lab.data.datasets import load_items
from foresay_lab.data.requests import RequestBuilder
from foresay_lab.measure.roofline import floor

PASSES = (1, 2, 4, 8, 16)
PROMPTS = (128, 512)
LONG = 8192
LEGEND = {
    "plain_vs_llamacpp": ("pass of one token: llama.cpp's time over ours", ">= 1.0"),
    "tokens8_vs_llamacpp": ("pass of 8 tokens: llama.cpp's time over ours", ""),
    "prompt512_vs_llamacpp": ("prompt of 512 tokens: llama.cpp's time over ours", ">= 2.0"),
    "tokens4_over_1": ("pass over 4 tokens / over 1", "<= 1.15"),
    "tokens8_over_1": ("pass over 8 tokens / over 1", "<= 1.5"),
    "plain_step_over_floor": ("pass of one token over its floor", "<= 1.2"),
    "context8k_step_over_floor": ("the same after 8,192 tokens of context", "<= 1.5"),
    "bandwidth_gb_per_s": ("memory bandwidth, GB/s", ""),
    "texts_vs_llamacpp": ("plain decoding of texts: our rate over llama.cpp's", ">= 1.0"),
    "best_vs_llamacpp_best": ("our fastest method over llama.cpp's fastest", ">= 2"),
    "best_speedup": ("our fastest method over our plain decoding", ""),
    "draft_speedup": ("with the draft model, adaptive, over our plain decoding", ">= 1.8"),
    "load_s_per_gb": ("seconds for the first load of a GB, file in the page cache, after the imports", "<= 3"),
    "warm_load_s": ("seconds for a later load of the file, after the imports", "<= 1"),
    "first_answer_s": ("seconds of `foresay generate` with 8 tokens, imports included, a later load", "<= 5"),
    "peak_over_file": ("memory of the process at its peak over the size of the file, first load", "<= 1.3"),
    "warm_peak_over_file": ("the same of a later load, whose weights are pages that processes share", "<= 1.3"),
    "warm_private_over_file": ("the same without pages of files", ""),
}
_LOAD = """
import sys
from time import perf_counter
import transformers.modeling_utils
import foresay
from foresay.models.sources import loading
began = perf_counter()
model = foresay.load(sys.argv[1], drafter="none")
seconds = perf_counter() - began
model.generate("x", max_new_tokens=1)
sizes = dict(line.split()[:2] for line in open("/proc/self/status") if line.startswith(("VmHWM:", "RssAnon:")))
print(seconds, int(sizes["VmHWM:"]) * 1024, int(sizes["RssAnon:"]) * 1024)
from foresay.models.gguf.packed import settle
settle()
"""


def passes(model: Any, peer: Engine | None, args: argparse.Namespace, rows: list[list[str]]) -> Figures:
    """Passes of a few tokens, of one row and of eight."""
    sizes = [(1, n) for n in PASSES] + [(8, 1), (8, 4)]
    times: dict[tuple[int, int], list[float]] = {size: [] for size in sizes}
    others: dict[tuple[int, int], list[float]] = {size: [] for size in sizes}
    prompts = {batch: random_prompt(batch) for batch in (1, 8)}
    caches = {batch: filled(model, prompts[batch]) for batch in (1, 8)}
    for _ in range(args.repeats):
        for batch, n in sizes:
            one = (model, caches[batch], ModelInput(prompts[batch][:, :n], [n] * batch))
            times[batch, n] += pass_seconds([one], 3)
            if peer is not None and batch == 1:
                others[batch, n].append(peer("seconds", before=CONTEXT, count=n))
    found = {size: statistics.median(some) for size, some in times.items()}
    theirs = {size: statistics.median(some) for size, some in others.items() if some}
    for batch, n in sizes:
        other = f"{theirs[batch, n] * 1e3:.1f}" if (batch, n) in theirs else "-"
        rows.append([f"pass of {batch} x {n}, ms", f"{found[batch, n] * 1e3:.1f}", other])
    bound = floor(model)
    assert bound is not None
    out: Figures = {f"tokens{n}_over_1": found[1, n] / found[1, 1] for n in (4, 8)}
    out |= {
        "plain_step_over_floor": found[1, 1] / bound.seconds(1, CONTEXT),
        "bandwidth_gb_per_s": bound.bytes_per_s / 1e9,
    }
    if theirs:
        out |= {"plain_vs_llamacpp": theirs[1, 1] / found[1, 1], "tokens8_vs_llamacpp": theirs[1, 8] / found[1, 8]}
    return out


def prompts(model: Any, peer: Engine | None, args: argparse.Namespace, rows: list[list[str]]) -> Figures:
    """Prompts read by one pass."""
    out: Figures = {}
    for size in PROMPTS:
        ids = torch.randint(5, 4000, (1, size))
        times, others = [], []
        for _ in range(max(2, args.repeats // 3)):
            cache = model.new_cache()
            cache.add_rows(1)
            began = perf_counter()
            model.forward(ModelInput(ids, [size], logits=Logits.LAST), cache)
            times.append(perf_counter() - began)
            if peer is not None:
                others.append(peer("seconds", before=0, count=size))
        ours, theirs = statistics.median(times), statistics.median(others) if others else 0.0
        rows.append([f"prompt of {size}, tokens/s", f"{size / ours:.0f}", f"{size / theirs:.0f}" if theirs else "-"])
        if theirs:
            out[f"prompt{size}_vs_llamacpp"] = theirs / ours
    return out


def context(model: Any, args: argparse.Namespace, rows: list[list[str]]) -> Figures:
    """One token after a long context."""
    cache, ids, times = model.new_cache(), torch.randint(5, 4000, (1, LONG)), []
    cache.add_rows(1)
    model.forward(ModelInput(ids, [LONG], logits=Logits.NONE), cache)
    for _ in range(args.repeats):
        began = perf_counter()
        model.forward(ModelInput(ids[:, :1], [1]), cache)
        times.append(perf_counter() - began)
    bound, step = floor(model), statistics.median(times)
    assert bound is not None
    rows.append([f"pass of 1 after {LONG}, ms", f"{step * 1e3:.1f}", "-"])
    return {"context8k_step_over_floor": step / bound.seconds(1, LONG)}


def texts(target: foresay.Generator, args: argparse.Namespace, stack: ExitStack) -> Figures:
    """Whole texts by our methods and llama.cpp's, in turns with plain decoding."""
    items = [item for kind in ("chat", "code", "editing") for item in load_items(category=kind)[:4]]
    asks = RequestBuilder(target).first(items)
    block = PromptBlock("texts", asks, 1, foresay.SamplingParams(max_new_tokens=64, ignore_eos=True))
    drafted = [f"model({args.draft})", f"hybrid(suffix, model({args.draft}))"] if args.draft else []
    runners: list[Runner] = [MethodRunner(target, Method(name)) for name in ("suffix", *drafted)]
    settings: list[tuple[str, dict[str, Any]]] = [("plain", {}), ("lookup", {"lookup": 10})]
    settings += [("draft model", {"draft": args.draft})] if args.draft else []
    theirs = [
        EngineRunner(f"llama.cpp, {name}", Engine(stack, args.llamacpp, "llama.cpp", model=args.file, **more))
        for name, more in (settings if args.llamacpp else ())
    ]
    gains = {name: one.gain for name, one in compared(plain_of(target), [*runners, *theirs], block, 2).items()}
    ours = max(1.0, *(gains[runner.name] for runner in runners))
    out: Figures = {"best_speedup": ours}
    if theirs:
        out["texts_vs_llamacpp"] = 1 / gains[theirs[0].name]
        out["best_vs_llamacpp_best"] = ours / max(gains[one.name] for one in theirs)
    return out | ({"draft_speedup": gains[runners[1].name]} if args.draft else {})


def loading(path: str) -> Figures:
    """Processes that load the file, which was read before: the first with a cache that has only the compiled kernels."""
    size = len(Path(path).read_bytes())

    def run(folder: str, *command: str) -> str:
        done = subprocess.run(
            [sys.executable, *command],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "FORESAY_CACHE": folder, "FORESAY_PACKED_GB": "1000"},
        )
        return done.stdout

    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(cache_dir() / "native", Path(folder) / "native")
        first = list(map(float, run(folder, "-c", _LOAD, path).split()))
        later = list(map(float, run(folder, "-c", _LOAD, path).split()))
        began = perf_counter()
        run(folder, "-m", "foresay", "generate", "-m", path, "Say hi.", "-n", "8")
        answer = perf_counter() - began
    return {
        "load_s_per_gb": first[0] / size * 1e9,
        "warm_load_s": later[0],
        "first_answer_s": answer,
        "peak_over_file": first[1] / size,
        "warm_peak_over_file": later[1] / size,
        "warm_private_over_file": later[2] / size,
    }


def main() -> int:
    names = ("passes", "prompts", "context", "texts", "loading")
    parser = arguments(__doc__, parts=names, repeats=9, quick=False)
    parser.add_argument("file")
    parser.add_argument("--llamacpp", metavar="PYTHON")
    parser.add_argument("--draft", help="GGUF file of a draft model", default="")
    args = parsed(parser)
    generator = foresay.load(args.file, drafter="none")
    model: Any = generator.target.model
    rows: list[list[str]] = []
    with ExitStack() as stack:
        peer = Engine(stack, args.llamacpp, "llama.cpp", model=args.file) if args.llamacpp else None
        parts = {
            "passes": partial(passes, model, peer, args, rows),
            "prompts": partial(prompts, model, peer, args, rows),
            "context": partial(context, model, args, rows),
            "texts": partial(texts, generator, args, stack),
            "loading": partial(loading, args.file),
        }

        def finish(figures: Figures) -> int:
            text = table(("", "foresay", "llama.cpp"), rows)
            log(text)
            about = f"{Path(args.file).stem}, {Path(args.file).stat().st_size / 1e9:.2f} GB; kernels: {instructions()}"
            return publish(
                "real", figures, args, legend=LEGEND, model=about, text=[f"The times: {environment(about)}", text]
            )

        return measured(parts, args.only, finish)


if __name__ == "__main__":
    sys.exit(main())
