"""foresay's drafters inside a real vLLM, in an environment of its own: `make test-engines`.

FORESAY_VLLM names the Python that has vLLM and foresay.
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
from foresay.drafters import SuffixDrafter
from foresay.integrations.vllm_arguments import llm_arguments
from foresay.lab.bench.peers.base import model_folder
from foresay.lab.data.datasets import load_items
from foresay.lab.data.requests import RequestBuilder
from foresay.lengths import ConstantLength
from foresay.methods.settings_file import Settings
from foresay.models.recording import RecordedText, RecordingModel

MODEL, MOST = "smollm2-135m", 8
RUN = Path(__file__).parents[1] / "helpers" / "vllm_run.py"


@cache
def requests() -> tuple[list[list[int]], list[int]]:
    """64 chats, and how many tokens each writes: they join and leave at different times."""
    target = foresay.load(MODEL, drafter="none")
    items = [item for item in load_items() if isinstance(item.prompt, str)]
    asks = RequestBuilder(target).first((items * 4)[:64])
    return [[int(i) for i in ask.prompt] for ask in asks], [20 + 7 * (i % 9) for i in range(64)]


def run_in_vllm(arguments: dict[str, Any], batch: int = 12) -> dict[str, Any]:
    prompts, lengths = requests()
    job = {"arguments": arguments, "prompts": prompts, "max_tokens": lengths, "batch": batch}
    done = subprocess.run(
        [os.environ["FORESAY_VLLM"], str(RUN)],
        input=json.dumps(job), capture_output=True, text=True, timeout=1800,
        env=os.environ | {"PYTHONPATH": str(RUN.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return out


@cache
def plain() -> dict[str, Any]:
    return run_in_vllm(llm_arguments(Settings(target=MODEL, drafter="none"), model_folder(MODEL)))


def drafting(**changes: Any) -> dict[str, Any]:
    return llm_arguments(Settings(target=MODEL, **{"drafter": "suffix", "length": MOST} | changes), model_folder(MODEL))


@pytest.mark.timeout(3600)
def test_what_is_written_and_how_much_is_accepted() -> None:
    """Plain decoding's tokens; and as many accepted as a replay of them foretells."""
    found, wanted = run_in_vllm(drafting()), plain()
    assert found["outputs"] == wanted["outputs"]
    accepted = sum(n for name, n in found["counted"].items() if name.endswith("accepted_tokens") and n is not None)
    foretold = 0
    for prompt, output in zip(requests()[0], wanted["outputs"], strict=True):
        # vLLM's first token comes with the prompt, before anything is guessed
        text = RecordedText([*prompt, output[0]], output[1:])
        model = RecordingModel([text], 49152)
        engine = foresay.Engine(model, SuffixDrafter(), foresay.Speculative(), ConstantLength(MOST))
        engine.submit(text.prompt, foresay.SamplingParams(max_new_tokens=len(text.output), ignore_eos=True))
        while engine.has_work:
            foretold += sum(step.num_accepted for step in engine.step())
    assert accepted == pytest.approx(foretold, rel=0.03), "the last passes may guess past the end"
    assert accepted > 500, "the case drafts"


@pytest.mark.timeout(3600)
def test_lengths_that_adapt_write_the_same() -> None:
    assert run_in_vllm(drafting(length="throughput"))["outputs"] == plain()["outputs"]


@pytest.mark.timeout(3600)
def test_a_drafter_that_raises_changes_nothing() -> None:
    arguments = drafting()
    arguments["speculative_config"]["model"] = "vllm_run.Failing"
    assert run_in_vllm(arguments)["outputs"] == plain()["outputs"]
