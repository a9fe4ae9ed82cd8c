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
from foresay.models.recording import RecordedText, RecordingModel
from foresay.spec.settings_file import Settings

MODEL, MOST = "smollm2-135m", 8
RUN = Path(__file__).parents[1] / "helpers" / "vllm_run.py"


@cache
def requests() -> tuple[list[list[int]], list[int]]:
    """64 chats, and how many tokens each writes: they join and leave at different times."""
    target = foresay.load(MODEL, drafter="none")
    items = [item for item in load_items() if isinstance(item.prompt, str)]
    asks = RequestBuilder(target).first((items * 4)[:64])
    return [[int(i) for i in ask.token_ids] for ask in asks], [20 + 7 * (i % 9) for i in range(64)]


def run_in_vllm(arguments: dict[str, Any], batch: int = 12, further: int = 0) -> dict[str, Any]:
    prompts, lengths = requests()
    longer = [n + further for n in lengths]
    job = {"arguments": arguments, "prompts": prompts, "max_tokens": longer, "batch": batch}
    done = subprocess.run(
        [os.environ["FORESAY_VLLM"], str(RUN)],
        input=json.dumps(job), capture_output=True, text=True, timeout=1800,
        env=os.environ | {"PYTHONPATH": str(RUN.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    out: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return out


@cache
def plain() -> list[list[int]]:
    """What vLLM writes without drafts, and as much behind it as a last draft may guess."""
    arguments = llm_arguments(Settings(target=MODEL, drafter="none"), model_folder(MODEL))
    outputs: list[list[int]] = run_in_vllm(arguments, further=MOST + 1)["outputs"]
    return outputs


def wanted() -> list[list[int]]:
    return [output[:n] for output, n in zip(plain(), requests()[1], strict=True)]


def foretold() -> int:
    """Draft tokens that a replay of what was written accepts."""
    count = 0
    for prompt, output, length in zip(requests()[0], plain(), requests()[1], strict=True):
        # vLLM's first token comes with the prompt, before anything is guessed; and it guesses on past the last one
        text = RecordedText([*prompt, output[0]], output[1:])
        engine = foresay.Engine(
            RecordingModel([text], 49152), SuffixDrafter(), foresay.Speculative(), ConstantLength(MOST)
        )
        engine.submit(text.prompt, foresay.SamplingParams(max_new_tokens=len(text.output), ignore_eos=True))
        written = 1
        while written < length:
            for step in engine.step():
                count += step.num_accepted
                written += len(step.token_ids)
    return count


def drafting(**changes: Any) -> dict[str, Any]:
    return llm_arguments(Settings(target=MODEL, **{"drafter": "suffix", "length": MOST} | changes), model_folder(MODEL))


@pytest.mark.timeout(3600)
def test_what_is_written_and_how_much_is_accepted() -> None:
    """Plain decoding's tokens; and as many accepted as a replay of them foretells."""
    found = run_in_vllm(drafting())
    assert found["outputs"] == wanted()
    accepted = sum(n for name, n in found["counted"].items() if name.endswith("accepted_tokens") and n is not None)
    assert accepted == pytest.approx(foretold(), rel=0.01)
    assert accepted > 500, "the case drafts"


@pytest.mark.timeout(3600)
def test_lengths_that_adapt_write_the_same() -> None:
    found = run_in_vllm(drafting(length="throughput"))
    assert found["outputs"] == wanted()
    assert found["counted"]["vllm:spec_decode_num_draft_tokens"] > 0


@pytest.mark.timeout(3600)
def test_a_drafter_that_raises_changes_nothing() -> None:
    arguments = drafting()
    arguments["speculative_config"]["model"] = "vllm_run.Failing"
    found = run_in_vllm(arguments)
    assert found["outputs"] == wanted()
    assert found["raised"] > 0 and found["counted"]["vllm:spec_decode_num_accepted_tokens"] > 0
