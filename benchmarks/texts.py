"""Whole texts from a GGUF file of real size: plain decoding and speculation, compared with other engines on the same file.

    python benchmarks/texts.py FILE [--draft FILE] [--llamacpp PYTHON] [--ik PYTHON] [--openvino PYTHON] [--repeats 2]
                               [--write] [--section NAME]

Greedy, batch 1, 64 tokens after each of 12 shipped prompts of three kinds, all engines in turns at each prompt; rates are tokens
over seconds of all prompts, prompts included, and medians over repeats. The other engines run in environments of their own:
llama-cpp-python (plain, prompt lookup, and the draft model proposing four tokens), ik-llama-cpp-python (plain; it stops at
end tokens, and its time is scaled to 64 tokens), and openvino-genai (plain).
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

from common import (
    Figures,
    Peer,
    arguments,
    environment,
    filled,
    log,
    parsed,
    pass_seconds,
    publish,
    random_prompt,
    table,
)

import foresay
from foresay.decoding.protocols import ModelInput
from foresay.lab.data.datasets import load_items
from foresay.models.cpu.build import instructions

KINDS, PROMPTS, TOKENS = ("chat", "code", "editing"), 4, 64
LEGEND = {
    "plain_vs_llamacpp": ("plain decoding: our rate over llama.cpp's", ">= 1.0"),
    "plain_vs_ik": ("plain decoding: our rate over ik_llama.cpp's", ">= 0.95"),
    "plain_vs_openvino": ("plain decoding: our rate over OpenVINO's", ">= 1.3"),
    "best_vs_llamacpp_best": ("our fastest method over llama.cpp's fastest", ">= 2"),
    "batch8_vs_llamacpp": ("8 sequences, one token each: llama.cpp's time over ours", ">= 2"),
    "prompt512_vs_ik": ("prompt of 512 tokens: ik_llama.cpp's time over ours", ">= 1"),
    "best_speedup": ("our fastest method over our plain decoding", ""),
    "draft_speedup": ("with the draft model, adaptive, over our plain decoding", ">= 1.8"),
    "identical_share": ("share of our texts that equal plain decoding's", ">= 1"),
}
_LLAMA = """
import json, sys
from itertools import islice
from time import perf_counter
import numpy as np
from llama_cpp import Llama
path, threads, draft = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def make(path, **more):
    return Llama(path, n_ctx=2048, n_threads=threads, n_threads_batch=threads, verbose=False, **more)
models = {"plain": make(path)}
if draft:
    from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding
    class Draft(LlamaDraftModel):
        def __init__(self):
            self.model = make(draft)
        def __call__(self, input_ids, /, **more):
            return np.array(list(islice(self.model.generate(input_ids.tolist(), temp=0.0), 4)), dtype=np.intc)
    models["lookup"] = make(path, draft_model=LlamaPromptLookupDecoding())
    models["draft model"] = make(path, draft_model=Draft())
print(json.dumps(list(models)), flush=True)
for line in sys.stdin:
    mode, ids, count = json.loads(line)
    model = models[mode]
    model.reset()
    began = perf_counter()
    for _ in islice(model.generate(ids, temp=0.0), count):
        pass
    print(perf_counter() - began, flush=True)
"""
_IK = """
import json, sys
from time import perf_counter
from ik_llama_cpp import IkLlama
model = IkLlama(sys.argv[1], n_ctx=2048, n_threads=int(sys.argv[2]), verbose=False)
print(json.dumps(["plain"]), flush=True)
for line in sys.stdin:
    mode, ids, count = json.loads(line)
    began = perf_counter()
    found = model.generate(ids, max_tokens=count)
    print((perf_counter() - began) * count / max(1, len(found)), flush=True)
"""
_OPENVINO = """
import json, sys
from time import perf_counter
import numpy as np
import openvino as ov
import openvino_genai as genai
model = genai.LLMPipeline(sys.argv[1], "CPU", {"INFERENCE_NUM_THREADS": int(sys.argv[2])})
print(json.dumps(["plain"]), flush=True)
for line in sys.stdin:
    mode, ids, count = json.loads(line)
    given = np.array([ids], dtype=np.int64)
    inputs = genai.TokenizedInputs(ov.Tensor(given), ov.Tensor(np.ones_like(given)))
    began = perf_counter()
    model.generate(inputs, genai.GenerationConfig(max_new_tokens=count, ignore_eos=True, do_sample=False))
    print(perf_counter() - began, flush=True)
"""
_BATCH = """
import sys
from time import perf_counter
import llama_cpp as c
path, threads, sequences, before = sys.argv[1], int(sys.argv[2]), 8, 128
c.llama_backend_init()
silent = c.llama_log_callback(lambda *_: None)
c.llama_log_set(silent, None)
model = c.llama_model_load_from_file(path.encode(), c.llama_model_default_params())
params = c.llama_context_default_params()
params.n_ctx, params.n_seq_max, params.n_threads, params.n_threads_batch = 4096, sequences, threads, threads
params.n_batch = params.n_ubatch = 512
context = c.llama_init_from_model(model, params)
batch = c.llama_batch_init(512, 0, 1)
def decode(rows):
    batch.n_tokens = len(rows)
    for i, (token, position, sequence) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, position, 1, sequence, 1
    assert c.llama_decode(context, batch) == 0
for s in range(sequences):
    decode([(i * (s + 1) % 4000 + 5, i, s) for i in range(before)])
for line in sys.stdin:
    began = perf_counter()
    decode([(s * 31 % 4000 + 5, before, s) for s in range(sequences)])
    c.llama_get_logits(context)
    print(perf_counter() - began, flush=True)
    for s in range(sequences):
        c.llama_memory_seq_rm(c.llama_get_memory(context), s, before, -1)
"""


def of_peer(name: str, peer: Peer) -> dict[str, Callable[[list[int]], float]]:
    """Return the methods of an engine: seconds for a text."""

    def method(mode: str) -> Callable[[list[int]], float]:
        return lambda ids: peer.seconds(mode, ids, TOKENS)

    return {f"{name}, {mode}": method(mode) for mode in json.loads(peer.line())}


class Ours:
    """One of our methods; keeps its texts."""

    def __init__(self, path: str, **options: Any) -> None:
        self.generator = foresay.load(path, **options)
        self.texts: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, ids: list[int]) -> float:
        began = perf_counter()
        found = self.generator.generate(ids, max_new_tokens=TOKENS, ignore_eos=True)
        seconds = perf_counter() - began
        self.texts[tuple(ids)] = list(found.token_ids)
        return seconds


def prompts_of(generator: Any) -> list[list[int]]:
    """Return the ids of the prompts as chats."""
    items = load_items()
    chosen = [item for kind in KINDS for item in [one for one in items if one.category == kind][:PROMPTS]]
    found = []
    for item in chosen:
        chat = [{"role": "user", "content": item.prompt}]
        ids = generator.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
        found.append(list(ids))
    return found


def rates(
    methods: dict[str, Callable[[list[int]], float]], prompts: Sequence[list[int]], repeats: int
) -> dict[str, float]:
    """Return tokens per second of each method; the first turn is not counted."""
    for method in methods.values():
        method(prompts[0])
    found: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats):
        seconds = dict.fromkeys(methods, 0.0)
        for prompt in prompts:
            for name, method in methods.items():
                seconds[name] += method(prompt)
        for name, total in seconds.items():
            found[name].append(len(prompts) * TOKENS / total)
    return {name: statistics.median(some) for name, some in found.items()}


def main() -> int:
    parser = arguments(__doc__, repeats=2, quick=False)
    parser.add_argument("file")
    for name in ("draft", "llamacpp", "ik", "openvino"):
        parser.add_argument(f"--{name}", default="")
    args = parsed(parser)
    ours: dict[str, Ours] = {"plain": Ours(args.file, drafter="none"), "suffix": Ours(args.file, drafter="suffix")}
    if args.draft:
        ours["draft model"] = Ours(args.file, drafter=f"model({args.draft})")
        ours["hybrid"] = Ours(args.file, drafter=f"hybrid(suffix, model({args.draft}))")
    prompts = prompts_of(ours["plain"].generator)
    figures: Figures = {}
    with ExitStack() as stack:
        methods: dict[str, Callable[[list[int]], float]] = {f"foresay, {name}": one for name, one in ours.items()}
        if args.llamacpp:
            methods |= of_peer("llama.cpp", Peer(stack, args.llamacpp, _LLAMA, args.file, args.draft))
        if args.ik:
            ik = Peer(stack, args.ik, _IK, args.file)
            methods |= of_peer("ik_llama.cpp", ik)
        if args.openvino:
            methods |= of_peer("OpenVINO", Peer(stack, args.openvino, _OPENVINO, args.file))
        found = rates(methods, prompts, args.repeats)
        if args.ik:
            figures["prompt512_vs_ik"] = prompt512(ik, ours["plain"])
    best = max(rate for name, rate in found.items() if name.startswith("foresay"))
    plain = found["foresay, plain"]
    for key, engine in (("llamacpp", "llama.cpp"), ("ik", "ik_llama.cpp"), ("openvino", "OpenVINO")):
        if (other := found.get(f"{engine}, plain")) is not None:
            figures[f"plain_vs_{key}"] = plain / other
    theirs = [rate for name, rate in found.items() if name.startswith("llama.cpp")]
    if theirs:
        figures["best_vs_llamacpp_best"] = best / max(theirs)
        figures["batch8_vs_llamacpp"] = batch8(args, ours["plain"])
    figures["best_speedup"] = best / plain
    if args.draft:
        figures["draft_speedup"] = found["foresay, draft model"] / plain
    same = [
        one.texts[ids] == text
        for name, one in ours.items()
        if name != "plain"
        for ids, text in ours["plain"].texts.items()
    ]
    figures["identical_share"] = sum(same) / len(same)
    text = table(("method", "tokens/s"), [[name, f"{rate:.1f}"] for name, rate in found.items()])
    log(text)
    about = f"{Path(args.file).stem}, {Path(args.file).stat().st_size / 1e9:.2f} GB; kernels: {instructions()}"
    return publish("texts", figures, args, legend=LEGEND, model=about, text=[f"The rates: {environment(about)}", text])


def prompt512(peer: Peer, ours: Ours) -> float:
    """Return another engine's time of a prompt of 512 tokens and one more over ours, in turns."""
    one, other = [], []
    for i in range(5):
        ids = [(j * (i + 7)) % 4000 + 5 for j in range(512)]
        began = perf_counter()
        ours.generator.generate(ids, max_new_tokens=1)
        one.append(perf_counter() - began)
        other.append(peer.seconds("plain", ids, 1))
    log(f"prompt of 512: {512 / statistics.median(one):.0f} tokens/s, the other {512 / statistics.median(other):.0f}")
    return statistics.median(other) / statistics.median(one)


def batch8(args: Any, ours: Ours) -> float:
    """Return llama.cpp's time of a pass over eight sequences over ours, in turns."""
    model, prompts = ours.generator.target.model, random_prompt(8)
    cache = filled(model, prompts)
    one, other = [], []
    with ExitStack() as stack:
        peer = Peer(stack, args.llamacpp, _BATCH, args.file)
        for _ in range(15):
            one += pass_seconds([(model, cache, ModelInput(prompts[:, :1], [1] * 8))], 3)
            other.append(peer.seconds())
    log(f"eight sequences: {statistics.median(one) * 1e3:.1f} ms, llama.cpp {statistics.median(other) * 1e3:.1f} ms")
    return statistics.median(other) / statistics.median(one)


if __name__ == "__main__":
    sys.exit(main())
