"""Training curves, read from the log and drawn."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from foresay.files import atomic_write
from foresay.json_files import Schema
from foresay.records.lines import read_lines
from foresay_lab.training.fitting import LOG

CURVES = "curves.png"


class _Evaluation(BaseModel):
    """One line of the log. Extra fields are numbers, such as acceptance_1 and loss."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)
    __pydantic_extra__: dict[str, float | int | str | None]

    step: int
    tokens: int
    tokens_per_pass: float


_EVALUATION: Schema[_Evaluation] = Schema(_Evaluation, "an evaluation")


def read_log(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Return the evaluations by step. If a resumed run repeated one, the last counts."""
    with read_lines(folder / LOG, "foresay-training", 1, _EVALUATION) as (_, lines):
        found = {line.step: line.model_dump() for _, line in lines}
    return dict(sorted(found.items()))


def draw_curves(folder: Path, lines: Mapping[int, Mapping[str, Any]]) -> bool:
    """Draw tokens per pass, acceptance and loss over the training tokens. Return False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(9, 3), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    tokens = [line["tokens"] / 1000 for line in lines.values()]
    left.plot(tokens, [line["tokens_per_pass"] for line in lines.values()], marker=".")
    left.set_title("tokens per pass, held out")
    names = sorted({name for line in lines.values() for name in line if name.startswith("acceptance_")})
    for name in names:
        middle.plot(tokens, [line[name] for line in lines.values()], marker=".", label=f"draft token {name[11:]}")
    middle.set_title("acceptance probability")
    middle.set_ylim(0, 1)
    middle.legend(fontsize="small")
    losses = [(n, line["loss"]) for n, line in zip(tokens, lines.values(), strict=True) if "loss" in line]
    right.plot([n for n, _ in losses], [loss for _, loss in losses], marker=".")
    right.set_title("loss")
    for axes in (left, middle, right):
        axes.set_xlabel("thousand training tokens")
        axes.grid(alpha=0.3)
    with atomic_write(folder / CURVES) as temporary:
        figure.savefig(temporary, dpi=120)
    return True
