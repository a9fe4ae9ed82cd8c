"""A GGUF file of real size: passes, prompts, long contexts and loading, compared with llama.cpp on the same file.

    python benchmarks/real.py FILE [--llamacpp PYTHON] [--only PART ...] [--repeats 9] [--write] [--section NAME]

llama.cpp runs in an environment of its own with llama-cpp-python, and each of its measurements follows one of ours, so that
both see the same machine. A pass scores some tokens after 128 others; floors are bytes of weights (and of keys and values) over
the memory bandwidth measured here. `FORESAY_ISA=avx2` measures the kernels for fewer instructions than the processor has.
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
    Figures,
    Peer,
    arguments,
    environment,
    filled,
    log,
    measured,
    parsed,
    pass_seconds,
    publish,
    random_prompt,
    table,
)

import foresay
from foresay.decoding.protocols import Logits, ModelInput
from foresay.files import cache_dir
from foresay.lab.measure.roofline import floor
from foresay.models.cpu.build import instructions

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
    "load_s_per_gb": ("seconds for the first load of a GB, file in the page cache, after the imports", "<= 3"),
    "warm_load_s": ("seconds for a later load of the file, after the imports", "<= 1"),
    "first_answer_s": ("seconds of `foresay generate` with 8 tokens, imports included, a later load", "<= 5"),
    "peak_over_file": ("memory of the process at its peak over the size of the file, first load", "<= 1.3"),
    "warm_peak_over_file": ("the same of a later load, whose weights are pages that processes share", "<= 1.3"),
    "warm_private_over_file": ("the same without pages of files", ""),
}
_PEER = """
import json, sys
from time import perf_counter
from llama_cpp import Llama
model = Llama(sys.argv[1], n_ctx=1024, n_threads=int(sys.argv[2]), n_threads_batch=int(sys.argv[2]), verbose=False)
for line in sys.stdin:
    before, count = json.loads(line)
    model.reset()
    if before:
        model.eval([i % 4000 + 5 for i in range(before)])
    began = perf_counter()
    model.eval([i % 3000 + 7 for i in range(count)])
    print(perf_counter() - began, flush=True)
"""
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


def passes(model: Any, peer: Peer | None, args: argparse.Namespace, rows: list[list[str]]) -> Figures:
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
                others[batch, n].append(peer.seconds(CONTEXT, n))
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


def prompts(model: Any, peer: Peer | None, args: argparse.Namespace, rows: list[list[str]]) -> Figures:
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
                others.append(peer.seconds(0, size))
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
    names = ("passes", "prompts", "context", "loading")
    parser = arguments(__doc__, parts=names, repeats=9, quick=False)
    parser.add_argument("file")
    parser.add_argument("--llamacpp", metavar="PYTHON")
    args = parsed(parser)
    model: Any = foresay.load(args.file, drafter="none").target.model
    rows: list[list[str]] = []
    with ExitStack() as stack:
        peer = Peer(stack, args.llamacpp, _PEER, args.file) if args.llamacpp else None
        parts = {
            "passes": partial(passes, model, peer, args, rows),
            "prompts": partial(prompts, model, peer, args, rows),
            "context": partial(context, model, args, rows),
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
