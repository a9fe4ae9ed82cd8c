"""Hashes of generated tokens: a change of structure must not change any of them.

    scripts/pin_steps.py --write FILE    decode everything, write {cell: sha256}
    scripts/pin_steps.py --check FILE    decode again, name the cells that differ, exit 1 if any does

A cell's hash is over the Steps of each request: token ids, origins, counts drafted and accepted, finish reason. Cells: the matrix
of the distribution tests at 50 seeds, every transformers family greedily, and SmolLM2 in bfloat16 at batch 1 and 8 with every
drafter and rule. Nothing that depends on time counts: adaptive lengths are left out, and so is the order of Steps between
requests, since prefill is scheduled by a clock. Compare on one machine only: kernels round differently elsewhere.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

import torch

import foresay
from foresay.decoding.outcome import Step
from foresay.decoding.sampling_params import SamplingParams
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.seq2seq import Seq2SeqModel
from helpers import distribution_cells as cells
from helpers.families import FAMILIES, SEQ2SEQ, VOCAB, make, make_seq2seq
from helpers.support import Sometimes, run

SEEDS = 50
DRAFTERS = (
    "none",
    "prompt_lookup",
    "max_gram",
    "ngram_store",
    "ngram_store(n=4, levels=one, filler_top_k=3, stop_unknown=false)",
    "suffix",
    "suffix(keep=true)",
    "self(12)",
    "cascade(self=12, max_gram; k=[[4, 6], [0, 6]])",
    "cascade(self=20, suffix; k=[[4, 6], [0, 6]], lenience=2)",
)
RULES = ("speculative", "block", "match", "coupled", "lenience(2)", "typical")
PROMPTS = [
    "Write the numbers from one to thirty in words, separated by commas.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Name three rivers of Europe and three of Asia.",
    "Repeat this sentence twice: the quick brown fox jumps over the lazy dog.",
    "What is the capital of France, and what is it known for?",
    "import numpy as np\n\ndef softmax(x):\n",
    "A short poem about the sea:",
    "List the days of the week. List the days of the week again.",
]


def digest(steps: Iterable[Step]) -> str:
    """Return the sha256 of the Steps of each request, without times."""
    out = hashlib.sha256()
    for s in sorted(steps, key=lambda step: step.request_id):  # when rows join depends on the time of prefill
        reason = None if s.finish_reason is None else s.finish_reason.value
        row = [s.request_id, list(s.token_ids), [o.value for o in s.origins], s.num_drafted, s.num_accepted, reason]
        out.update(json.dumps(row).encode())
    return out.hexdigest()


def distribution_cells() -> Iterator[tuple[str, str]]:
    for cell in cells.pairwise():
        drafter, rule, length, params, batch = cell
        if length == "throughput" or (length == "fixed" and rule in ("match", "coupled")):
            continue  # adapts to measured time
        size, late = cells.BATCHES[batch]
        requests = [SamplingParams.of(cells.PARAMS[params], seed=seed, max_new_tokens=8) for seed in range(SEEDS)]
        _, steps, _ = run(
            cells.TARGET,
            [cells.PROMPT] * SEEDS,
            requests,
            drafter=cells.DRAFTERS[drafter](),
            rule=rule,
            policy=cells.LENGTHS[length](),
            max_batch_size=size,
            join_later=late,
        )
        yield "distribution " + "-".join(cell), digest(steps)


def prompts_of(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(2, vocab, (n,), generator=generator).tolist() for n in (1, 12, 5, 23, 9, 2)]


def family_cells() -> Iterator[tuple[str, str]]:
    params = SamplingParams(max_new_tokens=48)
    for family in FAMILIES:
        target = CausalModel(copy.deepcopy(make(family)))
        outputs, steps, _ = run(target, prompts_of(VOCAB), params)
        yield f"family {family} plain", digest(steps)
        _, steps, _ = run(target, prompts_of(VOCAB), params, drafter=Sometimes(outputs, VOCAB), gamma=5, join_later=3)
        yield f"family {family} drafted", digest(steps)
    for family in SEQ2SEQ:
        target = Seq2SeqModel(make_seq2seq(family))
        vocab = target.vocab_size
        sources = prompts_of(min(VOCAB, vocab))
        starts = [[1]] * len(sources)
        outputs, steps, _ = run(target, starts, params, sources=sources)
        yield f"family {family} plain", digest(steps)
        _, steps, _ = run(target, starts, params, sources=sources, drafter=Sometimes(outputs, vocab), gamma=5)
        yield f"family {family} drafted", digest(steps)


def decoded(generator: foresay.Generator, batch: int, params: SamplingParams) -> str:
    steps: list[Step] = []
    for start in range(0, len(PROMPTS), batch):
        prompts = PROMPTS[start : start + batch]
        each = [SamplingParams.of(params, seed=start + i) for i in range(len(prompts))]
        for one in generator.generate(prompts, each):
            steps += one.steps
    return digest(steps)


def model_cells() -> Iterator[tuple[str, str]]:
    base = foresay.load("smollm2-135m", dtype="bfloat16")
    greedy = SamplingParams(max_new_tokens=24)
    sampled = SamplingParams(max_new_tokens=16, temperature=0.8, top_p=0.95)
    for drafter in DRAFTERS:
        for batch in (1, 8):
            length = (
                None if drafter == "none" or drafter.startswith("cascade") else 6
            )  # adaptive lengths depend on time
            generator = foresay.change(base, drafter=drafter, length=length, max_batch_size=batch)
            yield f"smollm2 {drafter} batch {batch}", decoded(generator, batch, greedy)
    for rule in RULES:
        for drafter in ("suffix", "self(12)"):
            generator = foresay.change(base, drafter=drafter, rule=rule, length=6, max_batch_size=8)
            yield f"smollm2 sampled {drafter} {rule}", decoded(generator, 8, sampled)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", type=Path, metavar="FILE")
    group.add_argument("--check", type=Path, metavar="FILE")
    parser.add_argument("--only", choices=("distribution", "family", "smollm2"), help="one kind of cell")
    given = parser.parse_args()
    kinds = {"distribution": distribution_cells, "family": family_cells, "smollm2": model_cells}
    found = {name: value for kind, cells in kinds.items() if given.only in (None, kind) for name, value in cells()}
    if given.write:
        given.write.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{len(found)} hashes written")
        return 0
    known = json.loads(given.check.read_text())
    different = sorted(name for name, value in found.items() if known.get(name) != value)
    missing = sorted(name for name in known if name not in found and given.only in (None, name.split()[0]))
    print(f"{len(found) - len(different)} of {len(found)} hashes hold, {len(missing)} missing")
    for name in different + missing:
        print(f"  {name}")
    return 1 if different or missing else 0


if __name__ == "__main__":
    sys.exit(main())
