"""Speed of whole decoding against other engines and against foresay's own plain decoding, as ratios of neighbouring runs.

    python benchmarks/speed.py [--quick] [--only PART ...] [--vllm PYTHON] [--llamacpp PYTHON] [--peer-dtype fp32]
                               [--write] [--section NAME]

Shipped prompts, greedy, prompts included, with the same weights, threads and number of tokens. Methods and engines run in turn
with plain decoding, and each figure is a median of ratios to those neighbours, because shared machines drift. Other engines
run in environments of their own (docs/how-to/other-engines.md); engines that are not given are left out. `--peer-dtype fp32`
is for processors without bf16 instructions, on which other engines emulate bf16.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from time import perf_counter
from typing import Any

import torch
from common import (
    CONTEXT,
    MODEL,
    Figures,
    Timings,
    arguments,
    compared,
    filled,
    interpreters,
    log,
    measured,
    mixed,
    opened,
    parsed,
    pass_seconds,
    plain_of,
    publish,
    random_prompt,
    table,
)
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

import foresay
from foresay.decoding.protocols import ModelInput
from foresay.generation.method import PLAIN, Method
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import default_drafter, packaged_file
from foresay.models.sources.wrapping import wrap
from foresay_lab.bench.runners import MethodRunner, Runner
from foresay_lab.measure.live_run import run_live
from foresay_lab.measure.roofline import floor

BATCHES = (1, 8, 32)
HYBRID = {
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}
"""The shape of Qwen3.5 0.8B; other values are the family's own."""
DEFAULT, SUFFIX = Method(default_drafter(MODEL, LoadOptions())), Method("suffix")
NGRAM_DRAFTERS = ("prompt_lookup", "max_gram", "ngram_store", "suffix")
LEGEND = {
    "plain_step_over_floor_b1": ("plain bf16 step over weight bytes / memory bandwidth", "<= 1.5"),
    "tokens8_over_1_int4": ("4-bit pass over 8 tokens / over 1", "<= 1.7"),
    "hybrid_8_tokens_over_1": (
        "random model of Qwen3.5 0.8B's shape, 4 bits: pass over 8 tokens, of which 4 are rejected / over 1",
        "<= 1.6",
    ),
    "bandwidth_gb_per_s": ("memory bandwidth, GB/s", ""),
    "same_bits_share": ("outputs that are the same alone, in a batch and with drafts", ">= 1"),
    "int4_default_b1": ("default method / plain, GGUF file, batch 1", ""),
    "int4_b1_vs_llamacpp": ("plain / llama.cpp, same GGUF file, batch 1", ">= 1"),
    "int4_best_b1_vs_llamacpp_best": ("best / llama.cpp's best, same GGUF file, batch 1", ">= 1.5"),
    "best_b1_vs_vllm_best": ("best / vLLM's best, batch 1", ">= 1.3"),
    **{f"bf16_b{b}_vs_vllm": (f"plain / vLLM, batch {b}", ">= 1") for b in BATCHES},
    **{
        f"default_b{b}": (f"default method / plain, batch {b}", w)
        for b, w in zip(BATCHES, (">= 1.2", ">= 1", ">= 0.98"), strict=True)
    },
    "llamacpp_plain_vs_binding": ("llama.cpp under foresay's loop / its Python binding", ">= 0.95"),
    "llamacpp_suffix_b1": ("suffix / plain on llama.cpp, batch 1", ""),
    "llamacpp_suffix_b8": ("suffix / plain on llama.cpp, batch 8", ""),
    "llamacpp_batch8_gain": ("batch 8 / one by one on llama.cpp, plain", ">= 2"),
    **{f"overhead_share_b{b}": (f"share of a step outside the model, batch {b}", "<= 0.1") for b in (1, 32)},
    **{f"top_p_nucleus_adds_b{b}": (f"time that top-p 0.9 adds to a step, batch {b}", "<= 0.1") for b in (1, 32)},
    **{f"speculation_worst_b{b}": (f"slowest n-gram drafter / plain, batch {b}", ">= 0.97") for b in (8, 32)},
}


class Speed:
    """The targets of one run, and the table of everything that was timed."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.target = cache(self._target)
        self.rows: list[tuple[object, ...]] = []

    def _target(self, weights: str) -> foresay.Generator:
        """Without a drafter: "bf16", "int8", or "file", the 4-bit blocks of the GGUF file as they are."""
        given: dict[str, Any] = {"target": MODEL, "weights": weights}
        return foresay.load(drafter="none", **({"target": str(packaged_file(MODEL))} if weights == "file" else given))

    def compare(
        self, weights: str, batch: int, methods: Sequence[Method], peers: Sequence[Runner] = ()
    ) -> dict[str, Timings]:
        target = self.target(weights)
        runners = [*(MethodRunner(target, method) for method in methods), *peers]
        found = compared(plain_of(target), runners, mixed(target, batch, self.args.quick), self.args.repeats)
        self.rows += [
            (weights, batch, name, f"{one.rate:.1f}", "1x" if name == PLAIN else one) for name, one in found.items()
        ]
        return found


def bf16(bench: Speed) -> Figures:
    """Plain decoding, the default and a fixed length against vLLM and transformers, with bf16 weights."""
    out: Figures = {}
    args, target = bench.args, bench.target("bf16")
    with (
        opened(args, ["vLLM", "vLLM, n-grams"], target, args.peer_dtype) as vllms,
        opened(args, ["transformers"], target, args.peer_dtype) as transformers,
    ):
        for batch in BATCHES:
            methods = [DEFAULT, SUFFIX, *([Method("suffix", "12")] if batch == 1 else [])]
            found = bench.compare("bf16", batch, methods, [*vllms, *(transformers if batch == 1 else [])])
            out[f"default_b{batch}"] = found[DEFAULT.name].gain
            theirs = [found[peer.name].gain for peer in vllms if peer.name in found]
            if vllms and vllms[0].name in found:
                out[f"bf16_b{batch}_vs_vllm"] = 1 / found[vllms[0].name].gain
            if theirs and batch == 1:
                out["best_b1_vs_vllm_best"] = max(1.0, *(found[m.name].gain for m in methods)) / max(theirs)
    return out


def int4(bench: Speed) -> Figures:
    """The 4-bit blocks of a GGUF file against llama.cpp on the same file."""
    methods = [SUFFIX, Method("suffix", "12")]
    with opened(bench.args, ["llama.cpp", "llama.cpp, lookup"], bench.target("bf16")) as peers:
        found = bench.compare("file", 1, methods, peers)
    out = {"int4_default_b1": found[SUFFIX.name].gain}
    theirs = [found[peer.name].gain for peer in peers if peer.name in found]
    if theirs:
        out["int4_b1_vs_llamacpp"] = 1 / found[peers[0].name].gain
        out["int4_best_b1_vs_llamacpp_best"] = max(1.0, *(found[m.name].gain for m in methods)) / max(theirs)
    return out


def worst(bench: Speed) -> Figures:
    """The slowest n-gram drafter under adaptive lengths, where batches leave little to gain."""
    out: Figures = {}
    for batch in (8, 32):
        found = bench.compare("bf16", batch, [Method(name) for name in NGRAM_DRAFTERS])
        out[f"speculation_worst_b{batch}"] = min(one.gain for name, one in found.items() if name != PLAIN)
    return out


def passes(bench: Speed) -> Figures:
    """Single forward passes: a step over its floor in bf16, and 8 tokens over 1 in 4 bits."""
    bound = floor(bench.target("bf16").target.model)
    assert bound is not None

    def seconds(weights: str, tokens: int) -> float:
        model: Any = bench.target(weights).target.model
        prompt = random_prompt()
        return pass_seconds([(model, filled(model, prompt), ModelInput(prompt[:, :tokens], [tokens]))], 40)[0]

    step, one, eight = seconds("bf16", 1), seconds("file", 1), seconds("file", 8)
    log(f"  bf16, 1 token: {step * 1e3:.1f} ms, floor {bound.seconds(1, CONTEXT) * 1e3:.1f} ms")
    log(f"  4 bits: 1 token {one * 1e3:.1f} ms, 8 tokens {eight * 1e3:.1f} ms")
    return {
        "plain_step_over_floor_b1": step / bound.seconds(1, CONTEXT),
        "tokens8_over_1_int4": eight / one,
        "bandwidth_gb_per_s": bound.bytes_per_s / 1e9,
    }


def hybrid(bench: Speed) -> Figures:
    """Passes of a model with gated delta rules, whose rows are truncated after each pass of several tokens."""
    weights = AutoModelForCausalLM.from_config(
        Qwen3_5TextConfig(**HYBRID, num_hidden_layers=8 if bench.args.quick else 24), dtype=torch.bfloat16
    )
    model: Any = wrap("hybrid", weights, None, optimise=True, options=LoadOptions(weights="int4")).model
    prompt, times = random_prompt(), dict[int, list[float]]({1: [], 8: []})
    cache = filled(model, prompt)
    for _ in range(40):
        for tokens, kept in ((1, 1), (8, 4)):
            start, began = cache.lengths[0], perf_counter()
            model.forward(ModelInput(prompt[:, :tokens], [tokens]), cache)
            times[tokens].append(perf_counter() - began)
            cache.truncate([start + kept])
    one, eight = (statistics.median(some) for some in times.values())
    log(f"  Qwen3.5's shape, 4 bits: 1 token {one * 1e3:.1f} ms, 8 tokens {eight * 1e3:.1f} ms")
    return {"hybrid_8_tokens_over_1": eight / one}


def same_bits(bench: Speed) -> Figures:
    """The share of outputs that are the same alone, in a batch and with drafts, over three weight formats."""
    same, total = 0, 0
    for weights in ("bf16", "int8", "file"):
        target = bench.target(weights)
        block = mixed(target, 8, bench.args.quick)
        outputs: list[list[list[int]]] = []
        for method, batch in ((Method("none"), 1), (Method("none"), 8), (Method("suffix", "12"), 8), (SUFFIX, 8)):
            runner, one = MethodRunner(target, method), replace(block, batch_size=batch)
            runner.prepare(one)
            outputs.append(runner.run(one, one.asks).outputs)
        alike = sum(all(output == of_prompt[0] for output in of_prompt) for of_prompt in zip(*outputs, strict=True))
        log(f"  {weights}: {alike} of {len(block.asks)} outputs are the same")
        same, total = same + alike, total + len(block.asks)
    return {"same_bits_share": same / total}


def backend(bench: Speed) -> Figures:
    """llama.cpp under foresay's loop, against its own Python binding, and in batches of 8 against one by one."""
    try:
        target = foresay.load(str(packaged_file(MODEL)), backend="llama.cpp", drafter="none")
    except foresay.ConfigError as error:
        log(f"  left out: {error}")
        return {}
    plain, suffix, out = plain_of(target), MethodRunner(target, SUFFIX), Figures()
    run = partial(compared, plain, same_output=False)
    with opened(bench.args, ["llama.cpp"], target) as bindings:
        if bindings:
            found = run(bindings, mixed(target, 1, bench.args.quick), bench.args.repeats)
            out["llamacpp_plain_vs_binding"] = 1 / found[bindings[0].name].gain
    # in turn, because stretches that lie minutes apart differ by more than a batch gains
    block = mixed(target, 8, bench.args.quick)
    turns = [[run([suffix], replace(block, batch_size=size), 1) for size in (8, 1)] for _ in range(bench.args.repeats)]
    out["llamacpp_batch8_gain"] = statistics.median(eight[PLAIN].rate / one[PLAIN].rate for eight, one in turns)
    for i, size in enumerate((8, 1)):
        out[f"llamacpp_suffix_b{size}"] = statistics.median(turn[i][suffix.name].gain for turn in turns)
    return out


def overhead(bench: Speed) -> Figures:
    """Time of a step outside the model's forward passes, as a share of a greedy step, greedy and sampled."""
    out, target = Figures(), bench.target("bf16")
    for batch in (1, 32):
        block, outside, steps = mixed(target, batch, bench.args.quick), dict[str, float](), dict[str, float]()
        generator = target.with_settings(max_batch_size=batch)
        for kind, temperature, top_p in (("greedy", 0.0, 1.0), ("nucleus", 0.7, 0.9)):
            params = replace(block.params, temperature=temperature, top_p=top_p, seed=1)
            stats = run_live(generator, block.asks, params).stats
            outside[kind] = (stats.total_s - stats.target_s) / stats.num_tokens
            steps[kind] = stats.total_s / stats.num_tokens
        out[f"overhead_share_b{batch}"] = outside["greedy"] / steps["greedy"]
        out[f"top_p_nucleus_adds_b{batch}"] = (outside["nucleus"] - outside["greedy"]) / steps["greedy"]
    return out


PARTS: dict[str, Callable[[Speed], Figures]] = {
    "passes": passes,
    "hybrid": hybrid,
    "same_bits": same_bits,
    "backend": backend,
    "overhead": overhead,
    "int4": int4,
    "bf16": bf16,
    "worst": worst,
}


def main() -> int:
    parser = arguments(__doc__, parts=PARTS, repeats=3)
    interpreters(parser)
    parser.add_argument(
        "--peer-dtype", choices=("bf16", "fp32"), default="bf16", help="dtype of vLLM and transformers (default: bf16)"
    )
    args = parsed(parser)
    bench = Speed(args)

    def finish(figures: Figures) -> int:
        model = f"{MODEL} in bf16 and as a 4-bit GGUF file (other engines' 16-bit figures in {args.peer_dtype})"
        runs = (
            table(("weights", "batch", "method or engine", "tokens/s", "over plain"), bench.rows) if bench.rows else ""
        )
        return publish("speed", figures, args, legend=LEGEND, model=model, text=[runs])

    return measured({name: partial(part, bench) for name, part in PARTS.items()}, args.only, finish)


if __name__ == "__main__":
    sys.exit(main())
