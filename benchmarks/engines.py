"""foresay on other engines and in several processes, each against the engine's own best mode in the same run.

    python benchmarks/engines.py [--only PART ...] [--vllm PYTHON] [--llamacpp PYTHON] [--quick] [--repeats N] [--write]

- vllm: the suffix drafter inside vLLM against vLLM's n-gram speculation and plain decoding, at batch 1, 8 and 32.
- vllm_passes: forward passes of vLLM against a replay of its output.
- llamacpp: llama.cpp under foresay's loop against its own Python binding, on one GGUF file.
- workers: two processes of one thread against one.
- load: requests at three rates, simulated from a recording and a profile, against the same load run live.

Engines that are not given are left out. Shipped prompts, greedy, prompts included. `--dtype fp32` is for processors without
bf16 instructions, on which vLLM emulates bf16.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from common import (
    MODEL,
    Figures,
    arguments,
    available,
    compared,
    interpreters,
    log,
    measured,
    mixed,
    opened,
    parsed,
    plain_of,
    publish,
)

import foresay
from foresay.drafters import SuffixDrafter
from foresay.generation.method import PLAIN, Method
from foresay.integrations.vllm_arguments import llm_arguments
from foresay.lab.bench.peers import open_peer
from foresay.lab.bench.peers.base import model_folder
from foresay.lab.bench.runners import MethodRunner
from foresay.lab.data.datasets import load_items, subset
from foresay.lab.measure.profile import measure, medians
from foresay.lab.replay.arrivals import poisson
from foresay.lab.replay.record import record
from foresay.lab.replay.replay import replay
from foresay.lab.replay.simulate import SimulatedLoad, simulate
from foresay.lengths import ConstantLength
from foresay.models.sources.packaged import packaged_file
from foresay.records.profile import Profile
from foresay.records.recording import Record, Recording
from foresay.spec.recipes import read_drafter, read_length
from foresay.spec.settings_file import Settings
from foresay.workers import recording
from foresay.workers.local import Processes
from foresay.workers.pool import Pool

ROWS = 8
"""Most rows under load."""
PROFILE_EVERY_S = 4.0
"""Seconds of a load between two measurements of its forward passes."""
LENGTH = 8
"""Draft length whose passes are counted in vLLM and in a replay."""
LEGEND = {
    **{f"vllm_suffix_vs_plain_b{b}": (f"vLLM with the suffix drafter / vLLM, batch {b}", "") for b in (1, 8, 32)},
    **{
        f"vllm_suffix_vs_ngram_b{b}": (f"the same / vLLM's n-grams, batch {b}", ">= 1.1" if b == 1 else "")
        for b in (1, 8, 32)
    },
    "vllm_worst_vs_plain": ("the worst of the first three", ">= 0.97"),
    "vllm_tokens_per_pass_error": ("relative error of predicted tokens per pass in vLLM", "<= 0.01"),
    "llamacpp_plain_vs_binding": ("llama.cpp under foresay's loop / its Python binding", ">= 0.95"),
    "llamacpp_suffix_b1": ("suffix / plain on llama.cpp, batch 1", ""),
    "llamacpp_suffix_b8": ("suffix / plain on llama.cpp, batch 8", ""),
    "llamacpp_worst_vs_plain": ("the worse of the two", ">= 0.97"),
    "llamacpp_batch8_gain": ("batch 8 / one by one on llama.cpp, plain", ">= 2"),
    "workers2_gain": ("two processes / one", ">= 1.5"),
    "load_throughput_error": ("largest error of simulated throughput under load", "<= 0.15"),
    "load_latency_error": ("largest error of simulated mean latency under load", "<= 0.15"),
}


@contextmanager
def vllm_arguments(args: argparse.Namespace, length: str | int, **more: Any) -> Iterator[str]:
    """A peer expression of vLLM with the suffix drafter of foresay inside it. more: further arguments of vLLM."""
    settings = Settings(target=MODEL, drafter="suffix", length=length, dtype=args.dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "arguments.json"
        path.write_text(json.dumps(llm_arguments(settings, model_folder(MODEL)) | more), encoding="utf-8")
        yield f"vllm(arguments={path})"


def vllm(args: argparse.Namespace) -> Figures:
    """The suffix drafter inside vLLM against vLLM's n-gram speculation and vLLM alone."""
    if args.vllm is None:
        return {}
    target, out = foresay.load(MODEL, drafter="none", dtype="bf16"), Figures()
    with vllm_arguments(args, "throughput") as ours:
        forms = available(args, "vllm", "vllm(ngram=5)", ours)
        with opened(forms, target, args.dtype) as (plain, ngram, suffix):
            for batch in (1, 8, 32):
                found = compared(plain, [ngram, suffix], mixed(target, batch, args.quick), args.repeats)
                out[f"vllm_suffix_vs_plain_b{batch}"] = found[suffix.name].gain
                out[f"vllm_suffix_vs_ngram_b{batch}"] = found[suffix.name].gain / found[ngram.name].gain
    return {**out, "vllm_worst_vs_plain": min(out[f"vllm_suffix_vs_plain_b{batch}"] for batch in (1, 8, 32))}


def vllm_passes(args: argparse.Namespace) -> Figures:
    """Relative error of the passes that a replay of vLLM's output takes, one row at a time with one draft length."""
    if args.vllm is None:
        return {}
    target = foresay.load(MODEL, drafter="none", dtype="bf16")
    block = mixed(target, 1, args.quick)
    with vllm_arguments(
        args, LENGTH, async_scheduling=False
    ) as ours:  # one pass at a time, so that they can be counted
        [form] = available(args, ours)
        peer = open_peer(form, model=MODEL, dtype=args.dtype, threads=None)
        try:
            found = peer.run([ask.token_ids for ask in block.asks], block.params, 1)
        finally:
            peer.close()
    assert found.passes is not None
    # vLLM generates the first token with the prompt, before anything is drafted
    texts = [([*map(int, ask.token_ids), out[0]], out[1:]) for ask, out in zip(block.asks, found.outputs, strict=True)]
    records = tuple(Record(str(i), tuple(a), tuple(b)) for i, (a, b) in enumerate(texts) if b)
    saved = Recording(records, target.target.model.vocab_size, target.target.eos_token_ids)
    predicted = replay(saved, SuffixDrafter(), policy=ConstantLength(LENGTH)).stats.num_passes + len(texts)
    log(f"  {sum(map(len, found.outputs))} tokens in {found.passes} passes, {predicted} predicted")
    return {"vllm_tokens_per_pass_error": abs(found.passes / predicted - 1)}


def llamacpp(args: argparse.Namespace) -> Figures:
    """The kernels of llama.cpp under foresay's loop and under its own Python binding's; batches of 8 against one by one."""
    try:
        target = foresay.load(str(packaged_file(MODEL)), backend="llama.cpp", drafter="none")
    except foresay.ConfigError as error:
        log(f"  left out: {error}")
        return {}
    plain, suffix = plain_of(target), MethodRunner(target, Method("suffix"))
    run = partial(compared, plain, same_output=False)
    out = Figures()
    with opened(available(args, "llama.cpp"), target, "bf16") as bindings:
        if bindings:
            found = run(bindings, mixed(target, 1, args.quick), args.repeats)
            out["llamacpp_plain_vs_binding"] = 1 / found[bindings[0].name].gain
        # in turn, because stretches that lie minutes apart differ by more than a batch gains
        turns = []
        for _ in range(args.repeats):
            block = mixed(target, 8, args.quick)
            turns.append([run([suffix], replace(block, batch_size=size), 1) for size in (8, 1)])
    out["llamacpp_batch8_gain"] = statistics.median(eight[PLAIN].rate / one[PLAIN].rate for eight, one in turns)
    out["llamacpp_suffix_b1"] = statistics.median(one[suffix.name].gain for _, one in turns)
    out["llamacpp_suffix_b8"] = statistics.median(eight[suffix.name].gain for eight, _ in turns)
    return {**out, "llamacpp_worst_vs_plain": min(out["llamacpp_suffix_b1"], out["llamacpp_suffix_b8"])}


def workers(args: argparse.Namespace) -> Figures:
    """Prompts answered by two processes of one thread against one process of one thread; loading is not timed."""
    items = subset(load_items(), 12 if args.quick else 32)
    params = foresay.SamplingParams(max_new_tokens=32 if args.quick else 64, ignore_eos=True)
    load = {"target": MODEL, "drafter": "none", "dtype": "bf16", "max_batch_size": 8}
    setup = recording.setup(load, items, params, chat=True)
    took: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(args.repeats):
        for count in took:
            with Pool(Processes(setup, count, threads=1), count) as pool, tempfile.TemporaryDirectory() as folder:
                began = perf_counter()
                recording.record(pool, items, Path(folder) / "r.jsonl")
                took[count].append(perf_counter() - began)
    one, two = (statistics.median(times) for times in took.values())
    log(f"  one worker {one:.1f} s, two {two:.1f} s")
    return {"workers2_gain": one / two}


def load(args: argparse.Namespace) -> Figures:
    """Largest errors of simulated load against live load: three rates, plain and with the suffix drafter."""
    target = foresay.load(MODEL, drafter="none", dtype="bf16")
    items = subset(load_items(), 12 if args.quick else 36)
    params = foresay.SamplingParams(max_new_tokens=32 if args.quick else 64)
    with tempfile.TemporaryDirectory() as folder:
        saved = record(target.with_settings(max_batch_size=ROWS), items, Path(folder) / "r.jsonl", params)
    full = simulate(saved, profile(target), [0.0] * len(items), None, read_length("0"), batch_size=ROWS)
    most = len(items) / full.seconds
    errors: dict[str, list[float]] = {"throughput": [], "latency": []}
    for drafter in ("none", "suffix"):
        for share in (0.3, 0.6, 0.9):
            arrivals = poisson(share * most, len(items), seed=1)
            simulated, (tokens_per_s, latency_s) = both(target, drafter, saved, arrivals, params)
            errors["throughput"].append(abs(simulated.tokens_per_s / tokens_per_s - 1))
            errors["latency"].append(abs(simulated.mean("latency") / latency_s - 1))
            log(
                f"  {drafter:<7} {share * most:.2f}/s: {simulated.tokens_per_s:6.1f} tokens/s simulated, {tokens_per_s:6.1f} "
                f"live; mean latency {simulated.mean('latency'):.2f} s simulated, {latency_s:.2f} live"
            )
    return {f"load_{name}_error": max(found) for name, found in errors.items()}


def profile(target: foresay.Generator) -> Profile:
    """The time of forward passes at this moment, measured in a few seconds."""
    return measure(
        target, batches=(1, 2, 4, ROWS), columns=(1, 3, 13), contexts=(128, 384), fills=(16, 64, 256), repeats=2
    )


def both(
    target: foresay.Generator,
    drafter: str,
    saved: Recording,
    times: Sequence[float],
    params: foresay.SamplingParams,
) -> tuple[SimulatedLoad, tuple[float, float]]:
    """A simulated load, and `live` of the same load, with passes measured before, during and after it."""
    method, profiles = Method(drafter), [profile(target)]
    generator = method.generator(target, ROWS)
    measured_live = live(generator, saved, times, params, lambda: profiles.append(profile(target)))
    profiles.append(profile(target))
    policy = read_length(method.own_length if drafter != "none" else 0)
    made = read_drafter(drafter).prepare(target.resources)() if target.resources else None
    return simulate(saved, medians(profiles), times, made, policy, batch_size=ROWS), measured_live


def live(
    generator: foresay.Generator,
    saved: Recording,
    times: Sequence[float],
    params: foresay.SamplingParams,
    aside: Callable[[], None],
) -> tuple[float, float]:
    """Run a load live: (tokens/s from the first arrival to the last token, mean seconds from arrival to end).

    aside: called between two steps about every PROFILE_EVERY_S seconds, while the clock of the load is stopped. The speed of
    a shared machine changes within a minute, so a profile measured before or after a load does not describe it.
    """
    generator.generate([list(saved.records[0].prompt)], replace(params, max_new_tokens=8))  # warm
    session = generator.session()
    arrived: dict[int, float] = {}
    ended: dict[int, float] = {}
    tokens, began, due = 0, perf_counter(), PROFILE_EVERY_S
    while len(ended) < len(times):
        now = perf_counter() - began
        if now >= due:
            aside()
            due = now + PROFILE_EVERY_S
            began = perf_counter() - now
        while len(arrived) < len(times) and times[len(arrived)] <= now:
            record = saved.records[len(arrived)]
            number = session.submit(list(record.prompt), params, text=False)
            arrived[number] = times[len(arrived)]
        if not session.has_work:
            sleep(max(0.0, times[len(arrived)] - now))
            continue
        for chunk in session.step():
            tokens += len(chunk.step.token_ids)
            if chunk.finish_reason is not None:
                ended[chunk.index] = perf_counter() - began
    return tokens / (max(ended.values()) - times[0]), statistics.fmean(ended[i] - arrived[i] for i in ended)


PARTS: dict[str, Callable[[argparse.Namespace], Figures]] = {
    "vllm": vllm,
    "vllm_passes": vllm_passes,
    "llamacpp": llamacpp,
    "workers": workers,
    "load": load,
}


def main() -> int:
    parser = arguments(__doc__, parts=PARTS, repeats=3)
    interpreters(parser)
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="dtype of vLLM (default: bf16)")
    args = parsed(parser)
    model = f"{MODEL} in bf16, vLLM's in {args.dtype}, llama.cpp's the 4-bit GGUF file"
    finish = partial(publish, "engines", args=args, legend=LEGEND, model=model)
    return measured({name: partial(part, args) for name, part in PARTS.items()}, args.only, finish)


if __name__ == "__main__":
    sys.exit(main())
