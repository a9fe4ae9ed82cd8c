"""Drafts that foresay writes, run by a real vLLM in an environment of its own: `make test-engines`.

FORESAY_VLLM names the Python that has vLLM.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import foresay
from foresay.cli.app import _run
from foresay.integrations.vllm_arguments import llm_arguments, model_folder
from foresay.spec.settings_file import Settings
from foresay_lab.data.datasets import load_items
from foresay_lab.data.requests import RequestBuilder

MODEL, NEW = "smollm2-135m", 48
RUN = Path(__file__).parents[1] / "helpers" / "vllm_run.py"
pytestmark = pytest.mark.timeout(3600)


@cache
def prompts() -> list[list[int]]:
    items = [item for item in load_items() if isinstance(item.prompt, str)]
    return [list(ask.token_ids) for ask in RequestBuilder(foresay.load(MODEL, drafter="none")).first(items[:16])]


def run_in_vllm(drafter: str) -> dict[str, Any]:
    arguments = llm_arguments(Settings(target=MODEL, drafter=drafter), model_folder(MODEL))
    done = subprocess.run(
        [os.environ["FORESAY_VLLM"], str(RUN)],
        input=json.dumps({"arguments": arguments, "prompts": prompts(), "max_tokens": NEW}),
        capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return out


@cache
def plain() -> list[list[int]]:
    outputs: list[list[int]] = run_in_vllm("none")["outputs"]
    return outputs


def test_an_exported_head_drafts_and_changes_no_text(tmp_path: Path) -> None:
    assert _run(["export", MODEL, str(tmp_path / "head"), "--model", MODEL]) == 0
    found = run_in_vllm(f"head({tmp_path / 'head'})")
    assert found["outputs"] == plain()
    assert found["counted"]["vllm:spec_decode_num_accepted_tokens"] > 100


def test_n_grams_change_no_text() -> None:
    found = run_in_vllm("prompt_lookup")
    assert found["outputs"] == plain()
    assert found["counted"]["vllm:spec_decode_num_accepted_tokens"] > 20
