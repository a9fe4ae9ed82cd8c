"""Penalties, biases and minimum lengths of a batch, against one position of one row at a time."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

from foresay.decoding import penalties
from foresay.decoding.processors import process_rows
from foresay.decoding.rows import Row, Rows
from helpers.making import make_row

VOCAB, WIDTH = 23, 5
EOS = frozenset({4, 9})


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
        if token in params.banned_token_ids:
            score = -torch.inf
        if row.num_new + len(prefix) < params.min_new_tokens and token in row.eos:
            score = -torch.inf
        out.append(score)
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
        rows.append(make_row(prompt, output, eos=EOS, **one))
    return Rows([*rows, make_row([VOCAB + 1], [], repetition_penalty=2.0)])


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("num_before", [0, 2])
def test_each_position_is_that_of_its_own_text(tree: bool, num_before: int) -> None:
    """Control: draft tokens of other branches are before a position, too."""
    rng = random.Random(num_before)
    generator = torch.Generator().manual_seed(num_before)
    for turn in range(20):
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
                if not {*prefix[num_before:]} & {*EOS, *rows[i].params.banned_token_ids}:  # no output reaches others
                    torch.testing.assert_close(scores[t], wanted, msg=f"turn {turn}, row {i}, position {t}")


def test_the_branches_of_others_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    monkeypatch.setattr(penalties, "ancestors_of", lambda parents: torch.ones(*parents.shape, parents.shape[1]) > 0)
    with pytest.raises(AssertionError):
        test_each_position_is_that_of_its_own_text(True, 0)


def test_tokens_are_counted_once_as_a_row_grows() -> None:
    row = make_row([1, 2, 2], [], presence_penalty=1.0)
    seen = penalties._Seen()
    assert seen.of(row).tolist() == [[1, 2], [0, 0]]
    row.extend([2, 5, 5])
    assert seen.of(row).tolist() == seen.of(row).tolist() == [[1, 2, 5], [0, 1, 2]]
