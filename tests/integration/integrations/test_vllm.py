"""foresay inside vLLM, with vLLM's part played by plain objects; the real engine: tests/engines."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from foresay.errors import ConfigError, ForesayError
from foresay.integrations.vllm import Proposer
from foresay.integrations.vllm_arguments import PROPOSER, llm_arguments, serve_command
from foresay.spec.settings_file import Settings


def config(additional: Any = None, most: int = 8) -> Any:
    """As much of a VllmConfig as is looked at."""
    return SimpleNamespace(
        additional_config={} if additional is None else {"foresay": additional},
        speculative_config=SimpleNamespace(num_speculative_tokens=most),
        model_config=SimpleNamespace(
            get_vocab_size=lambda: 50, max_model_len=64, model="a-model", tokenizer="a-model", trust_remote_code=False
        ),
    )


def batch(*texts: list[int], room: int = 64) -> tuple[Any, Any]:
    """vLLM's arrays: lengths, and texts with rubbish behind them."""
    ids = np.full((len(texts) + 2, room), 49, dtype=np.int32)
    for row, text in zip(ids, texts, strict=False):
        row[: len(text)] = text
    return np.array([*map(len, texts), 0, 0], dtype=np.int32), ids


def test_it_guesses_what_followed_before() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2, 3]
    proposer = Proposer(config({"drafter": "suffix", "length": "4"}))
    lengths, ids = batch(text, [9, 8, 7])
    assert proposer.propose([[3], []], lengths, ids, slot_mappings=None) == [[4, 5, 6, 7], []]


def test_its_usual_settings_are_a_suffix_and_lengths_that_adapt() -> None:
    proposer = Proposer(config())
    lengths, ids = batch([1, 2, 3, 1, 2])
    for _ in range(3):
        assert proposer.propose([[2]], lengths, ids) == [[]], "the first passes are plain, to compare with"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"drafter": "head(smollm2-135m)"}, "needs a model"),
        ({"drafter": "hybrid(suffix, model=x)"}, "needs a model"),
        ({"drafter": "none"}, "drafts nothing"),
        ({"drafter": "suffix_tree"}, "proposes trees"),
        ({"drafter": "ngram_store(filler_top_k=4)"}, "learns from the target's scores"),
        ({"drafter": "sufix"}, "Did you mean 'suffix'"),
        ({"drafters": "suffix"}, "Did you mean 'drafter'"),
        ({"length": "acceptance(x)"}, "x"),
        ("suffix", "must be a table"),
    ],
)
def test_what_it_cannot_honour_is_said_at_the_start(given: Any, said: str) -> None:
    with pytest.raises((ForesayError, OSError)) as error:
        Proposer(config(given))
    assert said in str(error.value)


def test_whatever_goes_wrong_vllm_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    proposer = Proposer(config())
    with caplog.at_level(logging.WARNING, "foresay"):
        assert proposer.propose([[3], [4]], np.array([5]), np.zeros((1, 3), dtype=np.int32)) == [[], []]
        assert proposer.propose([[3]], *batch([1, 2, 3])) == [[]], "and stays so"
    assert [record.message for record in caplog.records if "stopped drafting" in record.message]
    assert len(caplog.records) == 1


def test_what_vllm_is_told_beside_it_is_looked_at() -> None:
    asked = config()
    asked.speculative_config.rejection_sample_method = "block"
    with pytest.raises(ConfigError, match="ignores it"):
        Proposer(asked)
    asked = config()
    asked.parallel_config = SimpleNamespace(pipeline_parallel_size=2)
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2"):
        Proposer(asked)


def test_it_imports_nothing_of_vllm() -> None:
    """vLLM's environment has what vLLM needs; ours must not need more than it brings."""
    code = "import sys, foresay.integrations.vllm; print([m for m in ('vllm', 'gguf', 'fastapi') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def arguments(**settings: Any) -> dict[str, Any]:
    return llm_arguments(Settings(target="a-model", **settings), "/models/a")


def test_a_look_up_is_a_class_of_ours() -> None:
    assert arguments() == {
        "model": "/models/a",
        "speculative_config": {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": 16},
        "additional_config": {"foresay": {"drafter": "suffix", "length": "throughput"}},
    }
    found = arguments(drafter="max_gram", length=5, rule="speculative", max_batch_size=64, dtype="bf16")
    assert found["speculative_config"]["num_speculative_tokens"] == 5
    assert arguments(length="throughput(high=24)")["speculative_config"]["num_speculative_tokens"] == 24
    assert arguments(length="heuristic")["speculative_config"]["num_speculative_tokens"] > 4
    assert (found["max_num_seqs"], found["dtype"]) == (64, "bfloat16")


def test_a_head_and_a_draft_model_are_vllms_own() -> None:
    head = arguments(drafter="head(/drafts/a, sample=false)", length=3)
    assert head["speculative_config"] == {"method": "eagle3", "model": "/drafts/a", "num_speculative_tokens": 3}
    assert "additional_config" not in head
    assert arguments(drafter="model(/drafts/b)")["speculative_config"]["method"] == "draft_model"
    assert "speculative_config" not in arguments(drafter="none")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"drafter": "cascade(model=x, max_gram; k=[[5, 10], [0, 10]])"}, "needs a model"),
        ({"drafter": "self(3)"}, "needs a model"),
        ({"drafter": "head(x)", "length": "throughput"}, "at a constant length"),
        ({"drafter": "model(x, vocabulary=y)"}, "vocabulary"),
        ({"rule": "coupled"}, "by its own rule"),
        ({"rule": "block"}, "by its own rule"),
        ({"drafter": "suffix_tree"}, "proposes trees"),
        ({"drafter": "ngram_store(filler_top_k=4)"}, "learns from the target's scores"),
        ({"drafter": "head(smollm2-135m)"}, "foresay export"),
        ({"drafter": "head(x, sample=true)"}, "sample"),
        ({"dtype": "bf61"}, "bf61"),
        ({"weights": "int4"}, "its own quantization options"),
        ({"activations": "float32"}, "its own kernels"),
    ],
)
def test_what_vllm_cannot_have_is_an_error(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError if "rule" in settings or "weights" in settings else ForesayError) as error:
        arguments(**settings)
    assert said in str(error.value)


def test_the_command_line_is_read_back_as_it_was_meant() -> None:
    import shlex

    found = arguments(drafter="suffix(scale=2.5)", max_batch_size=8)
    words = shlex.split(serve_command(found).replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "/models/a"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert json.loads(given["--speculative-config"]) == found["speculative_config"]
    assert json.loads(given["--additional-config"]) == found["additional_config"]
    assert given["--max-num-seqs"] == "8"
