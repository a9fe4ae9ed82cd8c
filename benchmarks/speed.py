"""Whole decoding beside other engines and beside ourselves, as ratios of neighbouring runs.

    python benchmarks/speed.py [--quick] [--only NAME ...] [--vllm PYTHON] [--llamacpp PYTHON]
                               [--economize PYTHON] [--peer-dtype fp32] [--write] [--section NAME]

Shipped prompts, greedy, prompts included, the same weights, threads and number of tokens. Contenders take turns between runs of
our plain decoding (`foresay.lab.bench`), and each figure is a median of ratios to those neighbours, since shared machines
drift. Other engines live in interpreters of their own (docs/peers.md); what is not given is left out. `--peer-dtype`
names what they compute in beside our bf16: a processor without bf16 emulates it. `--write` puts the figures into
benchmarks/RESULTS.md, under `--section`, so that those of another processor may stand beside them. The last line is one JSON
object.
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
from time import perf_counter
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import foresay
from foresay.decoding.protocols import ModelInput
from foresay.generation.method import PLAIN, Method
from foresay.lab.bench.peers import open_peer
from foresay.lab.bench.runners import MethodRunner, PeerRunner, PromptBlock, Runner
from foresay.lab.bench.turns import take_turns
from foresay.lab.data.datasets import load_items, subset
from foresay.lab.data.requests import RequestBuilder
from foresay.lab.measure.roofline import floor
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import default_drafter, packaged_file
from foresay.records.provenance import machine
from foresay.records.results import Run

HERE = Path(__file__).parent
MODEL = "smollm2-135m"
BATCHES = (1, 8, 32)
DEFAULT, LOOK_UP = Method(default_drafter(MODEL, LoadOptions())), Method("suffix")
LOOK_UPS = ("prompt_lookup", "max_gram", "ngram_store", "suffix")
WANTED = {
    **{f"bf16_b{b}_vs_vllm": 1.0 for b in BATCHES},
    "best_b1_vs_vllm_best": 1.3,
    "int4_b1_vs_llamacpp": 1.0,
    "int4_best_b1_vs_llamacpp_best": 1.5,
    "speculation_worst_b8": 0.97,
    "speculation_worst_b32": 0.97,
    "default_b1": 1.2,
    "default_b8": 1.0,
    "default_b32": 0.98,
    "same_bits_share": 1.0,
}
AT_MOST = {"columns8_over_1_int4": 1.7, "plain_step_over_floor_b1": 1.5, "gguf_load_s_per_gb": 5.0}


class Speed:
    """Targets, prompts and engines of one run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.new, self.repeats = (24 if args.quick else 64), args.repeats
        self.threads = torch.get_num_threads()
        self._targets: dict[str, foresay.Generator] = {}
        self._peers: dict[str, Any] = {}
        self.table: list[tuple[str, int, str, float, list[float]]] = []
        """(weights, batch size, contender, tokens/s, ratios to plain decoding)."""

    def target(self, weights: str) -> foresay.Generator:
        """Ours, without a drafter: "bf16", "int8", or "file", the 4-bit blocks of the GGUF file as they are."""
        if weights not in self._targets:
            given: dict[str, Any] = (
                {"target": str(packaged_file(MODEL))} if weights == "file" else {"target": MODEL, "weights": weights}
            )
            self._targets[weights] = foresay.load(drafter="none", **given)
        return self._targets[weights]

    def peer(self, expression: str, dtype: str) -> PeerRunner:
        """Another engine, loaded once."""
        if expression not in self._peers:
            began = perf_counter()
            self._peers[expression] = open_peer(expression, model=MODEL, dtype=dtype, threads=self.threads)
            log(f"  {expression}: loaded in {perf_counter() - began:.0f} s")
        return PeerRunner(self._peers[expression], self.target("bf16").target.eos_token_ids)

    def peers(self, *forms: str, dtype: str) -> list[PeerRunner]:
        """The peers that were given: "vllm" and "vllm(ngram=5)" want --vllm, "llama.cpp" --llamacpp."""
        pythons = {"vllm": self.args.vllm, "llama.cpp": self.args.llamacpp, "economize": self.args.economize}
        out = []
        for form in forms:
            kind, mark, settings = form.partition("(")
            python = pythons.get(kind)
            if kind == "transformers" or python is not None:
                out.append(self.peer(form if python is None else f"{kind}={python}{mark}{settings}", dtype))
        return out

    def close(self) -> None:
        """End what was started."""
        for peer in self._peers.values():
            peer.close()

    def block(self, weights: str, batch: int) -> PromptBlock:
        """Mixed prompts: categories in equal parts, at least two batches of them."""
        count = {1: 7, 8: 21, 32: 49}[batch] if not self.args.quick else {1: 4, 8: 12, 32: 35}[batch]
        asks = RequestBuilder(self.target(weights)).first(subset(load_items(), count))
        return PromptBlock("mixed", asks, batch, foresay.SamplingParams(max_new_tokens=self.new))

    def compare(self, weights: str, batch: int, methods: Sequence[Method], peers: Sequence[Runner]) -> dict[str, float]:
        """Name -> speed over our plain decoding, median of repeats; who fails is told and left out."""
        runners: list[Runner] = [*(MethodRunner(self.target(weights), method) for method in methods), *peers]
        block = self.block(weights, batch)
        turns = [(repeat, runner) for repeat in range(self.repeats) for runner in runners]
        ratios: dict[str, list[float]] = {}
        rates: dict[str, list[float]] = {}
        plain = MethodRunner(self.target(weights), Method("none"))
        for run, _ in take_turns(plain, turns, block, warm=replace(block, asks=block.asks[:1]), between=1):
            if not isinstance(run, Run):
                log(f"  {run.cell.method} failed: {run.error}")
                continue
            rates.setdefault(run.cell.method, []).append(run.tokens_per_s)
            if run.speed_up is not None:
                ratios.setdefault(run.cell.method, []).append(run.speed_up)
            if run.identical is False and run.cell.method in {m.name for m in methods}:
                raise AssertionError(f"{run.cell.method}: {run.note}")
        for name, found in rates.items():
            gains = sorted(ratios.get(name, [1.0]))
            log(
                f"  batch {batch}, {weights}: {name:<32} {statistics.median(found):7.1f} tokens/s  "
                f"{statistics.median(gains):.2f}x ({gains[0]:.2f} to {gains[-1]:.2f})"
            )
        self.table += [
            (weights, batch, name, statistics.median(rates[name]), sorted(ratios.get(name, [1.0]))) for name in rates
        ]
        return {name: statistics.median(found) for name, found in ratios.items()}


def log(text: str) -> None:
    print(text, flush=True)


def bf16(bench: Speed) -> dict[str, float]:
    """Plain, the default and fixed lengths beside vLLM, transformers and economize, with bf16 weights."""
    out: dict[str, float] = {}
    dtype = bench.args.peer_dtype
    vllms = bench.peers("vllm", "vllm(ngram=5)", dtype=dtype)
    for batch in BATCHES:
        methods = [DEFAULT, LOOK_UP, Method("suffix", "12")] if batch == 1 else [DEFAULT, LOOK_UP]
        alone = ("transformers", "economize", "economize(lookup=5)") if batch == 1 else ()
        peers = [*vllms, *bench.peers(*alone, dtype=dtype)]
        found = bench.compare("bf16", batch, methods, peers)
        out[f"default_b{batch}"] = found[DEFAULT.name]
        theirs = [found[peer.name] for peer in vllms if peer.name in found]
        if vllms and vllms[0].name in found:
            out[f"bf16_b{batch}_vs_vllm"] = 1 / found[vllms[0].name]
        if theirs and batch == 1:
            out["best_b1_vs_vllm_best"] = max(1.0, *(found[m.name] for m in methods)) / max(theirs)
    return out


def int4(bench: Speed) -> dict[str, float]:
    """The 4-bit blocks of a GGUF file beside llama.cpp on the same file."""
    peers = bench.peers("llama.cpp", "llama.cpp(lookup=10)", dtype="bf16")
    methods = [
        LOOK_UP,
        Method("suffix", "12"),
    ]  # of a file nothing is known, a look-up is what drafts unless told otherwise
    found = bench.compare("file", 1, methods, peers)
    out = {"int4_default_b1": found[LOOK_UP.name]}
    theirs = [found[peer.name] for peer in peers if peer.name in found]
    if theirs:
        out["int4_b1_vs_llamacpp"] = 1 / found[peers[0].name]
        out["int4_best_b1_vs_llamacpp_best"] = max(1.0, *(found[m.name] for m in methods)) / max(theirs)
    return out


def worst(bench: Speed) -> dict[str, float]:
    """The least that any look-up writes under the length that adapts, where batches leave little to gain."""
    out = {}
    for batch in (8, 32):
        found = bench.compare("bf16", batch, [Method(name) for name in LOOK_UPS], [])
        out[f"speculation_worst_b{batch}"] = min(found.values())
    return out


def passes(bench: Speed) -> dict[str, float]:
    """Single passes: a step over its floor in bf16, and eight columns over one in 4 bits."""
    bound = floor(bench.target("bf16").target.model)
    assert bound is not None
    step = _seconds(bench.target("bf16"), 1)
    one, eight = _seconds(bench.target("file"), 1), _seconds(bench.target("file"), 8)
    log(
        f"  bf16 1 column {step * 1e3:.1f} ms, floor {bound.seconds(1, 128) * 1e3:.1f} ms at {bound.bytes_per_s / 1e9:.1f} GB/s"
    )
    log(f"  4 bits 1 column {one * 1e3:.1f} ms, 8 columns {eight * 1e3:.1f} ms")
    return {
        "plain_step_over_floor_b1": step / bound.seconds(1, 128),
        "columns8_over_1_int4": eight / one,
        "bandwidth_gb_per_s": bound.bytes_per_s / 1e9,
    }


def _seconds(target: foresay.Generator, columns: int) -> float:
    """The median of passes over one row with 128 tokens of context."""
    from foresay.decoding.rows import Row, Rows

    model: Any = target.target.model
    cache = model.new_cache()
    prompt = torch.randint(5, 40000, (1, 128), generator=torch.Generator().manual_seed(0))
    model.admit(Rows([Row(0, prompt[0].tolist(), foresay.SamplingParams(), limit=256)]), 0, cache)
    model.forward(ModelInput(prompt, [128]), cache)
    took = []
    for _ in range(40):
        began = perf_counter()
        model.forward(ModelInput(prompt[:, :columns], [columns]), cache)
        took.append(perf_counter() - began)
        cache.truncate([128])
    return statistics.median(took)


def same_bits(bench: Speed) -> dict[str, float]:
    """The share of outputs that are the same alone, in a batch, and speculated, by weight format."""
    same, total = 0, 0
    for weights in ("bf16", "int8", "file"):
        target, block = bench.target(weights), bench.block(weights, 8)
        outputs: list[list[list[int]]] = []
        for method, batch in ((Method("none"), 1), (Method("none"), 8), (Method("suffix", "12"), 8), (LOOK_UP, 8)):
            runner = MethodRunner(target, method)
            one = replace(block, batch_size=batch)
            runner.prepare(one)
            outputs.append(runner.run(one, one.asks).outputs)
        alike = sum(len({tuple(o[i]) for o in outputs}) == 1 for i in range(len(outputs[0])))
        log(f"  {weights}: {alike} of {len(outputs[0])} outputs are the same")
        same, total = same + alike, total + len(outputs[0])
    return {"same_bits_share": same / total}


def gguf(bench: Speed) -> dict[str, float]:
    """Loading a large 4-bit GGUF file."""
    bench.target("file")  # imports are not what is timed
    size = 2e8 if bench.args.quick else 1e9
    with tempfile.TemporaryDirectory() as folder:
        path = _random_gguf(Path(folder) / "large.gguf", size)
        gigabytes = path.stat().st_size / 1e9
        path.read_bytes()  # from memory, not from the disk
        began = perf_counter()
        foresay.load(str(path), drafter="none")
        took = perf_counter() - began
    log(f"  {gigabytes:.2f} GB in {took:.1f} s")
    return {"gguf_load_s_per_gb": took / gigabytes}


def _random_gguf(path: Path, size: float) -> Path:
    """A Llama of random Q4_0 blocks of about `size` bytes, with the tokens of the packaged model."""
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


PARTS: dict[str, Callable[[Speed], dict[str, float]]] = {
    "passes": passes,
    "same_bits": same_bits,
    "gguf": gguf,
    "int4": int4,
    "bf16": bf16,
    "worst": worst,
}


def text_of(figures: dict[str, float], bench: Speed) -> str:
    """The figures as they stand in RESULTS.md."""
    where = machine()
    peers = f"; other engines' 16-bit figures in {bench.args.peer_dtype}" if bench.args.peer_dtype != "bf16" else ""
    out = [f"{where['processor']}, {torch.get_num_threads()} threads, torch {torch.__version__}{peers}", ""]
    out += ["| figure | measured | wanted |", "|---|---|---|"]
    for key, value in figures.items():
        wanted = f">= {WANTED[key]:g}" if key in WANTED else f"<= {AT_MOST[key]:g}" if key in AT_MOST else ""
        out.append(f"| {key} | {value:.3f} | {wanted} |")
    out += ["", "| weights | batch | | tokens/s | over our plain |", "|---|---|---|---|---|"]
    for weights, batch, name, rate, gains in bench.table:
        spread = "1x" if name == PLAIN else f"{statistics.median(gains):.2f}x ({gains[0]:.2f} to {gains[-1]:.2f})"
        out.append(f"| {weights} | {batch} | {name} | {rate:.1f} | {spread} |")
    return "\n".join(out)


def section(path: Path, name: str, text: str) -> None:
    """Replace a benchmark's section of a results file; one that is new comes first."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    old = path.read_text()
    if begin not in old:
        title, _, rest = old.partition("\n")
        old = f"{title}\n\n{begin}\n{end}\n{rest}"
    head, _, rest = old.partition(begin)
    script, space, where = name.partition(" ")
    path.write_text(f"{head}{begin}\n## benchmarks/{script}.py{space}{where}\n\n{text}\n{end}{rest.partition(end)[2]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer prompts, tokens and repeats")
    parser.add_argument("--repeats", type=int, default=3, help="of each contender's run")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="some parts only")
    parser.add_argument("--vllm", help="the interpreter vLLM is installed in")
    parser.add_argument("--llamacpp", help="the interpreter llama-cpp-python is installed in")
    parser.add_argument("--economize", help="the interpreter economize is installed in")
    parser.add_argument(
        "--peer-dtype", choices=("bf16", "fp32"), default="bf16", help="of vLLM's and transformers' passes"
    )
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    parser.add_argument("--section", default="speed", help='of RESULTS.md: "speed", or "speed on ..."')
    args = parser.parse_args()
    bench = Speed(args)
    figures: dict[str, float] = {}
    try:
        for name in args.only or PARTS:
            began = perf_counter()
            log(name)
            found = PARTS[name](bench)
            figures |= found
            for key, value in found.items():
                log(f"  {key}: {value:.3f}")
            log(f"  ({perf_counter() - began:.0f} s)")
            if args.write:
                section(HERE / "RESULTS.md", args.section, text_of(figures, bench))
    finally:
        bench.close()
    print(json.dumps({key: round(value, 4) for key, value in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
