"""Every text that a draft can be copied from and that the same seed may have produced (see engine/request_keys.py).

A first request gives a seed's answer. The second one begins at the same length and copies the answer's second token as its
first draft: unless the target draws it, its next step begins at the length of the first request's next step, with the same
uniforms. Its output must have the target's distribution over seeds. The control gives it the seed's own numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from foresay.decoding.acceptance import make_rule
from foresay.decoding.protocols import Drafter
from foresay.decoding.rows import Row
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import (
    Cascade,
    Hybrid,
    MaxGram,
    Memory,
    ModelDrafter,
    NgramStore,
    NgramStoreDrafter,
    SuffixDrafter,
)
from foresay.engine.prefixes import PrefixStore
from foresay.engine.request_keys import RequestKeys
from foresay.lengths import ConstantLength
from foresay.models.table import TableModel
from foresay_lab.training.ngrams import NgramCounter
from helpers.distribution_cells import ALPHA
from helpers.reference import joint, p_value
from helpers.sequential import decided
from helpers.support import Loop

SEEDS, LENGTH, SIZE = 600, 2, 40
TARGET = TableModel(torch.tensor([0.75, 0.25] + [0.0] * (SIZE - 2)).expand(SIZE, SIZE, SIZE))
DRAFT = TableModel(torch.tensor([0.05, 0.95] + [0.0] * (SIZE - 2)).expand(SIZE, SIZE, SIZE))
Request = tuple[list[int], SamplingParams]
Make = Callable[[int, list[int]], Request]
"""A second request, of a seed and its answer."""


class Forced:
    """A processor that changes nothing, and claims to force the tokens of a text."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.source = list(tokens), str(tokens)

    def __call__(self, token_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores

    def forced_tokens(self, output: Sequence[int]) -> list[int] | None:
        return self.tokens[len(output) :]


def process(drafter: Drafter, rule: str, number: int, prefixes: PrefixStore | None = None) -> Loop:
    """An engine whose random numbers no other process has."""
    draws = random.Random(number)
    own: dict[str, Any] = {"prefixes": prefixes, "draw_seed": lambda: draws.randrange(1 << 62)}
    return Loop(TARGET, drafter=drafter, rule=rule, gamma=3, max_batch_size=64, **own)


def outputs(loop: Loop, requests: Sequence[Request]) -> list[list[int]]:
    found = loop.outputs([prompt for prompt, _ in requests], [params for _, params in requests])
    assert loop.engine.draft_failures == 0
    return found


def prompt(seed: int) -> list[int]:
    """A seed's own prompt of 9 tokens, which no output contains."""
    x, y = 2 + seed // (SIZE - 2), 2 + seed % (SIZE - 2)
    return [2] * 5 + [x, x, x, y]


def params(seed: int, **changes: Any) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_new_tokens=4, **changes)


class Part(NamedTuple):
    """Some of the seeds, and a folder of theirs."""

    seeds: range
    folder: Path

    def first(self, drafter: Drafter, rule: str, prefixes: PrefixStore | None = None) -> tuple[Loop, list[list[int]]]:
        """A process, and its outputs of first requests."""
        one = process(drafter, rule, 1, prefixes)
        return one, outputs(one, [(prompt(seed), params(seed)) for seed in self.seeds])

    def second(self, loop: Loop, make: Make, answers: list[list[int]]) -> list[list[int]]:
        return outputs(loop, [make(seed, answer) for seed, answer in zip(self.seeds, answers, strict=True)])


def hybrid(lookup: SuffixDrafter | NgramStoreDrafter | None = None) -> Drafter:
    return Hybrid(lookup or SuffixDrafter(), ModelDrafter(DRAFT, SIZE), min_match=4, k=3)


def cascade(memory: Memory | None = None) -> Drafter:
    return Cascade([SuffixDrafter(memory, min_match=4), ModelDrafter(DRAFT, SIZE)], [[3, 3], [0, 0]])


def after(seed: int, answer: list[int]) -> Request:
    """A request whose last tokens occur in the first one's text, where the answer's second token follows."""
    return [*prompt(seed)[1:], answer[0]], params(seed)


def predicted(seed: int, answer: list[int]) -> Request:
    return prompt(seed), params(seed, prediction=(answer[1],))


def in_history(seed: int, answer: list[int]) -> Request:
    """A prompt with the answer in it, as long as the first one."""
    text = prompt(seed)[-3:]
    return [*text, *answer[:2], *text, answer[0]], params(seed)


def forced(seed: int, answer: list[int]) -> Request:
    """A grammar made from the answer."""
    return prompt(seed), params(seed, processors=(Forced([answer[1]]),))


def over_prefix(seed: int, answer: list[int]) -> Request:
    return [*prompt(seed), *answer], params(seed)


IN_ONE_PROCESS: dict[str, tuple[Callable[[], Drafter], Make]] = {
    "memory": (lambda: cascade(Memory()), after),
    "counts": (lambda: hybrid(NgramStoreDrafter(5, store=NgramStore(5))), after),
    "prefixes": (hybrid, over_prefix),
}
"""A drafter that keeps texts or counts of n-grams, or prefixes of ended rows, answers included; and the second request."""
IN_ANOTHER: dict[str, tuple[Callable[[], Drafter], Make]] = {
    "prediction": (hybrid, predicted),
    "prediction, cascade": (cascade, predicted),
    "history": (hybrid, in_history),
    "forced": (hybrid, forced),
}


def of_folder(rule: str, part: Part) -> list[list[int]]:
    """A memory that another process wrote."""
    memory = Memory(part.folder)
    _, answers = part.first(hybrid(SuffixDrafter(memory)), rule)
    memory.flush(60)
    memory.close()
    return part.second(process(hybrid(SuffixDrafter(Memory(part.folder, reads_only=True))), rule, 2), after, answers)


def of_batch(rule: str, part: Part) -> list[list[int]]:
    """Rows of one batch: a seed's second request joins when the first has ended."""
    engine = process(hybrid(SuffixDrafter(Memory())), rule, 1).engine
    texts = {engine.submit(prompt(seed), params(seed)): list[int]() for seed in part.seeds}
    second: dict[int, int] = {}
    while engine.has_work:
        for step in engine.step():
            texts[step.request_id] += step.token_ids
            if step.finish_reason is not None and step.request_id < len(part.seeds):
                seed = part.seeds[step.request_id]
                second[seed] = engine.submit(*after(seed, texts[step.request_id]))
                texts[second[seed]] = []
    return [texts[second[seed]] for seed in part.seeds]


def of_table(rule: str, part: Part) -> list[list[int]]:
    """An n-gram table that another run made of the answers."""

    def drafter(texts: Iterable[Sequence[int]]) -> Drafter:
        counter = NgramCounter(5, SIZE)
        for text in texts:
            counter.add(text)
        return Cascade([ModelDrafter(TARGET, SIZE), MaxGram(counter.table())], [[1, 0], [0, 3]])

    _, answers = part.first(drafter([[1, 0]]), rule)
    made = drafter([*prompt(seed), answer[1]] for seed, answer in zip(part.seeds, answers, strict=True))
    return part.second(process(made, rule, 2), lambda seed, answer: (prompt(seed), params(seed)), answers)


def of_weights(rule: str, part: Part) -> list[list[int]]:
    """A draft model that was trained on the answers, loaded from its files."""

    def drafter(digest: bytes, table: torch.Tensor) -> Drafter:
        model: Any = TableModel(table)
        model.learned = digest
        return ModelDrafter(model, SIZE)

    _, answers = part.first(drafter(b"before", TARGET.table), rule)
    trained = TARGET.table.clone()
    for seed, answer in zip(part.seeds, answers, strict=True):
        x, y = prompt(seed)[-2:]
        trained[x, y] = 0
        trained[x, y, answer[1]] = 1
    made = process(drafter(b"after", trained), rule, 2)
    return part.second(made, lambda seed, answer: (prompt(seed), params(seed)), answers)


OTHERS = {"table": of_table, "weights": of_weights, "folder": of_folder, "batch": of_batch}
SOURCES = ["table", "weights", "memory", "folder", "batch", "counts", *IN_ANOTHER, "prefixes"]


def second_outputs(source: str, rule: str, part: Part) -> list[list[int]]:
    if source in OTHERS:
        return OTHERS[source](rule, part)
    drafter, make = (IN_ONE_PROCESS | IN_ANOTHER)[source]
    one, answers = part.first(drafter(), rule, PrefixStore(1 << 20) if source == "prefixes" else None)
    return part.second(one if source in IN_ONE_PROCESS else process(drafter(), rule, 2), make, answers)


def value(source: str, rule: str, folder: Path) -> float:
    probs, written = joint(TARGET, params(0), prompt(0), LENGTH), list[list[int]]()

    def look(seeds: range) -> float:
        found = second_outputs(source, rule, Part(seeds, folder / str(seeds.start)))
        written.extend(one[:LENGTH] for one in found)
        return p_value(written, probs, SIZE)

    return decided(look, SEEDS, probs)


@pytest.mark.parametrize(
    ("source", "rule"),
    [(one, ("speculative", "block")[i % 2]) for i, one in enumerate(SOURCES)] + [("history", "block")],
)
def test_a_seeds_own_text_keeps_the_distribution(source: str, rule: str, tmp_path: Path) -> None:
    assert value(source, rule, tmp_path) > ALPHA


CONTROLS = sorted({*SOURCES} - {"prefixes", "prediction, cascade"})


@pytest.mark.parametrize(("source", "broken"), [*((one, "key") for one in CONTROLS), ("folder", "process")])
def test_the_seeds_own_numbers(source: str, broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Controls: the second request has the key of the first, or its process the random numbers of another one."""
    if broken == "key":
        monkeypatch.setattr(RequestKeys, "key_of", lambda keys, row: row.seed)
    else:
        monkeypatch.setattr(random, "Random", lambda number, kind=random.Random: kind(1))
    assert value(source, "speculative", tmp_path) < ALPHA


def key(drafter: Drafter | None, rule: str = "speculative", draw: int = 5, **changes: Any) -> int:
    fields: dict[str, Any] = {"prompt": prompt(7), "params": params(7), "source": None, **changes}
    row = Row(0, fields["prompt"], fields["params"], seed=7, limit=19, source=fields["source"])
    return RequestKeys(drafter, make_rule(rule), ConstantLength(3), lambda: draw).key_of(row)


def test_keys_differ_where_a_text_does() -> None:
    model = ModelDrafter(DRAFT, SIZE)
    different = [
        key(model),
        key(model, prompt=[1, 0]),
        key(model, source=[1, 0]),
        key(model, params=params(7, prediction=(1, 0))),
        key(model, params=params(7, processors=(Forced([1]),))),
        key(model, params=params(7, processors=(Forced([2]),))),
    ]
    assert len({*different, 7}) == len(different) + 1
    assert key(model) == key(model, draw=6), "a repeated request has the same text"
    assert key(hybrid(SuffixDrafter(Memory()))) != key(hybrid(SuffixDrafter(Memory())), draw=6)
    for digest in (b"a", b"b"):
        trained: Any = TableModel(DRAFT.table)
        trained.learned = digest
        drafter = ModelDrafter(trained, SIZE)
        each = [drafter, Hybrid(SuffixDrafter(), drafter), Cascade([SuffixDrafter(), drafter], [[3, 3], [0, 0]])]
        found = {key(one) for one in each}
        assert len(found) == 1, "that of the weights, which a member has"
        different += found
    assert len({*different, 7}) == len(different) + 1
    plain = [key(None), key(SuffixDrafter()), key(SuffixDrafter(Memory())), key(model, "coupled"), key(model, "match")]
    assert plain == [7] * 5, "the text is that of plain decoding"
