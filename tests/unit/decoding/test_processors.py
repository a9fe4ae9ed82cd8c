from __future__ import annotations

import ast
import inspect
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.generation import logits_process

from foresay.decoding.distributions import build_distributions
from foresay.decoding.processors import STATEFUL_PROCESSORS, check_processors, check_token_ids, process_rows
from foresay.decoding.rows import Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import RequestError
from helpers.making import make_row, make_rows
from helpers.refusals import refused

INF = float("inf")
SCORES = [2.0, -1.0, 0.5, 3.0, -4.0, 0.0]


def processed(
    drafted: tuple[int, ...] = (), *, prompt: list[int] | None = None, output: Any = (), **params: Any
) -> list[float]:
    eos = params.pop("eos", frozenset())
    scores = torch.tensor(SCORES)
    rows = Rows([make_row(prompt or [5], output, eos=eos, **params)])
    found = process_rows(scores[None, None], rows, torch.tensor([drafted]).long(), len(drafted), [0], None)
    if found is None:
        return scores.tolist()
    if found.failures:
        raise found.failures[0, 0]
    return found.scores[0, 0].tolist()


def changed(**changes: float) -> list[float]:
    """SCORES with some replaced: `changed(t3=1.0)`."""
    out = list(SCORES)
    for name, value in changes.items():
        out[int(name[1:])] = value
    return out


def test_nothing_asked_for_changes_nothing() -> None:
    assert processed(output=[1, 2], drafted=(3,)) == SCORES


def test_repetition_divides_positive_and_multiplies_negative_scores_of_prompt_output_and_guess() -> None:
    out = processed((3,), prompt=[0, 0], output=[1], repetition_penalty=2.0)
    assert out == changed(t0=1.0, t1=-2.0, t3=1.5)


def test_repetition_is_transformers() -> None:
    context = [0, 1, 4, 4, 2]
    expected = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([context]), torch.tensor([SCORES]))[0]
    assert processed((4, 2), prompt=context[:2], output=[4], repetition_penalty=1.7) == pytest.approx(expected.tolist())


def test_presence_is_subtracted_once_from_output_and_guess_only() -> None:
    assert processed((3, 3), prompt=[0], output=[1, 1], presence_penalty=0.5) == changed(t1=-1.5, t3=2.5)


def test_frequency_is_subtracted_per_occurrence_of_output_and_guess_only() -> None:
    assert processed((3, 1), prompt=[1, 0], output=[1, 1], frequency_penalty=0.5) == changed(t1=-2.5, t3=2.5)


def test_penalties_add_up_and_may_be_negative() -> None:
    assert processed((1,), output=[1], presence_penalty=-1.0, frequency_penalty=-0.25) == changed(t1=0.5)


def test_bias_is_added() -> None:
    assert processed(logit_bias={0: -5.0, 4: 10.0}) == changed(t0=-3.0, t4=6.0)


def test_bias_comes_after_the_penalties() -> None:
    assert processed(prompt=[0], repetition_penalty=2.0, logit_bias={0: 1.0}) == changed(t0=2.0)


def test_allowed_and_banned_tokens() -> None:
    assert processed(allowed_token_ids=(1, 3)) == [-INF, -1.0, -INF, 3.0, -INF, -INF]
    assert processed(banned_token_ids=(0, 3)) == changed(t0=-INF, t3=-INF)
    assert processed(allowed_token_ids=(1, 3), banned_token_ids=(3,)) == [-INF, -1.0, -INF, -INF, -INF, -INF]


def test_a_bias_cannot_bring_back_a_banned_token() -> None:
    assert processed(banned_token_ids=(0,), logit_bias={0: 1e4}) == changed(t0=-INF)


@pytest.mark.parametrize("output", range(4))
@pytest.mark.parametrize("drafted", range(4))
def test_no_stop_token_before_min_new_tokens(output: int, drafted: int) -> None:
    out = processed((1,) * drafted, output=[1] * output, eos=frozenset({0}), stop_token_ids=(3,), min_new_tokens=3)
    assert out == (changed(t0=-INF, t3=-INF) if output + drafted < 3 else SCORES)


def test_min_new_tokens_is_transformers() -> None:
    prompt = [5, 5]
    for new in range(5):
        theirs = MinNewTokensLengthLogitsProcessor(2, 3, [0])(
            torch.tensor([[*prompt, *[1] * new]]), torch.tensor([SCORES])
        )
        ours = processed(prompt=prompt, output=[1] * new, eos=frozenset({0}), min_new_tokens=3)
        assert ours == theirs[0].tolist()


def test_ignored_stop_tokens_are_not_held_back() -> None:
    assert processed(eos=frozenset({0}), ignore_eos=True, min_new_tokens=3) == SCORES


class Recorder:
    """A processor that writes down what it is called with."""

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert input_ids.shape[0] == scores.shape[0] == 1
        assert input_ids.dtype == torch.int64
        self.seen += input_ids.tolist()
        return scores


def test_a_processor_sees_prompt_output_and_the_tokens_guessed_so_far() -> None:
    recorder = Recorder()
    rows = make_rows({}, {"processors": (recorder,)}, prompt=[5, 4])
    rows[1].extend([3])
    build_distributions(torch.zeros(2, 3, 6), rows, torch.tensor([[9, 9, 9], [1, 2, 0]]))
    assert recorder.seen == [[5, 4, 3], [5, 4, 3, 1], [5, 4, 3, 1, 2]]


def test_a_drafting_pass_tells_how_many_guesses_come_before_it() -> None:
    recorder = Recorder()
    build_distributions(torch.zeros(1, 1, 6), make_rows({"processors": (recorder,)}), torch.tensor([[1, 2, 0]]), 2)
    assert recorder.seen == [[1, 1, 2]]


def test_processors_run_in_order_after_the_biases() -> None:
    def double(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores * 2

    def add(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 1

    assert processed(processors=(double, add), logit_bias={0: 1.0})[0] == (2.0 + 1.0) * 2 + 1
    assert processed(processors=(add, double))[0] == (2.0 + 1.0) * 2


def test_a_processor_of_transformers_acts_on_the_guess() -> None:
    no_bigram = NoRepeatNGramLogitsProcessor(2)
    out = processed((1,), prompt=[1, 3], output=[2], processors=(no_bigram,))
    assert out == changed(t3=-INF), "1 3 came before, and the draft token ends with 1"


def test_a_processor_may_work_in_place() -> None:
    def clobber(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.zero_()

    assert processed(processors=(clobber,)) == [0.0] * 6


def test_a_list_of_processors_is_a_processor() -> None:
    both = LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)])
    check_processors((both,))
    assert processed((1,), prompt=[0], processors=(both,)) == changed(t0=-INF, t1=-INF)


@pytest.mark.parametrize("name", sorted(STATEFUL_PROCESSORS))
def test_a_stateful_processor_is_refused_by_name(name: str) -> None:
    impostor = type(name, (), {"__call__": lambda self, ids, scores: scores})()
    with refused("processors"):
        check_processors((lambda ids, scores: scores, impostor))


def test_a_stateful_processor_inside_a_list_is_refused() -> None:
    impostor = type("WhisperTimeStampLogitsProcessor", (), {"__call__": lambda self, ids, scores: scores})()
    with refused("processors", "WhisperTimeStampLogitsProcessor"):
        check_processors((LogitsProcessorList([impostor]),))


def _assigns_to_self(kind: type) -> bool:
    """Whether `__call__`, or a method of the class it is defined in, other than `__init__`, sets an attribute."""
    tree = ast.parse(inspect.getsource(kind))
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    targets = [
        target
        for method in methods
        for node in ast.walk(method)
        if isinstance(node, ast.Assign | ast.AugAssign)
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return any(_root(target) == "self" for target in targets)


def _root(node: ast.expr) -> str | None:
    """The variable an assignment changes a part of, None for a plain variable."""
    if isinstance(node, ast.Name):
        return None
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _transformers_processors() -> dict[str, type]:
    return {
        name: kind
        for name, kind in vars(logits_process).items()
        if isinstance(kind, type) and name.endswith("LogitsProcessor") and kind.__module__ == logits_process.__name__
    }


SET_UP_ONCE = {
    "RepetitionPenaltyLogitsProcessor",  # in `set_continuous_batching_context`, which only their own engine calls
    "SequenceBiasLogitsProcessor",  # its bias tensors, built at the first call from what it was made with
    "SuppressTokensAtBeginLogitsProcessor",  # in `set_begin_index`, which nothing in a decoding loop calls
}


def test_every_processor_of_transformers_that_keeps_state_is_known() -> None:
    known = _transformers_processors()
    stateful = {name for name, kind in known.items() if _assigns_to_self(kind)}
    assert "UnbatchedClassifierFreeGuidanceLogitsProcessor" in stateful, "the search finds what it looks for"
    assert stateful <= STATEFUL_PROCESSORS | SET_UP_ONCE


def test_what_is_not_callable_is_refused() -> None:
    with refused("processors", 5):
        check_processors((5,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "params",
    [
        {"allowed_token_ids": (0,), "eos": frozenset({0}), "min_new_tokens": 1},
        {"processors": (lambda ids, scores: scores.fill_(-INF),)},
        {"processors": (lambda ids, scores: scores.fill_(float("nan")),)},
    ],
    ids=["only the stop token allowed", "a processor that bans all", "a processor that makes NaN"],
)
def test_nothing_left_is_an_error(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="leave no token to generate"):
        processed(**params)


@pytest.mark.parametrize(
    ("params", "name", "token"),
    [
        ({"logit_bias": {2: 1.0, 6: 1.0}}, "logit_bias", 6),
        ({"allowed_token_ids": (0, 9)}, "allowed_token_ids", 9),
        ({"banned_token_ids": (7,)}, "banned_token_ids", 7),
        ({"stop_token_ids": (8,)}, "stop_token_ids", 8),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_parameter_may_not_name_a_token_past_the_vocabulary(params: dict[str, Any], name: str, token: int) -> None:
    with refused(name, token):
        check_token_ids(SamplingParams(**params), 6)
    check_token_ids(SamplingParams(**params), 10)


def test_banning_everything_is_an_error() -> None:
    with refused("banned_token_ids"):
        check_token_ids(SamplingParams(banned_token_ids=(0, 1, 2, 2)), 3)
    check_token_ids(SamplingParams(banned_token_ids=(0, 1, 1)), 3)


def test_ids_past_a_narrower_drafts_vocabulary_are_left_out() -> None:
    """The target's ids go up to 9 here, the scores are a draft's and stop at 5."""
    out = processed(
        (8, 1),
        prompt=[9, 0],
        output=[7],
        eos=frozenset({9}),
        repetition_penalty=2.0,
        presence_penalty=1.0,
        frequency_penalty=1.0,
        logit_bias={9: 3.0},
        banned_token_ids=(8,),
        allowed_token_ids=(0, 1, 9),
        min_new_tokens=9,
    )
    assert out == [1.0, -4.0, -INF, -INF, -INF, -INF]


# -- several positions at once -----------------------------------------------------------------------------------------


def _alternating(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Allows tokens of the other parity only, and refuses a context that broke the rule itself."""
    tokens = ids[0].tolist()
    assert all((a - b) % 2 for a, b in pairwise(tokens)), f"queried about {tokens}, which it forbids"
    scores[:, tokens[-1] % 2 :: 2] = -INF
    return scores


def test_places_behind_a_forbidden_guess_are_left_alone() -> None:
    """No rule reaches them, and a processor must not see a context that it ruled out."""
    rows = Rows([make_row([2], [], processors=(_alternating,))])
    found = process_rows(torch.zeros(1, 4, 8), rows, torch.tensor([[3, 5, 6]]), 0, [3], None)
    assert found is not None
    scores = found.scores[0]
    assert scores[0].isinf().tolist() == [True, False] * 4
    assert scores[1].isinf().tolist() == [False, True] * 4
    assert not scores[2:].isinf().any()


def test_a_draft_without_a_token_left_keeps_its_raw_scores() -> None:
    rows = Rows([make_row([2], [], allowed_token_ids=(60,))])
    found = process_rows(torch.arange(8.0)[None, None], rows, None, 0, None, None)
    assert found is not None and not found.failures
    assert torch.equal(found.scores[0, 0], torch.arange(8.0))


def test_a_processor_that_raises_or_returns_something_else_names_the_request() -> None:
    def broken(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("by zero")

    with pytest.raises(RequestError, match="its processor function raised ZeroDivisionError: by zero"):
        processed(processors=(broken,))
    with pytest.raises(RequestError, match=r"returned NoneType, not scores \[1, "):
        processed(processors=(lambda ids, scores: None,))
    with pytest.raises(RequestError, match=r"returned \(1, 2\), not scores \[1, "):
        processed(processors=(lambda ids, scores: scores[:, :2],))
