"""Proposals as any drafter may hand them in: what comes out is well-formed, and well-formed ones come out as they are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from foresay import Distributions, ModelOutput, Proposal
from foresay.decoding import devices
from foresay.decoding.acceptance import RULES, make_rule
from foresay.decoding.proposal_checks import checked
from helpers.making import make_rows

VOCAB, CPU = 5, torch.device("cpu")
LAW, NAN, INF = [0.1, 0.2, 0.3, 0.4, 0.0], float("nan"), float("inf")


def chain(ids: list[list[int]], **changes: Any) -> Proposal:
    fields: dict[str, Any] = {"token_ids": torch.tensor(ids), "num_tokens": [len(row) for row in ids]}
    return Proposal(**{**fields, **changes})


def sampled(ids: list[list[int]], distributions: list[list[float]], index: list[list[int]], **changes: Any) -> Proposal:
    return chain(ids, distributions=torch.tensor(distributions), distribution_index=torch.tensor(index), **changes)


def tree(ids: list[int], parents: list[int], index: list[int] | None = None) -> Proposal:
    above = torch.tensor([parents])
    return chain([ids], parents=above) if index is None else sampled([ids], [LAW], [index], parents=above)


NONE: Any = {"distributions": torch.zeros(0, VOCAB), "distribution_index": torch.tensor([[0]])}
CUT: dict[str, tuple[Proposal, list[int], str]] = {
    "an id past the vocabulary": (chain([[1, 5, 2]]), [1], r"not in \[0, 5\)"),
    "a negative id": (chain([[1, 2, -1]]), [2], r"not in \[0, 5\)"),
    "NaN after one token": (sampled([[1, 2], [3, 1]], [LAW, [NAN] * 5], [[0, 1], [0, 0]]), [1, 2], "does not sum to 1"),
    "an infinite probability": (sampled([[1]], [[INF, 1, 0, 0, 0]], [[0]]), [0], "not finite"),
    "a negative probability": (sampled([[1]], [[-0.5, 1.5, 0, 0, 0]], [[0]]), [0], "negative"),
    "a sum of 0.7": (sampled([[1]], [[0.2, 0.5, 0, 0, 0]], [[0]]), [0], "sum to 1"),
    "a token without probability": (sampled([[1, 4]], [LAW], [[0, 0]]), [1], "probability 0 in the distribution"),
    "an index past the distributions": (sampled([[1, 2]], [LAW], [[0, 1]]), [1], r"index is not in \[-1, 1\)"),
    "an index before them": (sampled([[1, 2]], [LAW], [[0, -2]]), [1], "distribution_index is not in"),
    "no distributions at all": (chain([[1]], **NONE), [0], r"distribution_index is not in \[-1, 0\)"),
    "more than the budget": (chain([[1, 2, 3, 4]]), [3], "with a budget of"),
    "a negative count": (chain([[1, 2]], num_tokens=[-1]), [0], "with a budget of"),
    "more than its width": (chain([[1, 2]], num_tokens=[3]), [2], "a width of 2"),
}
TREES: dict[str, tuple[Proposal, list[int], str]] = {
    "a parent after its child": (tree([1, 2, 3], [-1, 2, 0]), [1], "does not follow an earlier one"),
    "a parent that is none": (tree([1, 2], [-1, -2]), [1], "does not follow an earlier one"),
    "a sibling twice": (tree([1, 1], [-1, -1]), [1], "a token follows a node of a tree twice"),
    "a sampled sibling after a chosen one": (tree([1, 2], [-1, -1], [-1, 0]), [1], "a sibling before it was not"),
}
WHOLE: dict[str, dict[str, Any]] = {
    "float ids": {"token_ids": torch.tensor([[1.0]])},
    "ids in a list": {"token_ids": [[1]]},
    "a row of ids": {"token_ids": torch.tensor([1])},
    "a third dimension": {"token_ids": torch.tensor([[[1]]])},
    "too few rows": {"token_ids": torch.zeros(0, 1, dtype=torch.int64), "num_tokens": []},
    "too many rows": {"token_ids": torch.tensor([[1], [1]]), "distributions": None, "distribution_index": None},
    "sparse ids": {"token_ids": torch.tensor([[1]]).to_sparse()},
    "ids on no device": {"token_ids": torch.zeros(1, 1, dtype=torch.int64, device="meta")},
    "float counts": {"num_tokens": [1.5]},
    "bool counts": {"num_tokens": [True]},
    "counts in one number": {"num_tokens": 1},
    "too few counts": {"num_tokens": []},
    "a float index": {"distribution_index": torch.tensor([[0.0]])},
    "a bool index": {"distribution_index": torch.tensor([[False]])},
    "an index of bytes": {"distribution_index": torch.zeros(1, 1, dtype=torch.uint8)},
    "an index of another width": {"distribution_index": torch.tensor([[0, 0]])},
    "an index of another batch": {"distribution_index": torch.tensor([[0], [0]])},
    "distributions without an index": {"distribution_index": None},
    "an index without distributions": {"distributions": None},
    "bool distributions": {"distributions": torch.ones(1, VOCAB, dtype=torch.bool)},
    "integer distributions": {"distributions": torch.ones(1, VOCAB, dtype=torch.int64)},
    "distributions of a narrower vocabulary": {"distributions": torch.ones(1, 4) / 4},
    "distributions of a wider vocabulary": {"distributions": torch.ones(1, 6) / 6},
    "one distribution without its dimension": {"distributions": torch.tensor(LAW)},
    "distributions in a list": {"distributions": [LAW]},
    "float parents": {"parents": torch.tensor([[-1.0]])},
    "parents of another width": {"parents": torch.tensor([[-1, 0]])},
    "integer confidence": {"confidence": torch.tensor([[1]])},
}
"""Changes of a well-formed proposal."""


@pytest.mark.parametrize("name", [*CUT, *TREES])
def test_a_defect_ends_its_row_there(name: str) -> None:
    proposal, kept, why = (CUT | TREES)[name]
    for trees in {True, name in TREES}:
        out = checked(proposal, [3] * len(kept), VOCAB, CPU, trees=trees)
        assert list(out.num_tokens) == kept and out.width == max(kept)
        with pytest.raises(ValueError, match=why):
            raise out.failure or AssertionError
        for i, n in enumerate(kept):
            assert out.token_ids[i, :n].tolist() == proposal.token_ids[i, :n].tolist()


def test_a_tree_becomes_the_chain_it_begins_with() -> None:
    out = checked(tree([1, 2, 3], [-1, 0, 0]), [3], VOCAB, CPU, trees=False)
    assert (list(out.num_tokens), out.parents) == ([2], None) and "a tree of draft tokens" in str(out.failure)
    out = checked(tree([1, 2, 3], [-1, 0, 1]), [3], VOCAB, CPU, trees=False)
    assert (list(out.num_tokens), out.parents, out.failure) == ([3], None, None)


def test_a_wrong_form_leaves_nothing() -> None:
    sound: dict[str, Any] = {"token_ids": torch.tensor([[1]]), "num_tokens": [1]}
    sound |= {"distributions": torch.tensor([LAW]), "distribution_index": torch.tensor([[0]])}
    assert checked(Proposal(**sound), [2], VOCAB, CPU, trees=True).failure is None, "control"
    wrong: dict[str, Any] = {name: Proposal(**(sound | changes)) for name, changes in WHOLE.items()}
    for name, one in {**wrong, "an object like a proposal": SimpleNamespace(**sound), "nothing": None}.items():
        out = checked(one, [2], VOCAB, CPU, trees=True)
        assert (out.width, list(out.num_tokens)) == (0, [0]), name
        assert isinstance(out.failure, ValueError | TypeError | AttributeError), name


def test_the_drafters_own_failure_stays() -> None:
    own = RuntimeError("its own")
    out = checked(chain([[1, 2]], failure=own), [2], VOCAB, CPU, trees=False)
    assert list(out.num_tokens) == [2] and out.failure is own


ANYTHING = st.one_of(
    st.none(),
    st.integers(-9, 9),
    st.floats(),
    st.booleans(),
    st.text(max_size=2),
    st.lists(st.integers(-9, 9), max_size=3),
)
DTYPES = [torch.int64, torch.int32, torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.uint8]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    numbers = torch.tensor(draw(st.lists(st.floats(-3, 6, width=32) | st.just(NAN), min_size=64, max_size=64)))
    size = int(torch.Size(shape).numel())
    return numbers[:size].nan_to_num(0).reshape(shape).to(draw(st.sampled_from(DTYPES)))


@st.composite
def proposals(draw: st.DrawFn, batch: int) -> Proposal:
    """A well-formed proposal, some of whose fields are then replaced by something else or by numbers out of range."""
    width = draw(st.integers(0, 4))
    number = lambda low, high: st.integers(low, high)  # noqa: E731
    table = lambda each: draw(st.lists(st.lists(each, min_size=width, max_size=width), min_size=batch, max_size=batch))  # noqa: E731
    spread = 2 if draw(st.booleans()) else 0
    fields: dict[str, Any] = {
        "token_ids": torch.tensor(table(number(-spread, VOCAB - 1 + spread)), dtype=torch.int64).view(batch, width),
        "num_tokens": draw(st.lists(number(-spread, width + spread), min_size=batch, max_size=batch)),
    }
    if draw(st.booleans()):
        distributions = torch.tensor([LAW, [0.2] * 5, [1.0, 0, 0, 0, 0], [NAN if spread else 0.2] * 5])
        index = torch.tensor(table(number(-1 - spread, 3 + spread)), dtype=torch.int64).view(batch, width)
        fields |= {"distributions": distributions, "distribution_index": index}
    if draw(st.booleans()):
        above = [[draw(number(-1 - spread, max(0, j - 1) + spread)) for j in range(width)] for _ in range(batch)]
        fields["parents"] = torch.tensor(above, dtype=torch.int64).view(batch, width)
    for name in draw(st.sets(st.sampled_from([*fields, "confidence"]), max_size=2)) if draw(st.booleans()) else ():
        fields[name] = draw(ANYTHING | tensors())
    return Proposal(**fields)


PADDED: dict[str, Proposal] = {
    "a parent out of range": chain([[1, 2, 3]] * 2, num_tokens=[2, 3], parents=torch.tensor([[-1, 0, 77], [-1, 0, 1]])),
    "a parent far below": chain([[1, 2, 3]] * 2, num_tokens=[2, 3], parents=torch.tensor([[-1, 0, -77], [-1, 0, 1]])),
    "an id out of range": chain([[1, 2, 999], [1, 2, 3]], num_tokens=[2, 3]),
    "an index out of range": sampled([[1, 2, 3]] * 2, [LAW], [[0, 0, 99], [0, 0, 0]], num_tokens=[2, 3]),
    "NaN as confidence": chain([[1, 2]] * 2, num_tokens=[1, 2], confidence=torch.tensor([[0.5, NAN], [0.5, 0.5]])),
    "distributions of no row": chain([[1]], **NONE | {"distribution_index": torch.tensor([[-1]])}),
}
"""Proposals whose drafted tokens are sound."""


def verified(proposal: Proposal, trees: bool) -> None:
    """Verify a proposal by every rule, greedy and sampled rows by turns: none may raise."""
    batch, width = proposal.token_ids.shape
    rows = make_rows(*({"temperature": float(i % 2)} for i in range(batch)))
    scores = torch.randn(batch, width + 1, VOCAB, generator=torch.Generator().manual_seed(0))
    distributions = ModelOutput(scores).distributions(rows, proposal)
    for name in RULES:
        rule = make_rule(name)
        if proposal.parents is None or (trees and rule.trees):
            out = rule.verify(distributions, proposal, rows.streams(CPU))
            assert ((out.num_accepted >= 0) & (out.num_accepted <= torch.tensor(proposal.num_tokens))).all()
    assert proposal.depths().shape == (batch, width)


@pytest.mark.parametrize("name", PADDED)
def test_padding_has_no_influence(name: str) -> None:
    for trees in (False, True):
        out = checked(PADDED[name], [3] * len(PADDED[name].num_tokens), VOCAB, CPU, trees=trees)
        assert list(out.num_tokens) == list(PADDED[name].num_tokens) and out.failure is None
        assert ((out.token_ids >= 0) & (out.token_ids < VOCAB)).all()
        verified(out, trees)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_whatever_is_handed_in_comes_out_well_formed(data: st.DataObject) -> None:
    batch, trees = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    proposal = data.draw(proposals(batch))
    budget = data.draw(st.lists(st.integers(0, 4), min_size=batch, max_size=batch))
    out = checked(proposal, budget, VOCAB, CPU, trees=trees)
    assert out.token_ids.dtype == torch.int64 and out.token_ids.shape == (batch, max(out.num_tokens))
    assert all(0 <= n <= most for n, most in zip(out.num_tokens, budget, strict=True))
    assert trees or out.parents is None
    verified(out, trees)
    for i, n in enumerate(out.num_tokens):
        ids = out.token_ids[i, :n].tolist()
        assert all(0 <= token < VOCAB for token in ids)
        siblings: set[tuple[int, int]] = set()
        for column, token in enumerate(ids):
            row = -1 if out.distribution_index is None else int(out.distribution_index[i, column])
            if row >= 0 and out.distributions is not None:
                distribution = out.distributions[row]
                assert bool(torch.isfinite(distribution).all()) and float(distribution[token]) > 0
                assert abs(float(distribution.sum()) - 1) < 1e-2
            if out.parents is not None:
                parent = int(out.parents[i, column])
                assert -1 <= parent < column and (parent, token) not in siblings
                siblings.add((parent, token))
    again = checked(out, budget, VOCAB, CPU, trees=trees)
    assert list(again.num_tokens) == list(out.num_tokens), "what came out well-formed stays as it is"


@pytest.mark.parametrize("name", CUT)
def test_on_a_device_tokens_from_the_first_defect_on_are_replaced(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As tokens that were not sampled, and the step reports the defect."""
    monkeypatch.setattr(devices, "is_remote", lambda device: True)
    proposal, kept, _ = CUT[name]
    out = checked(proposal, [3] * len(kept), VOCAB, CPU, trees=False)
    if out.failure is not None:  # a defect of the form, which the host knows
        assert list(out.num_tokens) == kept
        return
    assert out.defects is not None
    assert out.defects.rows.tolist() == [n < k for n, k in zip(kept, proposal.num_tokens, strict=True)]
    for i, n in enumerate(kept):
        assert out.token_ids[i].tolist() == [*proposal.token_ids[i, :n].tolist(), *[0] * (out.width - n)]
        if out.distribution_index is not None and proposal.distribution_index is not None:
            before = proposal.distribution_index[i, :n].tolist()
            assert out.distribution_index[i].tolist() == [*before, *[-1] * (out.width - n)]


@pytest.mark.parametrize("name", TREES)
def test_on_a_device_nodes_from_the_first_defect_on_are_not_reached(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    proposal, kept, _ = TREES[name]
    monkeypatch.setattr(devices, "is_remote", lambda device: True)
    out = checked(proposal, [3] * len(kept), VOCAB, CPU, trees=True)
    assert out.defects is not None and out.defects.rows.tolist() == [True] * len(kept)
    assert out.parents is not None and proposal.parents is not None
    for i, n in enumerate(kept):
        assert out.parents[i].tolist() == [*proposal.parents[i, :n].tolist(), *range(n, out.width)]
    for token in range(VOCAB):  # whatever the target draws
        target = Distributions(torch.full((len(kept), 1 + out.width), token))
        path = make_rule("match").verify(target, out, make_rows(*[{}] * len(kept)).streams(CPU)).path
        assert path is not None and int(path.max()) < max(kept)
