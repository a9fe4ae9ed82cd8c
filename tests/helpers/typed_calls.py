"""Calls as mypy must see them: each wrong one has a comment that mypy reports if the call were right. Nothing runs this."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from foresay import Chunk, Generation, Generator, SamplingParams, Session
from foresay.text.prompts import Prompt

GREEDY = SamplingParams()


def right(model: Generator, session: Session) -> tuple[Generation, list[Generation], Iterator[Chunk], int]:
    some: list[Prompt] = ["a", [1, 2], torch.tensor([1])]
    one: Generation = model.generate("a", GREEDY)
    one = model.generate([{"role": "user", "content": "a"}], temperature=0.5)
    one = model.generate(torch.tensor([1, 2]))
    several: list[Generation] = model.generate(["a", "b"], [GREEDY, GREEDY], seed=1)
    several = model.generate([[1, 2], (3,)]) + model.generate(some) + model.generate([np.array([1])])
    model.stream(some, max_tokens=3)
    return one, several, model.stream("a"), session.submit([1], GREEDY)


def wrong(model: Generator, session: Session) -> None:
    model.generate(3.5)  # type: ignore[call-overload]
    model.generate("a", {"temperature": 1})  # type: ignore[call-overload]
    model.generate("a", 5)  # type: ignore[call-overload]
    model.generate("a", [GREEDY])  # type: ignore[arg-type]
    model.generate("a", temperatur=1)  # type: ignore[call-overload]
    model.stream(3.5)  # type: ignore[arg-type]
    model.astream(None)  # type: ignore[arg-type]
    model.stream("a", {"temperature": 1})  # type: ignore[arg-type]
    session.submit(3.5)  # type: ignore[arg-type]
