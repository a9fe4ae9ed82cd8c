"""Wide and shallow, or narrow and deep: draft models of equal parameters, trained alike for the same time.

    python benchmarks/shapes.py --outputs RECORDING [--outputs ...] --work FOLDER [--minutes N] [--data FOLDER] [--write]

Each shape has the target's width, embeddings and head (frozen), random layers of its own, and as many parameters in them; what
differs is how many layers they are. All are trained on recordings of the target for `--minutes` each, then timed in turns: a
pass of one column over the target's, and whole decoding with K guesses over plain decoding, on prompts that nothing was trained
on. Shapes that were trained are not trained again. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from drafts import HERE, MODEL, held_out, log
from speed import section
from transformers import AutoConfig, AutoModelForCausalLM

import foresay
from foresay.decoding.protocols import Logits, ModelInput
from foresay.drafters.ngram_table import NgramTable
from foresay.generation.method import Method
from foresay.lab.bench.runners import MethodRunner, PromptBlock
from foresay.lab.bench.turns import take_turns
from foresay.lab.data.requests import RequestBuilder
from foresay.records.provenance import machine
from foresay.records.results import Run
from foresay.text.tokenizer import tokenizer_fingerprint
from foresay.training.curves import read_log
from foresay.training.distil import causal, distil_model, final_norm
from foresay.training.fitting import Plan
from foresay.training.losses import Objective
from foresay.training.ngrams import NgramCounter
from foresay.training.outputs import Text, read_outputs, split

LAYERS = (1, 2, 3, 6)
PARAMETERS = 8_000_000
"""In the layers of each shape."""
GUESSES = (1, 2, 3)
NEW = 64


@dataclass(slots=True)
class Shape:
    """A draft and what was found of it."""

    layers: int
    feed_forward: int
    folder: Path
    steps: int = 0
    quality: Mapping[str, Any] | None = None
    cost: float = 0.0
    speed: dict[int, float] | None = None


def shaped(target: foresay.Generator, layers: int, seed: int) -> Any:
    """A draft model with random layers between the target's embeddings and head."""
    model = causal(target.target).model
    config = copy.deepcopy(model.config)
    width, heads, keys = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    attention = 2 * width * width * (heads + keys) // heads
    config.num_hidden_layers, config.intermediate_size = layers, feed_forward(layers, width, attention)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_dict()), dtype=torch.float32)
    with torch.no_grad():
        draft.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight)
        draft.base_model.norm.weight.copy_(final_norm(causal(target.target)))
    return draft


def feed_forward(layers: int, width: int, attention: int) -> int:
    """Neurons that make the layers PARAMETERS in all, a multiple of 32."""
    return round((PARAMETERS / layers - attention) / (3 * width) / 32) * 32


def written(target: foresay.Generator, args: argparse.Namespace) -> list[Text]:
    """What the target wrote; its tokens are counted into a table, which says what drafts keep."""
    assert target.target.tokenizer is not None
    fingerprint = tokenizer_fingerprint(target.target.tokenizer)
    texts: list[Text] = []
    for path in args.outputs:
        texts += read_outputs(path, target.target.model.vocab_size, fingerprint, 512)
    counter = NgramCounter(2, target.target.model.vocab_size)
    for one in texts:
        counter.add(one.tokens[one.start :])
    args.work.mkdir(parents=True, exist_ok=True)
    counter.table(fingerprint=fingerprint).save(table(args))
    return texts


def table(args: argparse.Namespace) -> Path:
    """Where tokens are counted."""
    return Path(args.work) / "tokens.safetensors"


def drafter(shape: Shape, args: argparse.Namespace) -> str:
    """The expression of a shape's draft."""
    return f"model({shape.folder}, vocabulary={table(args)}, vocabulary_size={args.tokens})"


def train(target: foresay.Generator, args: argparse.Namespace) -> list[Shape]:
    """Train what is not trained yet."""
    texts = written(target, args)
    size, ends = target.target.model.vocab_size, target.target.eos_token_ids
    kept = torch.tensor(NgramTable.load(table(args)).draft_vocabulary(args.tokens, 1.0, ends, size))
    learn, rest = split(texts, 0.005)  # of full laws, which take longer to compare than to learn
    plan = Plan(epochs=1000, minutes=args.minutes, rate=2e-3, batch_tokens=2048, evaluate_minutes=1000)
    out = []
    for layers in LAYERS:
        draft, folder = shaped(target, layers, 0), args.work / f"layers-{layers}"
        folder.mkdir(parents=True, exist_ok=True)
        report = distil_model(
            target.target,
            draft,
            target.target.tokenizer,
            learn,
            rest,
            plan,
            Objective.parse("forward_kl"),
            folder,
            states=args.states,
            token_ids=kept,
        )
        best = read_log(folder)[report.state.best_step]
        out.append(Shape(layers, draft.config.intermediate_size, folder, report.state.step, best))
        log(f"  {layers} layers: {report.state.step} steps, accepted {best['acceptance_1']:.3f}")
    return out


def time_passes(target: foresay.Generator, shapes: list[Shape], args: argparse.Namespace) -> None:
    """Seconds of a draft's pass over one column behind 128, over the target's next to it."""
    ids = torch.randint(5, 40000, (1, 128), generator=torch.Generator().manual_seed(0))
    models: list[Any] = [target.target.model]
    for one in shapes:
        made: Any = foresay.change(target, drafter=drafter(one, args)).make_drafter()
        models.append(made.context.model)
    caches = [model.new_cache() for model in models]
    for model, cache in zip(models, caches, strict=True):
        cache.add_rows(1)
        model.forward(ModelInput(ids, [128], logits=Logits.NONE), cache)
    took: list[list[float]] = [[] for _ in models]
    for _ in range(60):
        for model, cache, times in zip(models, caches, took, strict=True):
            began = perf_counter()
            model.forward(ModelInput(ids[:, :1], [1]), cache)
            times.append(perf_counter() - began)
            cache.truncate([128])
    whole = statistics.median(took[0])
    for one, times in zip(shapes, took[1:], strict=True):
        one.cost = statistics.median(times) / whole
        log(f"  {one.layers} layers: a pass is {one.cost:.3f} of the target's {whole * 1e3:.1f} ms")


def time_decoding(target: foresay.Generator, shapes: list[Shape], args: argparse.Namespace) -> None:
    """Median speed-up over plain decoding of each shape with each number of guesses."""
    asks = RequestBuilder(target).first(held_out(args.data, 2))
    block = PromptBlock("held out", asks, 1, foresay.SamplingParams(max_new_tokens=NEW))
    runners = {(s.layers, k): MethodRunner(target, Method(drafter(s, args), str(k))) for s in shapes for k in GUESSES}
    turns = [(repeat, runner) for repeat in range(args.repeats) for runner in runners.values()]
    found: dict[str, list[float]] = {}
    plain = MethodRunner(target, Method("none"))
    for run, _ in take_turns(plain, turns, block, warm=replace(block, asks=asks[:1]), between=2):
        if isinstance(run, Run) and run.speed_up is not None:
            found.setdefault(run.cell.method, []).append(run.speed_up)
        elif not isinstance(run, Run):
            log(f"  {run.cell.method} failed: {run.error}")
    for one in shapes:
        one.speed = {k: statistics.median(found[runners[one.layers, k].name]) for k in GUESSES}
        log(f"  {one.layers} layers: " + ", ".join(f"{k} guesses {gain:.2f}x" for k, gain in one.speed.items()))


def text_of(shapes: list[Shape], args: argparse.Namespace, gap: float) -> str:
    """The table as it stands in RESULTS.md."""
    cores = f"{machine()['processor']}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    out = [
        cores,
        "",
        f"{PARAMETERS / 1e6:.0f} million parameters in the layers of each, heads of {args.tokens} tokens, {args.minutes:g} "
        f"minutes of training each; decoding one prompt at a time, greedy, {NEW} tokens, {args.repeats} runs of each in turns.",
        "",
    ]
    out += [
        "| layers | feed-forward | steps | accepted | agreed | tokens per pass | pass / target's | best speed |",
        "|" + "---|" * 8,
    ]
    for one in shapes:
        assert one.quality is not None and one.speed is not None
        best = max(one.speed, key=lambda k: one.speed[k] if one.speed else 0.0)
        cells = [
            one.layers,
            one.feed_forward,
            one.steps,
            *(f"{one.quality[n]:.3f}" for n in ("acceptance_1", "agreement_1")),
        ]
        cells += [f"{one.quality['tokens_per_pass']:.2f}", f"{one.cost:.3f}", f"{one.speed[best]:.2f}x with {best}"]
        out.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    out += ["", f"shape_speed_gap: {gap:.2f}, the shallowest over the deepest, each at its best number of guesses."]
    return "\n".join(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--outputs", action="append", required=True, help="a recording of the target; several times")
    parser.add_argument("--work", type=Path, required=True, help="where the drafts are kept")
    parser.add_argument("--states", type=Path, help="a folder that keeps what the target shows")
    parser.add_argument("--minutes", type=float, default=5.0, help="of training, each shape")
    parser.add_argument("--tokens", type=int, default=8192, help="that the drafts keep")
    parser.add_argument("--data", type=Path, help="as for drafts.py")
    parser.add_argument("--repeats", type=int, default=3, help="of each timed run")
    parser.add_argument("--no-times", action="store_true", help="train only")
    parser.add_argument("--write", action="store_true", help="write benchmarks/RESULTS.md")
    args = parser.parse_args()
    target = foresay.load(MODEL, drafter="none", dtype="bf16")
    shapes = train(target, args)
    if args.no_times:
        return 0
    time_passes(target, shapes, args)
    time_decoding(target, shapes, args)
    gap = max((shapes[0].speed or {}).values()) / max((shapes[-1].speed or {}).values())
    if args.write:
        section(HERE / "RESULTS.md", "shapes", text_of(shapes, args, gap))
    print(json.dumps({"shape_speed_gap": round(gap, 4)} | {f"cost_{s.layers}": round(s.cost, 4) for s in shapes}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
