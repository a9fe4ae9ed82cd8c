"""Wide and shallow, or narrow and deep: draft models of equal parameters, trained alike for the same time.

    python benchmarks/shapes.py --outputs RECORDING [--outputs ...] --work FOLDER [--minutes N] [--data FOLDER] [--write]

Each shape has the width, embeddings and (frozen) output layer of the target, and random layers of its own with as many parameters
as the others; the number of layers differs. All are trained on recordings of the target for `--minutes` each, then timed in turn:
a forward pass over one token against the target's, and whole decoding with several draft lengths against plain decoding, on
prompts on which nothing was trained. Shapes that were trained before are not trained again.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from common import (
    MODEL,
    Figures,
    arguments,
    compared,
    filled,
    log,
    parsed,
    pass_seconds,
    plain_of,
    publish,
    random_prompt,
    table,
)
from drafts import held_out
from transformers import AutoConfig, AutoModelForCausalLM

import foresay
from foresay.decoding.protocols import ModelInput
from foresay.drafters.ngram_table import NgramTable
from foresay.generation.method import Method
from foresay.lab.bench.runners import MethodRunner, PromptBlock
from foresay.lab.data.requests import RequestBuilder
from foresay.models.sources.load_options import LoadOptions
from foresay.models.sources.packaged import converted
from foresay.text.tokenizer import tokenizer_fingerprint
from foresay.training.curves import read_log
from foresay.training.distil import distil_model
from foresay.training.fitting import Plan
from foresay.training.losses import Objective
from foresay.training.ngrams import NgramCounter
from foresay.training.outputs import Text, read_outputs, split

LEGEND = {"shape_speed_gap": ("shallowest / deepest draft, each at its best draft length", "")}
LAYERS = (1, 2, 3, 6)
PARAMETERS = 8_000_000
"""Parameters in the layers of each shape."""
DRAFT_LENGTHS = (1, 2, 3)
NEW = 64


@dataclass(slots=True)
class Shape:
    """A draft model and its measurements."""

    layers: int
    feed_forward: int
    folder: Path
    steps: int = 0
    quality: Mapping[str, Any] | None = None
    cost: float = 0.0
    speed: dict[int, float] = field(default_factory=dict)


def shaped(layers: int, seed: int) -> Any:
    """A draft model with random layers between the embeddings and the output layer of the target."""
    model = AutoModelForCausalLM.from_pretrained(converted(MODEL, LoadOptions()), dtype=torch.float32)
    config = copy.deepcopy(model.config)
    width, heads, keys = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
    attention = 2 * width * width * (heads + keys) // heads
    config.num_hidden_layers, config.intermediate_size = layers, feed_forward(layers, width, attention)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config.to_dict()), dtype=torch.float32)
    with torch.no_grad():
        draft.get_input_embeddings().weight.copy_(model.get_input_embeddings().weight)
        draft.base_model.norm.weight.copy_(model.base_model.norm.weight)
    return draft


def feed_forward(layers: int, width: int, attention: int) -> int:
    """Feed-forward size, a multiple of 32, with which the layers have PARAMETERS parameters in total."""
    return round((PARAMETERS / layers - attention) / (3 * width) / 32) * 32


def generated_texts(target: foresay.Generator, args: argparse.Namespace) -> list[Text]:
    """Texts that the target generated; their tokens are counted into a table that selects the vocabulary of the drafts."""
    assert target.target.tokenizer is not None
    fingerprint = tokenizer_fingerprint(target.target.tokenizer)
    texts: list[Text] = []
    for path in args.outputs:
        texts += read_outputs(path, target.target.model.vocab_size, fingerprint, 512)
    counter = NgramCounter(2, target.target.model.vocab_size)
    for one in texts:
        counter.add(one.tokens[one.start :])
    args.work.mkdir(parents=True, exist_ok=True)
    counter.table(fingerprint=fingerprint).save(counts(args))
    return texts


def counts(args: argparse.Namespace) -> Path:
    """The file of token counts."""
    return Path(args.work) / "tokens.safetensors"


def drafter(shape: Shape, args: argparse.Namespace) -> str:
    """The drafter expression of a shape."""
    return f"model({shape.folder}, vocabulary={counts(args)}, vocabulary_size={args.tokens})"


def train(target: foresay.Generator, args: argparse.Namespace) -> list[Shape]:
    """Train the shapes that are not trained yet."""
    texts = generated_texts(target, args)
    size, ends = target.target.model.vocab_size, target.target.eos_token_ids
    kept = torch.tensor(NgramTable.load(counts(args)).draft_vocabulary(args.tokens, 1.0, ends, size))
    learn, rest = split(texts, 0.005)  # distributions over the whole vocabulary, slower to compare than to learn
    plan = Plan(epochs=1000, minutes=args.minutes, rate=2e-3, batch_tokens=2048, evaluate_minutes=1000)
    out = []
    for layers in LAYERS:
        draft, folder = shaped(layers, 0), args.work / f"layers-{layers}"
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
    """Time of a forward pass of each draft over that of the target, one token each."""
    ids = random_prompt(vocabulary=40000)
    made: list[Any] = [foresay.change(target, drafter=drafter(one, args)).make_drafter() for one in shapes]
    models = [target.target.model, *(one.context.model for one in made)]
    whole, *times = pass_seconds([(model, filled(model, ids), ModelInput(ids[:, :1], [1])) for model in models])
    for one, seconds in zip(shapes, times, strict=True):
        one.cost = seconds / whole
        log(f"  {one.layers} layers: a pass takes {one.cost:.3f} of the target's {whole * 1e3:.1f} ms")


def time_decoding(target: foresay.Generator, shapes: list[Shape], args: argparse.Namespace) -> None:
    """Median speed-up over plain decoding of each shape with each draft length."""
    asks = RequestBuilder(target).first(held_out(args.data, 2))
    block = PromptBlock("held out", asks, 1, foresay.SamplingParams(max_new_tokens=NEW))
    runners = {
        (s.layers, k): MethodRunner(target, Method(drafter(s, args), str(k))) for s in shapes for k in DRAFT_LENGTHS
    }
    found = compared(plain_of(target), list(runners.values()), block, args.repeats, between=2)
    for one in shapes:
        one.speed = {k: found[runners[one.layers, k].name].gain for k in DRAFT_LENGTHS}


def shapes_table(shapes: list[Shape]) -> str:
    header = (
        "layers",
        "feed-forward",
        "steps",
        "accepted",
        "agreed",
        "tokens per pass",
        "pass / target's",
        "best speed",
    )
    rows = []
    for one in shapes:
        assert one.quality is not None
        best = max(one.speed, key=lambda k: one.speed[k])
        quality = (f"{one.quality[name]:.3f}" for name in ("acceptance_1", "agreement_1"))
        speed = f"{one.speed[best]:.2f}x with {best}"
        per_pass = f"{one.quality['tokens_per_pass']:.2f}"
        rows.append((one.layers, one.feed_forward, one.steps, *quality, per_pass, f"{one.cost:.3f}", speed))
    return table(header, rows)


def main() -> int:
    parser = arguments(__doc__, repeats=3, quick=False)
    parser.add_argument("--outputs", action="append", required=True, help="a recording of the target; may be repeated")
    parser.add_argument("--work", type=Path, required=True, help="folder for the trained drafts")
    parser.add_argument("--states", type=Path, help="folder that caches the hidden states of the target")
    parser.add_argument("--minutes", type=float, default=5.0, help="training time of each shape (default: 5)")
    parser.add_argument("--tokens", type=int, default=8192, help="vocabulary size of the drafts (default: 8192)")
    parser.add_argument("--data", type=Path, help="as for drafts.py")
    parser.add_argument("--no-times", action="store_true", help="train only")
    args = parsed(parser)
    target = foresay.load(MODEL, drafter="none", dtype="bf16")
    shapes = train(target, args)
    if args.no_times:
        return 0
    time_passes(target, shapes, args)
    time_decoding(target, shapes, args)
    figures: Figures = {"shape_speed_gap": max(shapes[0].speed.values()) / max(shapes[-1].speed.values())}
    figures |= {f"cost_{one.layers}": one.cost for one in shapes}
    text = (
        f"{PARAMETERS / 1e6:.0f} million parameters in the layers of each, vocabulary of {args.tokens} tokens, {args.minutes:g} "
        f"minutes of training each; batch 1, greedy, {NEW} tokens, {args.repeats} runs of each."
    )
    return publish("shapes", figures, args, legend=LEGEND, text=[text, shapes_table(shapes)])


if __name__ == "__main__":
    sys.exit(main())
