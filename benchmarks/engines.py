"""foresay on other engines and more processes, each beside the engine's own best mode in the same run.

    python benchmarks/engines.py [--only NAME ...] [--vllm PYTHON] [--llamacpp PYTHON] [--quick] [--repeats N] [--write]

vLLM with our suffix look-up beside its own n-gram and plain decoding, at batch 1, 8 and 32, as many tokens per pass as a replay
foretells; llama.cpp under our loop beside its own Python binding, on one GGUF file; two workers of one thread beside one;
load foreseen from a recording and a profile beside the same load lived through. Engines that are not given are left out.
Shipped prompts, greedy, prompts included. `--dtype` names vLLM's: a processor without bf16 emulates it. The last line is one
JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter, sleep

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from speed import section

import foresay
from foresay.drafters import SuffixDrafter
from foresay.generation.method import Method
from foresay.integrations.vllm_arguments import llm_arguments
from foresay.lab.bench.peers import open_peer
from foresay.lab.bench.peers.base import model_folder
from foresay.lab.bench.runners import MethodRunner, PeerRunner, PromptBlock, Runner
from foresay.lab.bench.turns import take_turns
from foresay.lab.data.datasets import load_items, subset
from foresay.lab.data.requests import RequestBuilder
from foresay.lab.measure.profile import measure, medians
from foresay.lab.replay.arrivals import poisson
from foresay.lab.replay.record import record
from foresay.lab.replay.replay import replay
from foresay.lab.replay.simulate import Load, simulate
from foresay.lengths import ConstantLength
from foresay.models.sources.packaged import packaged_file
from foresay.records.profile import Profile
from foresay.records.provenance import machine
from foresay.records.recording import Record, Recording
from foresay.records.results import Run
from foresay.spec.recipes import read_drafter, read_length
from foresay.spec.settings_file import Settings
from foresay.workers import recording
from foresay.workers.local import Processes
from foresay.workers.pool import Pool

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
FILLS = (16, 64, 256)
LOADED = 8
"""Rows at most under load."""
ASIDE_S = 4.0
"""Of a load, between one measuring of passes and the next."""
LENGTH = 8
"""Of guesses whose passes are counted beside a replay."""
AT_LEAST = {
    "vllm_suffix_vs_ngram_b1": 1.1,
    "vllm_worst_vs_plain": 0.97,
    "llamacpp_plain_vs_binding": 0.95,
    "llamacpp_worst_vs_plain": 0.97,
    "llamacpp_batch8_gain": 2.0,
    "workers2_gain": 1.5,
}
AT_MOST = {"vllm_tokens_per_pass_error": 0.01, "load_throughput_error": 0.15, "load_latency_error": 0.15}
Found = dict[str, float]


def log(text: str) -> None:
    print(text, flush=True)


def block(target: foresay.Generator, batch: int, args: argparse.Namespace) -> PromptBlock:
    """Mixed prompts, at least two batches of them."""
    count = {1: 7, 8: 21, 32: 49}[batch] if not args.quick else {1: 4, 8: 12, 32: 35}[batch]
    asks = RequestBuilder(target).first(subset(load_items(), count))
    return PromptBlock("mixed", asks, batch, foresay.SamplingParams(max_new_tokens=24 if args.quick else 64))


def rates(
    first: Runner, others: Sequence[Runner], prompts: PromptBlock, repeats: int
) -> dict[str, tuple[float, float]]:
    """Name -> (tokens/s, speed over the first), medians of runs that take turns with it."""
    turns = [(repeat, runner) for repeat in range(repeats) for runner in others]
    speeds: dict[str, list[float]] = {}
    gains: dict[str, list[float]] = {}
    for run, _ in take_turns(first, turns, prompts, warm=replace(prompts, asks=prompts.asks[:1]), between=1):
        if not isinstance(run, Run):
            log(f"  {run.cell.method} failed: {run.error}")
            continue
        speeds.setdefault(run.cell.method, []).append(run.tokens_per_s)
        gains.setdefault(run.cell.method, []).append(1.0 if run.speed_up is None else run.speed_up)
    out = {name: (statistics.median(speeds[name]), statistics.median(gains[name])) for name in speeds}
    for name, (speed, gain) in out.items():
        log(f"  batch {prompts.batch_size}: {name:<34} {speed:7.1f} tokens/s  {gain:.2f}x")
    return out


def vllm(args: argparse.Namespace) -> Found:
    """Our look-up inside vLLM, vLLM's own, and vLLM without any."""
    if args.vllm is None:
        return {}
    ours = foresay.load(MODEL, drafter="none", dtype="bf16")
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "suffix.json"
        settings = Settings(target=MODEL, drafter="suffix", length="throughput", dtype=args.dtype)
        given.write_text(json.dumps(llm_arguments(settings, model_folder(MODEL))))
        forms = ("", "(ngram=5)", f"(arguments={given})")
        opened, peers = [], []
        try:
            for form in forms:
                began = perf_counter()
                peer = open_peer(
                    f"vllm={args.vllm}{form}", model=MODEL, dtype=args.dtype, threads=torch.get_num_threads()
                )
                opened.append(peer)
                peers.append(PeerRunner(peer, ours.target.eos_token_ids))
                log(f"  {peer.name}: loaded in {perf_counter() - began:.0f} s")
            plain, ngram, suffix = peers
            out: Found = {}
            worst = []
            for batch in (1, 8, 32):
                found = rates(plain, [ngram, suffix], block(ours, batch, args), args.repeats)
                worst.append(found[suffix.name][1])
                out[f"vllm_suffix_vs_plain_b{batch}"] = found[suffix.name][1]
                out[f"vllm_suffix_vs_ngram_b{batch}"] = found[suffix.name][1] / found[ngram.name][1]
        finally:
            for one in opened:
                one.close()
    return {**out, "vllm_worst_vs_plain": min(worst)}


def vllm_passes(args: argparse.Namespace) -> Found:
    """How far vLLM's tokens per pass, one row at a time with guesses of one length, are from a replay of what it wrote."""
    if args.vllm is None:
        return {}
    ours = foresay.load(MODEL, drafter="none", dtype="bf16")
    settings = Settings(target=MODEL, drafter="suffix", length=LENGTH, dtype=args.dtype)
    prompts = block(ours, 1, args)
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "suffix_of_one_length.json"
        # one pass at a time, so that they can be counted
        given.write_text(json.dumps(llm_arguments(settings, model_folder(MODEL)) | {"async_scheduling": False}))
        form = f"vllm={args.vllm}(arguments={given})"
        peer = open_peer(form, model=MODEL, dtype=args.dtype, threads=torch.get_num_threads())
        try:
            found = peer.run([ask.token_ids for ask in prompts.asks], prompts.params, 1)
        finally:
            peer.close()
    assert found.passes is not None
    # vLLM's first token comes with the prompt, before anything is guessed
    texts = [
        ([*map(int, ask.token_ids), out[0]], out[1:]) for ask, out in zip(prompts.asks, found.outputs, strict=True)
    ]
    records = tuple(Record(str(i), tuple(a), tuple(b)) for i, (a, b) in enumerate(texts) if b)
    written = Recording(records, ours.target.model.vocab_size, ours.target.eos_token_ids)
    told = replay(written, SuffixDrafter(), policy=ConstantLength(LENGTH)).stats.num_passes + len(texts)
    tokens = sum(map(len, found.outputs))
    log(f"  suffix, length {LENGTH}: {tokens} tokens in {found.passes} passes, {told} foretold")
    return {"vllm_tokens_per_pass_error": abs(found.passes / told - 1)}


def llamacpp(args: argparse.Namespace) -> Found:
    """llama.cpp's kernels under our loop, and under its own binding's."""
    try:
        target = foresay.load(str(packaged_file(MODEL)), backend="llama.cpp", drafter="none")
    except foresay.ConfigError as error:
        log(f"  left out: {error}")
        return {}
    plain, adaptive = MethodRunner(target, Method("none")), MethodRunner(target, Method("suffix"))
    out: Found = {}
    peers = []
    if args.llamacpp is not None:
        peers = [open_peer(f"llama.cpp={args.llamacpp}", model=MODEL, dtype="bf16", threads=torch.get_num_threads())]
    try:
        if peers:
            bindings = [PeerRunner(peer, target.target.eos_token_ids) for peer in peers]
            found = rates(plain, bindings, block(target, 1, args), args.repeats)
            out["llamacpp_plain_vs_binding"] = 1 / found[peers[0].name][1]
        out |= together(plain, adaptive, block(target, 8, args), args.repeats)
        out["llamacpp_worst_vs_plain"] = min(out["llamacpp_suffix_b1"], out["llamacpp_suffix_b8"])
    finally:
        for peer in peers:
            peer.close()
    return out


def together(plain: Runner, adaptive: Runner, prompts: PromptBlock, repeats: int) -> Found:
    """The same prompts in batches and one by one, in turns: what a batch gains is a quotient of neighbours."""
    found: dict[str, list[float]] = {"batch8_gain": [], "suffix_b1": [], "suffix_b8": []}
    for _ in range(repeats):
        eight, one = (rates(plain, [adaptive], replace(prompts, batch_size=size), 1) for size in (8, 1))
        found["batch8_gain"].append(eight["plain"][0] / one["plain"][0])
        found["suffix_b1"].append(one[adaptive.name][1])
        found["suffix_b8"].append(eight[adaptive.name][1])
    return {f"llamacpp_{name}": statistics.median(values) for name, values in found.items()}


def workers(args: argparse.Namespace) -> Found:
    """Prompts answered by two processes of one thread, over one of one thread; the models are there before."""
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


def load(args: argparse.Namespace) -> Found:
    """Requests that arrive at three rates, lived through and foreseen; plain and with a look-up that adapts."""
    target = foresay.load(MODEL, drafter="none", dtype="bf16")
    items = subset(load_items(), 12 if args.quick else 36)
    params = foresay.SamplingParams(max_new_tokens=32 if args.quick else 64)
    with tempfile.TemporaryDirectory() as folder:
        written = record(target.with_settings(max_batch_size=LOADED), items, Path(folder) / "r.jsonl", params)
    full = simulate(written, passes(target), [0.0] * len(items), None, read_length("0"), batch_size=LOADED)
    most = len(items) / full.seconds
    errors: dict[str, list[float]] = {"throughput": [], "latency": []}
    for drafter in ("none", "suffix"):
        for share in (0.3, 0.6, 0.9):
            told, lived = both(target, drafter, written, poisson(share * most, len(items), seed=1), params)
            errors["throughput"].append(abs(told.tokens_per_s / lived[0] - 1))
            errors["latency"].append(abs(told.mean("latency") / lived[1] - 1))
            log(
                f"  {drafter:<7} {share * most:.2f}/s: {told.tokens_per_s:6.1f} tokens/s foreseen, {lived[0]:6.1f} lived; "
                f"mean latency {told.mean('latency'):.2f} s foreseen, {lived[1]:.2f} lived"
            )
    return {f"load_{name}_error": max(found) for name, found in errors.items()}


def passes(target: foresay.Generator) -> Profile:
    """What passes take at this moment, in a few seconds."""
    return measure(target, batches=(1, 2, 4, LOADED), columns=(1, 3, 13), contexts=(128, 384), fills=FILLS, repeats=2)


def both(
    target: foresay.Generator,
    drafter: str,
    written: Recording,
    times: Sequence[float],
    params: foresay.SamplingParams,
) -> tuple[Load, tuple[float, float]]:
    """A load (foreseen, lived through as `live` has it), its passes measured before, within and behind it."""
    method, profiles = Method(drafter), [passes(target)]
    generator = method.generator(target, LOADED)
    lived = live(generator, written, times, params, lambda: profiles.append(passes(target)))
    profiles.append(passes(target))
    policy = read_length(method.own_length if drafter != "none" else 0)
    made = read_drafter(drafter).prepare(target.resources)() if target.resources else None
    return simulate(written, medians(profiles), times, made, policy, batch_size=LOADED), lived


def live(
    generator: foresay.Generator,
    written: Recording,
    times: Sequence[float],
    params: foresay.SamplingParams,
    aside: Callable[[], None],
) -> tuple[float, float]:
    """(tokens/s from the first arrival to the last token, mean seconds from a request's arrival to its end).

    aside: called between two steps about every ASIDE_S seconds, while the load's clock stands still. A shared machine's pace
    moves within a minute, and a profile measured before or after a load is of another machine.
    """
    generator.generate([list(written.records[0].prompt)], replace(params, max_new_tokens=8))  # warm
    session = generator.session()
    arrived: dict[int, float] = {}
    ended: dict[int, float] = {}
    tokens, began, due = 0, perf_counter(), ASIDE_S
    while len(ended) < len(times):
        now = perf_counter() - began
        if now >= due:
            aside()
            due = now + ASIDE_S
            began = perf_counter() - now
        while len(arrived) < len(times) and times[len(arrived)] <= now:
            record = written.records[len(arrived)]
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


PARTS: dict[str, Callable[[argparse.Namespace], Found]] = {
    "vllm": vllm,
    "vllm_passes": vllm_passes,
    "llamacpp": llamacpp,
    "workers": workers,
    "load": load,
}


def text_of(found: Found, args: argparse.Namespace) -> str:
    """The figures as they stand in RESULTS.md."""
    out = [
        f"{machine()['processor']}, {torch.get_num_threads()} threads, torch {torch.__version__}; vLLM in {args.dtype}",
        "",
    ]
    out += ["| figure | measured | wanted |", "|---|---|---|"]
    for key, value in found.items():
        wanted = f">= {AT_LEAST[key]:g}" if key in AT_LEAST else f"<= {AT_MOST[key]:g}" if key in AT_MOST else ""
        out.append(f"| {key} | {value:.3f} | {wanted} |")
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(PARTS), help="these parts alone")
    parser.add_argument("--vllm", help="the interpreter vLLM and foresay are installed in")
    parser.add_argument("--llamacpp", help="the interpreter llama-cpp-python is installed in")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="vLLM's")
    parser.add_argument("--quick", action="store_true", help="fewer prompts and tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    args = parser.parse_args()
    found: Found = {}
    try:
        for name, part in PARTS.items():
            if args.only is None or name in args.only:
                log(name)
                found |= part(args)
        if args.write:
            section(HERE / "RESULTS.md", "engines", text_of(found, args))
    finally:  # what was measured before a part failed
        print(json.dumps({key: round(value, 4) for key, value in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
