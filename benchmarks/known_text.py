"""Text that is known in advance: predicted outputs for edits of code, and tokens that a JSON schema forces.

    python benchmarks/known_text.py FILE [--repeats 2] [--write] [--section NAME]

FILE: a GGUF file of real size. Greedy, batch 1, drafter `suffix` with adaptive lengths, all methods in turns at each prompt; times
include prompts, and medians over repeats are compared. Edits rename a variable in functions of Python's library; JSON outputs
describe the same functions.
"""

from __future__ import annotations

import difflib
import heapq
import inspect
import statistics
import sys
import textwrap
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from common import Figures, arguments, log, parsed, publish, table

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


class Unforced(JsonMask):
    """A mask of a schema that tells no forced tokens."""

    forced_tokens = None  # type: ignore[assignment]

    def __getattribute__(self, name: str) -> Any:
        if name == "forced_tokens":
            raise AttributeError(name)
        return super().__getattribute__(name)


def seconds(generator: foresay.Generator, prompt: Any, params: SamplingParams) -> tuple[float, list[int], int]:
    """Seconds, output and passes of a request."""
    began = perf_counter()
    done = generator.generate(prompt, params)
    return perf_counter() - began, list(done.token_ids), done.stats.num_passes


def compared(
    methods: dict[str, Callable[[], tuple[float, list[int], int]]], repeats: int
) -> dict[str, tuple[float, list[int], int]]:
    """Median seconds, output and passes of each method, measured in turns."""
    found = [{name: method() for name, method in methods.items()} for _ in range(repeats)]
    return {name: (statistics.median(one[name][0] for one in found), *found[0][name][1:]) for name in methods}


def chat(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def edits(
    plain: foresay.Generator, suffix: foresay.Generator, repeats: int
) -> list[dict[str, tuple[float, list[int], int]]]:
    out, tokenizer = [], plain.tokenizer
    assert tokenizer is not None
    for function, old, new in EDITS:
        code = f"```python\n{textwrap.dedent(inspect.getsource(function))}```"
        prompt = chat(f"Rename the variable `{old}` to `{new}` in this code. Answer with the whole code only.\n{code}")
        ids = tuple(tokenizer(code, add_special_tokens=False).input_ids)
        params = SamplingParams(max_new_tokens=len(ids) * 6 // 5)
        predicted = SamplingParams.of(params, prediction=ids)
        methods = {
            "plain": lambda p=params, q=prompt: seconds(plain, q, p),
            "suffix": lambda p=params, q=prompt: seconds(suffix, q, p),
            "known text": lambda p=predicted, q=prompt: seconds(suffix, q, p),
        }
        out.append(compared(methods, repeats))
        log(f"  {function.__name__}: {shown(out[-1])}")
    return out


def structured(
    plain: foresay.Generator, suffix: foresay.Generator, repeats: int
) -> list[dict[str, tuple[float, list[int], int]]]:
    out, tokenizer, model = [], plain.tokenizer, plain.target.model
    grammar = Grammar(SCHEMA, tokenizer, model.vocab_size, sorted(plain.target.eos_token_ids))
    assert tokenizer is not None
    for function, *_ in EDITS:
        prompt = chat(f"Describe this function as JSON.\n```python\n{textwrap.dedent(inspect.getsource(function))}```")
        length = len(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"])

        def params(kind: type[JsonMask], length: int = length) -> SamplingParams:
            mask = kind(grammar.mask_after(length)._matcher, model.vocab_size, length)
            return SamplingParams(max_new_tokens=160, processors=(mask,))

        methods = {
            "plain": lambda q=prompt, of=params: seconds(plain, q, of(Unforced)),
            "suffix": lambda q=prompt, of=params: seconds(suffix, q, of(Unforced)),
            "known text": lambda q=prompt, of=params: seconds(suffix, q, of(JsonMask)),
        }
        out.append(compared(methods, repeats))
        log(f"  {function.__name__}: {shown(out[-1])}")
    return out


def shown(one: dict[str, tuple[float, list[int], int]]) -> str:
    return ", ".join(
        f"{name} {s:.1f} s, {passes} passes for {len(ids)} tokens" for name, (s, ids, passes) in one.items()
    )


def total(found: Sequence[dict[str, tuple[float, list[int], int]]], name: str) -> float:
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
    return publish("known_text", figures, args, legend=LEGEND, model=args.file, text=[text])


if __name__ == "__main__":
    sys.exit(main())
