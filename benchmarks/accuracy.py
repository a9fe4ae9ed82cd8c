"""The cost of rounding weights and activations: perplexity, KL divergence and agreement of the likeliest token.

    python benchmarks/accuracy.py TEXT [--model MODEL ...] [--tokens 4096] [--window 256] [--llamacpp PYTHON]
                                       [--write]

TEXT is a plain text file, or one packed by gzip, such as the test set of WikiText-2. It is cut into windows, whose tokens are
scored after those before them in the same window. A GGUF model is measured as it is; another one in bf16 and rounded to 8 and 4
bits; both also with keys and values in 8 bits. KL divergence (in nats per token) and agreement compare with the same weights
and activations that are not rounded; for bf16 weights these are the numbers of float32 arithmetic. `--llamacpp` measures the
perplexity of a GGUF file by llama.cpp too, in an environment with llama-cpp-python.
"""

from __future__ import annotations

import gzip
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from common import MODEL, Engine, Figures, arguments, log, parsed, publish, table

import foresay
from foresay.decoding.protocols import ModelInput

HEADING = ("model, weights", "perplexity", "not rounded", "KL, nats", "same likeliest token", "llama.cpp's perplexity")


def windows_of(text: str, model: foresay.Generator, tokens: int, window: int) -> list[list[int]]:
    """Windows of token ids of a text."""
    tokenizer: Any = model.tokenizer
    ids = tokenizer(text, add_special_tokens=False).input_ids[:tokens]
    return [ids[i : i + window] for i in range(0, len(ids) - window + 1, window)]


def scores_of(model: foresay.Generator, windows: list[list[int]]) -> Iterator[torch.Tensor]:
    """Log probabilities of each window, [window - 1, V] float32."""
    target: Any = model.target.model
    for ids in windows:
        cache = target.new_cache()
        cache.add_rows(1)
        logits = target.forward(ModelInput(torch.tensor([ids]), [len(ids)]), cache).scores()[0, :-1]
        yield logits.float().log_softmax(-1)


def compared(model: foresay.Generator, reference: foresay.Generator | None, windows: list[list[int]]) -> Figures:
    """Perplexity of a model, and its distance from a reference."""
    loss = divergence = agreed = 0.0
    others = scores_of(reference or model, windows)
    for ids, own, other in zip(windows, scores_of(model, windows), others, strict=True):
        loss -= float(own.gather(1, torch.tensor(ids[1:])[:, None]).sum())
        divergence += float((other.exp() * (other - own)).sum())
        agreed += float((own.argmax(-1) == other.argmax(-1)).sum())
    count = sum(len(ids) - 1 for ids in windows)
    return {
        "perplexity": float(torch.tensor(loss / count).exp()),
        "kl": divergence / count,
        "agreement": agreed / count,
    }


def formats(model: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, options, options of the reference) of each format of a model."""
    if model.endswith(".gguf"):
        yield "blocks of the file, int8 activations", {}, {"activations": "float32"}
        yield "the same with int8 keys and values", {"kv_cache_dtype": "int8"}, {}
        return
    yield "bf16", {"dtype": "bf16"}, {"dtype": "fp32"}
    yield "bf16, int8 keys and values", {"dtype": "bf16", "kv_cache_dtype": "int8"}, {"dtype": "bf16"}
    for weights in ("int8", "int4"):
        yield f"{weights}, int8 activations", {"weights": weights}, {"weights": weights, "activations": "float32"}


def main() -> int:
    """Measure, print and publish."""
    parser = arguments(__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--model", action="append")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--llamacpp", metavar="PYTHON")
    args = parsed(parser)
    opened = gzip.open if args.text.suffix == ".gz" else open
    with opened(args.text, "rt", encoding="utf-8") as file:
        text = file.read(20 * args.tokens)
    rows: list[list[str]] = []
    figures: Figures = {}
    for model in args.model or [MODEL]:
        for name, options, of_reference in formats(model):
            generator = foresay.load(model, drafter="none", **options)
            reference = foresay.load(model, drafter="none", **of_reference)
            windows = windows_of(text, generator, args.tokens, args.window)
            one, plain = compared(generator, reference, windows), compared(reference, None, windows)
            cells = [
                f"{one['perplexity']:.3f}",
                f"{plain['perplexity']:.3f}",
                f"{one['kl']:.5f}",
                f"{one['agreement']:.2%}",
                "-",
            ]
            if args.llamacpp and model.endswith(".gguf"):
                with ExitStack() as stack:
                    engine = Engine(stack, args.llamacpp, "llama.cpp", model=model)
                    cells[-1] = f"{engine('perplexity', windows=windows):.3f}"
            rows.append([f"{Path(model).stem}, {name}", *cells])
            log("  " + ", ".join(rows[-1]))
            figures |= {f"kl: {rows[-1][0]}": one["kl"]}
    models = f"{args.tokens} tokens of {args.text.name} in windows of {args.window}"
    return publish("accuracy", figures, args, legend={}, model=models, text=[table(HEADING, rows)])


if __name__ == "__main__":
    sys.exit(main())
