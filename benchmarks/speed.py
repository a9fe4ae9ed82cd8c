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
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

from common import (
    CONTEXT,
    MODEL,
    Figures,
    Timings,
    arguments,
    available,
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

import foresay
from foresay.decoding.protocols import ModelInput
from foresay.generation.method import PLAIN, Method
from foresay.lab.bench.runners import MethodRunner, Runner
from foresay.lab.measure.roofline import floor
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import default_drafter, packaged_file

BATCHES = (1, 8, 32)
DEFAULT, SUFFIX = Method(default_drafter(MODEL, LoadOptions())), Method("suffix")
NGRAM_DRAFTERS = ("prompt_lookup", "max_gram", "ngram_store", "suffix")
LEGEND = {
    "plain_step_over_floor_b1": ("plain bf16 step over weight bytes / memory bandwidth", "<= 1.5"),
    "tokens8_over_1_int4": ("4-bit pass over 8 tokens / over 1", "<= 1.7"),
    "bandwidth_gb_per_s": ("memory bandwidth, GB/s", ""),
    "same_bits_share": ("outputs that are the same alone, in a batch and with drafts", ">= 1"),
    "gguf_load_s_per_gb": ("loading a 4-bit GGUF file, s per GB", "<= 5"),
    "int4_default_b1": ("default method / plain, GGUF file, batch 1", ""),
    "int4_b1_vs_llamacpp": ("plain / llama.cpp, same GGUF file, batch 1", ">= 1"),
    "int4_best_b1_vs_llamacpp_best": ("best / llama.cpp's best, same GGUF file, batch 1", ">= 1.5"),
    "best_b1_vs_vllm_best": ("best / vLLM's best, batch 1", ">= 1.3"),
    **{f"bf16_b{b}_vs_vllm": (f"plain / vLLM, batch {b}", ">= 1") for b in BATCHES},
    **{
        f"default_b{b}": (f"default method / plain, batch {b}", w)
        for b, w in zip(BATCHES, (">= 1.2", ">= 1", ">= 0.98"), strict=True)
    },
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
        opened(available(args, "vllm", "vllm(ngram=5)"), target, args.peer_dtype) as vllms,
        opened(["transformers"], target, args.peer_dtype) as transformers,
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
    with opened(available(bench.args, "llama.cpp", "llama.cpp(lookup=10)"), bench.target("bf16"), "bf16") as peers:
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


def gguf(bench: Speed) -> Figures:
    """Seconds to load a large 4-bit GGUF file, imports and disk not included."""
    bench.target("file")
    with tempfile.TemporaryDirectory() as folder:
        path = random_gguf(Path(folder) / "large.gguf", 2e8 if bench.args.quick else 1e9)
        gigabytes = path.stat().st_size / 1e9
        path.read_bytes()
        began = perf_counter()
        foresay.load(str(path), drafter="none")
        took = perf_counter() - began
    return {"gguf_load_s_per_gb": took / gigabytes}


def random_gguf(path: Path, size: float) -> Path:
    """Write a Llama of random Q4_0 blocks, about `size` bytes, with the tokens of the packaged model."""
    import gguf as library
    import numpy as np

    hidden, model_input = 2048, 5632
    per_layer = (2 * hidden * hidden + 2 * hidden * hidden // 4 + 3 * hidden * model_input) * 18 // 32
    layers = max(1, int((size - 49152 * hidden * 18 / 32) / per_layer))
    reader = library.GGUFReader(str(packaged_file(MODEL)))
    writer = library.GGUFWriter(path, "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(model_input)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(49152)
    for name in ("tokenizer.ggml.model", "tokenizer.ggml.pre"):
        writer.add_string(name, reader.fields[name].contents())
    for name in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"):
        writer.add_array(name, reader.fields[name].contents())
    for name in ("tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"):
        writer.add_uint32(name, reader.fields[name].contents())
    random = np.random.default_rng(0)

    def blocks(name: str, rows: int, columns: int) -> None:
        found = random.integers(0, 256, (rows, columns // 32, 18), dtype=np.uint8)
        found[..., :2] = np.full(1, 0.002, np.float16).view(np.uint8)  # the scales
        writer.add_tensor(name, found.reshape(rows, -1), raw_dtype=library.GGMLQuantizationType.Q4_0)

    blocks("token_embd.weight", 49152, hidden)
    writer.add_tensor("output_norm.weight", np.ones(hidden, np.float32))
    for i in range(layers):
        for part, rows, columns in (
            ("attn_q", hidden, hidden),
            ("attn_k", hidden // 4, hidden),
            ("attn_v", hidden // 4, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_gate", model_input, hidden),
            ("ffn_up", model_input, hidden),
            ("ffn_down", hidden, model_input),
        ):
            blocks(f"blk.{i}.{part}.weight", rows, columns)
        for part in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{part}.weight", np.ones(hidden, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


PARTS: dict[str, Callable[[Speed], Figures]] = {
    "passes": passes,
    "same_bits": same_bits,
    "gguf": gguf,
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
