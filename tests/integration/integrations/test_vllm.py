"""vLLM's arguments for foresay's settings; the real engine: tests/engines."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from foresay.errors import ForesayError, ModelNotFoundError
from foresay.integrations.vllm_arguments import llm_arguments, model_folder, serve_command
from foresay.spec.settings_file import Settings
from helpers.refusals import refused


def arguments(**settings: Any) -> dict[str, Any]:
    return llm_arguments(Settings(target="a-model", **settings), "/models/a")


@pytest.mark.parametrize(
    ("drafter", "length", "count", "config"),
    [
        (None, None, 8, {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}),
        ("prompt_lookup(6, min_ngram=3)", 5, 5, {"method": "ngram", "prompt_lookup_max": 6, "prompt_lookup_min": 3}),
        ("head(/a, sample=false)", "3", 3, {"method": "eagle3", "model": "/a"}),
        ("block(/a)", None, 7, {"method": "dflash", "model": "/a"}),
        ("mtp", None, 3, {"method": "mtp"}),
        ("model(/a)", None, 5, {"method": "draft_model", "model": "/a"}),
    ],
)
def test_each_draft_runs_by_a_method_of_vllm(drafter: Any, length: Any, count: int, config: dict[str, Any]) -> None:
    given = arguments(drafter=drafter, length=length)
    assert given == {"model": "/models/a", "speculative_config": {**config, "num_speculative_tokens": count}}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"drafter": "suffix"}, ["drafter='suffix'", "prompt_lookup"]),
        ({"drafter": "cascade(model=x, max_gram; k=[[5, 10], [0, 10]])"}, ["cascade"]),
        ({"drafter": "self(3)"}, ["drafter='self(3)'"]),
        ({"drafter": "sufix"}, ["Did you mean 'suffix'"]),
        ({"drafter": "head(x)", "length": "throughput"}, ["length='throughput'", "constant"]),
        ({"drafter": "model(x, vocabulary=y)"}, ["vocabulary"]),
        ({"drafter": "head(smollm2-135m)"}, ["foresay export"]),
        ({"drafter": "head(x, sample=true)"}, ["sample"]),
        ({"rule": "coupled"}, ["rule='coupled'"]),
        ({"dtype": "bf61"}, ["bf61"]),
        ({"weights": "int4"}, ["weights='int4'"]),
        ({"activations": "float32"}, ["activations='float32'"]),
        ({"backend": "llama.cpp"}, ["backend='llama.cpp'"]),
    ],
)
def test_a_setting_that_vllm_does_not_support_is_an_error(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ForesayError) as error:
        arguments(**settings)
    assert all(word in str(error.value) for word in words)


def test_the_command_line_is_parsed_back_to_the_arguments() -> None:
    given = arguments(drafter="head(/a)", max_batch_size=8, dtype="bf16", rule="speculative")
    words = shlex.split(serve_command(given).replace("\\\n", " "))
    assert words[:3] == ["vllm", "serve", "/models/a"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert json.loads(options.pop("--speculative-config")) == given["speculative_config"]
    assert options == {"--max-num-seqs": "8", "--dtype": "bfloat16"}
    assert arguments(drafter="none") == {"model": "/models/a"}


def test_the_folder_of_the_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name, error in ((str(tmp_path), ModelNotFoundError), ("a/b/c", ModelNotFoundError)):
        with pytest.raises(error, match=r"weights|hf download"):
            model_folder(name)
    with refused("model"):
        model_folder(str(tmp_path / "config.json"))
    (tmp_path / "a.safetensors").touch()
    assert model_folder(str(tmp_path)) == str(tmp_path)
