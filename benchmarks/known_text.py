"""Text that is known in advance: predicted outputs for edits of code, and tokens that a JSON schema forces.

    python benchmarks/known_text.py FILE [--repeats 2] [--write] [--section NAME]

FILE: a GGUF file of real size. Greedy, batch 1, drafter `suffix` with adaptive lengths, all methods in turns at each prompt;
medians over repeats are compared, without the time until the first token. Edits rename a variable in functions of Python's
library; JSON outputs describe the same functions.
"""

from __future__ import annotations

import difflib
import heapq
import inspect
import statistics
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from common import Figures, arguments, environment, log, parsed, publish, table

import foresay
from foresay.decoding.sampling_params import SamplingParams
from foresay.text.grammar import Grammar, JsonMask

EDITS: list[tuple[Callable[..., Any], str, str]] = [
    (heapq.merge, "key", "key_function"),
    (textwrap.TextWrapper._wrap_chunks, "chunks", "pieces"),
    (statistics.quantiles, "n", "count"),
    (difflib.SequenceMatcher.find_longest_match, "besti", "best_i"),
]
SCHEMA = {
    "type": "object",
    "properties": {
        "function_name": {"type": "string"},
        "number_of_arguments": {"type": "integer"},
        "returns_a_value": {"type": "boolean"},
        "category": {"enum": ["searching", "sorting", "formatting", "statistics", "other"]},
        "possible_exceptions": {
            "type": "array",
            "items": {"enum": ["ValueError", "TypeError", "IndexError"]},
            "maxItems": 3,
        },
        "is_recursive": {"type": "boolean"},
    },
    "additionalProperties": False,
}
SCHEMA["required"] = list(SCHEMA["properties"])  # type: ignore[call-overload]
LEGEND = {
    "prediction_speedup": ("edits with a prediction over plain decoding", ">= 3"),
    "prediction_over_suffix": ("edits with a prediction over the same drafter without", ""),
    "json_speedup": ("JSON with forced tokens drafted over without them", ">= 1.3"),
    "json_over_plain": ("JSON with forced tokens drafted over plain decoding", ""),
    "identical_share": ("share of outputs that equal plain decoding's", "== 1"),
}


Result = tuple[float, list[int], int]
"""Seconds after the first token, output and passes."""


class Unforced(JsonMask):
    """A mask of a schema without forced tokens."""

    forced_tokens = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name == "forced_tokens":
            raise AttributeError(name)
        return super().__getattribute__(name)


def seconds(generator: foresay.Generator, prompt: Any, params: SamplingParams) -> Result:
    """Seconds after the first token, output and passes of a request."""
    first: list[float] = []
    done = generator.generate(prompt, params, on_chunk=lambda _: first.append(perf_counter()) if not first else None)
    return perf_counter() - first[0], list(done.token_ids), done.stats.num_passes


def compared(methods: Mapping[str, Callable[[], Result]], repeats: int) -> dict[str, Result]:
    """Median seconds, output and passes of each method, measured in turns."""
    found = [{name: method() for name, method in methods.items()} for _ in range(repeats)]
    return {name: (statistics.median(one[name][0] for one in found), *found[0][name][1:]) for name in methods}


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def edits(plain: foresay.Generator, suffix: foresay.Generator, repeats: int) -> list[dict[str, Result]]:
    out: list[dict[str, Result]] = []
    tokenizer: Any = plain.tokenizer
    for function, old, new in EDITS:
        code = f"```python\n{textwrap.dedent(inspect.getsource(function))}```"
        prompt = chat(f"Rename the variable `{old}` to `{new}` in this code. Answer with the whole code only.\n{code}")
        ids = tuple(tokenizer(code, add_special_tokens=False).input_ids)
        params = SamplingParams(max_new_tokens=len(ids) * 6 // 5)
        predicted = SamplingParams.of(params, prediction=ids)
        methods = {
            "plain": partial(seconds, plain, prompt, params),
            "suffix": partial(seconds, suffix, prompt, params),
            "known text": partial(seconds, suffix, prompt, predicted),
        }
        out.append(compared(methods, repeats))
        log(f"  {function.__name__}: {shown(out[-1])}")
    return out


def structured(plain: foresay.Generator, suffix: foresay.Generator, repeats: int) -> list[dict[str, Result]]:
    out: list[dict[str, Result]] = []
    tokenizer: Any = plain.tokenizer
    model = plain.target.model
    grammar = Grammar(SCHEMA, tokenizer, model.vocab_size, sorted(plain.target.eos_token_ids))

    def masked(generator: foresay.Generator, prompt: Any, kind: type[JsonMask]) -> Result:
        length = len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])
        mask = kind(grammar.mask_after(length)._matcher, model.vocab_size, length, "")
        return seconds(generator, prompt, SamplingParams(max_new_tokens=160, processors=(mask,)))

    for function, *_ in EDITS:
        prompt = chat(f"Describe this function as JSON.\n```python\n{textwrap.dedent(inspect.getsource(function))}```")
        methods = {
            "plain": partial(masked, plain, prompt, Unforced),
            "suffix": partial(masked, suffix, prompt, Unforced),
            "known text": partial(masked, suffix, prompt, JsonMask),
        }
        out.append(compared(methods, repeats))
        log(f"  {function.__name__}: {shown(out[-1])}")
    return out


def shown(one: dict[str, Result]) -> str:
    return ", ".join(
        f"{name} {s:.1f} s, {passes} passes for {len(ids)} tokens" for name, (s, ids, passes) in one.items()
    )


def total(found: Sequence[dict[str, Result]], name: str) -> float:
    return sum(one[name][0] for one in found)


def main() -> int:
    parser = arguments(__doc__, repeats=2, quick=False)
    parser.add_argument("file")
    args = parsed(parser)
    plain, suffix = (foresay.load(args.file, drafter=name) for name in ("none", "suffix"))
    kinds = {"edits": edits(plain, suffix, args.repeats), "JSON": structured(plain, suffix, args.repeats)}
    every = [one for found in kinds.values() for one in found]
    same = [ids == one["plain"][1] for one in every for _, ids, _ in one.values()]
    figures: Figures = {
        "prediction_speedup": total(kinds["edits"], "plain") / total(kinds["edits"], "known text"),
        "prediction_over_suffix": total(kinds["edits"], "suffix") / total(kinds["edits"], "known text"),
        "json_speedup": total(kinds["JSON"], "suffix") / total(kinds["JSON"], "known text"),
        "json_over_plain": total(kinds["JSON"], "plain") / total(kinds["JSON"], "known text"),
        "identical_share": sum(same) / len(same),
    }
    rows = [
        [
            kind,
            name,
            f"{total(found, name):.1f}",
            sum(one[name][2] for one in found),
            sum(len(one[name][1]) for one in found),
        ]
        for kind, found in kinds.items()
        for name in found[0]
    ]
    text = table(["outputs", "method", "seconds", "passes", "tokens"], rows)
    about = f"{Path(args.file).name}, {Path(args.file).stat().st_size / 1e9:.2f} GB"
    return publish(
        "known_text", figures, args, legend=LEGEND, model=about, text=[f"The times: {environment(about)}", text]
    )


if __name__ == "__main__":
    sys.exit(main())
