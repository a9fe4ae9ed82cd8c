"""Penalties, biases, masks and processors: by hand, as transformers has them, and of whole batches, one position at a time."""

from __future__ import annotations

import ast
import inspect
import random
from collections import Counter
from itertools import pairwise
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    NoRepeatNGramLogitsProcessor,
)
from transformers.generation import logits_process

from foresay import RequestError, Row, Rows, SamplingParams
from foresay.decoding import penalties
from foresay.decoding.distributions import build_distributions
from foresay.decoding.processors import STATEFUL_PROCESSORS, check_processors, check_token_ids, process_rows
from helpers.making import make_row, make_rows
from helpers.refusals import refused, refuses

INF = float("inf")
SCORES = [2.0, -1.0, 0.5, 3.0, -4.0, 0.0]
EOS = {"eos": frozenset({0})}


def processed(
    drafted: tuple[int, ...] = (), prompt: list[int] | None = None, output: Any = (), **params: Any
) -> list[float]:
    rows = Rows([make_row(prompt or [5], output, **params)])
    found = process_rows(
        torch.tensor(SCORES)[None, None], rows, torch.tensor([drafted]).long(), len(drafted), [0], None
    )
    if found is None:
        return SCORES
    if found.failures:
        raise found.failures[0, 0]
    return found.scores[0, 0].tolist()


def changed(changes: dict[int, float]) -> list[float]:
    return [changes.get(token, score) for token, score in enumerate(SCORES)]


def double(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores * 2


def add(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + 1


ONLY_1_AND_3 = {0: -INF, 2: -INF, 4: -INF, 5: -INF}
NO_OTHER = dict.fromkeys(range(1, 6), -INF)


@pytest.mark.parametrize(
    ("drafted", "settings", "changes"),
    [
        ((3,), {"output": [1, 2]}, {}),
        # penalties: of prompt, output and draft; once, and by occurrence, of output and draft only; and all at once
        ((3,), {"prompt": [0, 0], "output": [1], "repetition_penalty": 2.0}, {0: 1.0, 1: -2.0, 3: 1.5}),
        ((3, 3), {"prompt": [0], "output": [1, 1], "presence_penalty": 0.5}, {1: -1.5, 3: 2.5}),
        ((3, 1), {"prompt": [1, 0], "output": [1, 1], "frequency_penalty": 0.5}, {1: -2.5, 3: 2.5}),
        ((1,), {"output": [1], "presence_penalty": -1.0, "frequency_penalty": -0.25}, {1: 0.5}),
        # then biases, then what is banned
        ((), {"logit_bias": {0: -5.0, 4: 10.0}}, {0: -3.0, 4: 6.0}),
        ((), {"prompt": [0], "repetition_penalty": 2.0, "logit_bias": {0: 1.0}}, {0: 2.0}),
        ((), {"allowed_token_ids": (1, 3)}, ONLY_1_AND_3),
        ((), {"banned_token_ids": (0, 3)}, {0: -INF, 3: -INF}),
        ((), {"allowed_token_ids": (1, 3), "banned_token_ids": (3,)}, {**ONLY_1_AND_3, 3: -INF}),
        ((), {"banned_token_ids": (0,), "logit_bias": {0: 1e4}}, {0: -INF}),
        # no end before the least number of tokens
        ((1,), {"output": [1], "stop_token_ids": (3,), "min_new_tokens": 3} | EOS, {0: -INF, 3: -INF}),
        ((1, 1), {"output": [1], "stop_token_ids": (3,), "min_new_tokens": 3} | EOS, {}),
        ((), {"output": [1, 1, 1], "min_new_tokens": 3} | EOS, {}),
        ((), {"ignore_eos": True, "min_new_tokens": 3} | EOS, {}),
        # processors, last and in order, of transformers too
        ((), {"processors": (double, add), "allowed_token_ids": (0,), "logit_bias": {0: 1}}, NO_OTHER | {0: 7.0}),
        ((), {"processors": (add, double), "allowed_token_ids": (0,)}, NO_OTHER | {0: 6.0}),
        ((1,), {"prompt": [1, 3], "output": [2], "processors": (NoRepeatNGramLogitsProcessor(2),)}, {3: -INF}),
        ((1,), {"prompt": [0], "processors": (LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)]),)}, {0: -INF, 1: -INF}),
        ((), {"processors": (lambda _, scores: scores.zero_(),)}, dict.fromkeys(range(6), 0.0)),  # in place
        # the target's ids go up to 9 here, the scores are a draft's and stop at 5
        (
            (8, 1),
            {"prompt": [9, 0], "output": [7], "eos": frozenset({9}), "min_new_tokens": 9, "logit_bias": {9: 3.0}}
            | {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0}
            | {"banned_token_ids": (8,), "allowed_token_ids": (0, 1, 9)},
            {0: 1.0, 1: -4.0, 2: -INF, 3: -INF, 4: -INF, 5: -INF},
        ),
    ],
)  # fmt: skip
def test_scores_by_hand(drafted: tuple[int, ...], settings: dict[str, Any], changes: dict[int, float]) -> None:
    assert processed(drafted, **settings) == changed(changes)


# -- batches -----------------------------------------------------------------------------------------------------------

VOCAB, WIDTH, ENDS = 23, 5, frozenset({4, 9})


def expected(scores: torch.Tensor, row: Row, prefix: list[int]) -> list[float]:
    """The scores of one position, token by token."""
    params, out = row.params, []
    seen, output = {*row.tokens.tolist(), *prefix}, Counter([*row.tokens[row.prompt_length :].tolist(), *prefix])
    for token, score in enumerate(scores.tolist()):
        if token in seen:
            score = score * params.repetition_penalty if score < 0 else score / params.repetition_penalty
        if token in output:
            score -= params.presence_penalty + params.frequency_penalty * output[token]
        score += params.logit_bias.get(token, 0.0)
        is_early = row.num_new + len(prefix) < params.min_new_tokens
        out.append(-torch.inf if token in params.banned_token_ids or (is_early and token in row.eos) else score)
    return out


def batch(rng: random.Random) -> Rows:
    """Rows with all, some and none of the parameters; tokens outside of the vocabulary, as a target's are for a draft."""
    settings: list[dict[str, Any]] = [
        {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": -0.25},
        {},
        {"repetition_penalty": 0.8, "logit_bias": {3: 2.0, 7: -1.0}, "min_new_tokens": 4},
        {"frequency_penalty": 0.3, "banned_token_ids": (1, 2)},
        {"min_new_tokens": 3},
    ]
    rows = []
    for one in settings:
        prompt = [rng.randrange(VOCAB + 3) for _ in range(rng.randint(1, 9))]
        output = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 5))]
        rows.append(make_row(prompt, output, eos=ENDS, **one))
    return Rows([*rows, make_row([VOCAB + 1], [], repetition_penalty=2.0)])


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("num_before", [0, 2])
def test_each_position_is_that_of_its_own_text(tree: bool, num_before: int) -> None:
    """Control: draft tokens of other branches are before a position, too."""
    rng = random.Random(num_before)
    generator = torch.Generator().manual_seed(num_before)
    for turn in range(8):
        rows = batch(rng)
        logits = torch.randn(len(rows), WIDTH, VOCAB, generator=generator) * 3
        drafted = torch.randint(0, 8, (len(rows), num_before + WIDTH - 1), generator=generator)
        parents = [[rng.randrange(-1, node) for node in range(WIDTH - 1)] for _ in rows]
        found = process_rows(logits, rows, drafted, num_before, None, torch.tensor(parents) if tree else None)
        assert found is not None and found.rows == [0, 2, 3, *([4] if rows[4].num_new < 3 else []), 5]
        for scores, i in zip(found.scores, found.rows, strict=True):
            for t in range(WIDTH):
                path, at = [], t - 1
                while at >= 0:
                    path.insert(0, num_before + at)
                    at = parents[i][at] if tree else at - 1
                prefix = drafted[i][[*range(num_before), *path]].tolist()
                wanted = torch.tensor(expected(logits[i, t], rows[i], prefix))
                if not {*prefix[num_before:]} & {*ENDS, *rows[i].params.banned_token_ids}:  # no output reaches others
                    torch.testing.assert_close(scores[t], wanted, msg=f"turn {turn}, row {i}, position {t}")


def test_the_branches_of_others_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    monkeypatch.setattr(penalties, "ancestors_of", lambda parents: torch.ones(*parents.shape, parents.shape[1]) > 0)
    with pytest.raises(AssertionError):
        test_each_position_is_that_of_its_own_text(True, 0)


# -- contexts that processors see --------------------------------------------------------------------------------------


class Recorder:
    """A processor that records the contexts it is called with."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1 and input_ids.dtype == torch.int64
        self.seen += input_ids.tolist()
        return scores


def test_a_processor_sees_prompt_output_and_the_draft_tokens_so_far() -> None:
    recorder = Recorder()
    rows = make_rows({}, {"processors": (recorder,)}, prompt=[5, 4])
    rows[1].extend([3])
    build_distributions(torch.zeros(2, 3, 6), rows, torch.tensor([[9, 9, 9], [1, 2, 0]]))
    assert recorder.seen == [[5, 4, 3], [5, 4, 3, 1], [5, 4, 3, 1, 2]]
    recorder.seen.clear()  # in a drafting pass
    build_distributions(torch.zeros(1, 1, 6), make_rows({"processors": (recorder,)}), torch.tensor([[1, 2, 0]]), 2)
    assert recorder.seen == [[1, 1, 2]]


def _alternating(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Allows tokens of the other parity only, and refuses a context that broke the rule itself."""
    tokens = ids[0].tolist()
    assert all((a - b) % 2 for a, b in pairwise(tokens)), f"called for {tokens}, which it forbids"
    scores[:, tokens[-1] % 2 :: 2] = -INF
    return scores


def test_positions_after_a_forbidden_draft_token_are_left_alone() -> None:
    """No rule reaches them, and a processor must not see a context that it ruled out."""
    rows = Rows([make_row([2], [], processors=(_alternating,))])
    found = process_rows(torch.zeros(1, 4, 8), rows, torch.tensor([[3, 5, 6]]), 0, [3], None)
    assert found is not None and not found.failures
    scores = found.scores[0]
    assert scores[0].isinf().tolist() == [True, False] * 4
    assert scores[1].isinf().tolist() == [False, True] * 4
    assert not scores[2:].isinf().any()


def test_a_draft_without_a_token_left_keeps_its_raw_scores() -> None:
    rows = Rows([make_row([2], [], allowed_token_ids=(60,))])
    found = process_rows(torch.arange(8.0)[None, None], rows, None, 0, None, None)
    assert found is not None and not found.failures
    assert torch.equal(found.scores[0, 0], torch.arange(8.0))


# -- refusals and failures ---------------------------------------------------------------------------------------------


def _raises(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError("by zero")


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"allowed_token_ids": (0,), "min_new_tokens": 1} | EOS, "leave no token to generate"),
        ({"processors": (lambda ids, scores: scores.fill_(-INF),)}, "leave no token to generate"),
        ({"processors": (lambda ids, scores: scores.fill_(float("nan")),)}, "leave no token to generate"),
        ({"processors": (_raises,)}, "its processor function raised ZeroDivisionError: by zero"),
        ({"processors": (lambda ids, scores: None,)}, r"returned NoneType, not scores \[1, "),
        ({"processors": (lambda ids, scores: scores[:, :2],)}, r"returned \(1, 2\), not scores \[1, "),
    ],
)
def test_a_failure_names_the_request(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        processed(**settings)


def test_processors_that_are_no_functions_are_refused() -> None:
    stateful = type("WhisperTimeStampLogitsProcessor", (), {"__call__": lambda self, ids, scores: scores})()
    for processors in ((double, stateful), (LogitsProcessorList([stateful]),)):
        refuses(lambda given=processors: check_processors(given), "processors", "WhisperTimeStampLogitsProcessor")
    with refused("processors", 5):
        check_processors((5,))  # type: ignore[arg-type]
    check_processors((LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)]),))


def _keeps_state(kind: type) -> bool:
    """True if a method other than `__init__` sets an attribute, or a part of one."""
    nodes = [
        node
        for method in ast.walk(ast.parse(inspect.getsource(kind)))
        if isinstance(method, ast.FunctionDef) and method.name != "__init__"
        for node in ast.walk(method)
    ]
    targets = [target for node in nodes if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in nodes if isinstance(node, ast.AugAssign)]
    return any(ast.unparse(target).startswith("self.") for target in targets)


SET_UP_ONCE = {
    "RepetitionPenaltyLogitsProcessor",  # in `set_continuous_batching_context`, which only their own engine calls
    "SequenceBiasLogitsProcessor",  # its bias tensors, built at the first call from what it was made with
    "SuppressTokensAtBeginLogitsProcessor",  # in `set_begin_index`, which nothing in a decoding loop calls
}


def test_every_processor_of_transformers_that_keeps_state_is_known() -> None:
    kinds = [one for one in vars(logits_process).values() if isinstance(one, type)]
    kinds = [
        one for one in kinds if one.__name__.endswith("LogitsProcessor") and one.__module__ == logits_process.__name__
    ]
    stateful = {one.__name__ for one in kinds if _keeps_state(one)}
    assert "UnbatchedClassifierFreeGuidanceLogitsProcessor" in stateful, "the search finds what it looks for"
    assert stateful <= STATEFUL_PROCESSORS | SET_UP_ONCE


@pytest.mark.parametrize(
    ("params", "name", "value", "enough"),
    [
        ({"logit_bias": {2: 1.0, 6: 1.0}}, "logit_bias", 6, 7),
        ({"allowed_token_ids": (0, 9)}, "allowed_token_ids", 9, 10),
        ({"banned_token_ids": (7,)}, "banned_token_ids", 7, 8),
        ({"stop_token_ids": (8,)}, "stop_token_ids", 8, 9),
        ({"banned_token_ids": (0, 1, 2, 2, 3, 4, 5)}, "banned_token_ids", ANY, 7),
    ],
)
def test_a_parameter_names_tokens_of_the_vocabulary_and_leaves_one(
    params: dict[str, Any], name: str, value: int, enough: int
) -> None:
    refuses(lambda: check_token_ids(SamplingParams(**params), 6), name, value)
    check_token_ids(SamplingParams(**params), enough)
