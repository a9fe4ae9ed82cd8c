"""guidellm's command line: no request fails, and the counted tokens are those that it requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from helpers.client_page import run_recipe
from helpers.client_server import Served


def measured(folder: Path) -> dict[str, Any]:
    [benchmark] = json.loads((folder / "benchmark.json").read_text(encoding="utf-8"))["benchmarks"]
    return benchmark


@pytest.mark.parametrize("request_format", [None, "/v1/completions", "/v1/responses"])
def test_the_recipe_of_the_page(request_format: str | None, random: Served, tmp_path: Path) -> None:
    more = {} if request_format is None else {" --profile": f",request_format={request_format} --profile"}
    run_recipe("guidellm", random, tmp_path, **more)
    benchmark = measured(tmp_path)
    totals = benchmark["metrics"]["request_totals"]
    errors = [one["info"]["error"] for one in benchmark["requests"]["errored"]]
    assert (totals["successful"], totals["errored"], totals["incomplete"]) == (8, 0, 0), errors
    for one in benchmark["requests"]["successful"]:
        assert one["output_metrics"]["text_tokens"] == 16 and len(one["output"]) > 0
        assert one["input_metrics"]["text_tokens"] >= 64
