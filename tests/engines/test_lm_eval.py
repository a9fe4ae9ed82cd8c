"""foresay under lm-evaluation-harness next to its own transformers model, in float32: `make test-engines`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager

import foresay
from foresay.integrations.lm_eval import ForesayLM
from foresay.integrations.vllm_arguments import model_folder

MODEL = "smollm2-135m"
SUMS = [(a, b) for a in range(3, 8) for b in range(2, 6)]
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
doc_to_text: "Question: what is {{{{a}}}} plus {{{{b}}}}?\\nAnswer:"
{more}
"""
WRITES = """doc_to_target: "{{sum}}"
generation_kwargs: {until: ["Question:", "\\n\\n"], max_gen_toks: 24, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true, regexes_to_ignore: ["[^0-9]"]}]
"""
CHOOSES = """doc_to_choice: ["{{sum}}", "{{a}}", "{{b}}", "{{a}}{{b}}"]
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


@pytest.fixture(scope="module")
def ours() -> ForesayLM:
    return ForesayLM(MODEL, dtype="float32", batch_size="4", drafter="suffix")


@pytest.fixture(scope="module")
def theirs() -> Any:
    return HFLM(pretrained=str(model_folder(MODEL)), dtype="float32", device="cpu", batch_size=1)


@pytest.fixture
def tasks(tmp_path: Path) -> Any:
    file = tmp_path / "sums.jsonl"

    def make(kind: str, more: str) -> TaskManager:
        lines = [json.dumps({"a": str(a), "b": str(b), "sum": str(a + b)}) for a, b in SUMS]
        file.write_text("\n".join(lines))
        (tmp_path / "sums.yaml").write_text(TASK.format(file=file, kind=kind, more=more))
        return TaskManager(include_path=str(tmp_path), include_defaults=False)

    return make


@pytest.mark.parametrize(("kind", "more"), [("generate_until", WRITES), ("multiple_choice", CHOOSES)])
def test_scores_and_samples_are_those_of_transformers(
    ours: ForesayLM, theirs: Any, tasks: Any, kind: str, more: str
) -> None:
    manager = tasks(kind, more)
    found = [
        lm_eval.simple_evaluate(model=one, tasks=["sums"], task_manager=manager, log_samples=True, bootstrap_iters=0)
        for one in (ours, theirs)
    ]
    mine, other = (one["samples"]["sums"] for one in found)
    assert len(mine) == len(other) > 2
    assert found[0]["results"] == found[1]["results"]
    for a, b in zip(mine, other, strict=True):
        if kind == "generate_until":
            assert a["resps"] == b["resps"]
        else:
            close = [(float(x[0][0]), x[0][1]) for x in a["resps"]], [(float(x[0][0]), x[0][1]) for x in b["resps"]]
            assert [x[0] for x in close[0]] == pytest.approx([x[0] for x in close[1]], abs=1e-3)
            assert [x[1] for x in close[0]] == [x[1] for x in close[1]]


def instances(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(request_type=kind, doc={}, arguments=one, idx=i) for i, one in enumerate(arguments)]  # type: ignore[arg-type]


def test_whole_texts(ours: ForesayLM, theirs: Any) -> None:
    texts = [("The tide comes in twice a day, and goes out again.",), ("One, two, three. " * 90,)]
    asked = instances("loglikelihood_rolling", texts)
    assert ours.loglikelihood_rolling(asked) == pytest.approx(theirs.loglikelihood_rolling(asked), rel=1e-4)


def test_texts_longer_than_the_context() -> None:
    """Windows, and contexts whose beginnings are cut."""
    short = ForesayLM(MODEL, dtype="float32", max_length="64")
    other = HFLM(pretrained=str(model_folder(MODEL)), dtype="float32", device="cpu", batch_size=1, max_length=64)
    text = " ".join(f"{n} and" for n in range(120))
    rolling = instances("loglikelihood_rolling", [(text,)])
    assert short.loglikelihood_rolling(rolling) == pytest.approx(other.loglikelihood_rolling(rolling), rel=1e-4)
    pairs = instances("loglikelihood", [(text, " 120 and"), ("", "The sea"), (text, " so on")])
    for mine, its in zip(short.loglikelihood(pairs), other.loglikelihood(pairs), strict=True):
        assert mine[0] == pytest.approx(its[0], abs=2e-3) and mine[1] == its[1]
    asked = instances("generate_until", [(text, {"until": ["7"], "max_gen_toks": 12})])
    assert short.generate_until(asked) == other.generate_until(asked)


def test_a_sampled_request_repeats_its_seed(ours: ForesayLM) -> None:
    settings = {"until": ["\n"], "max_gen_toks": 16, "do_sample": True, "temperature": 0.9, "top_p": 0.95}
    asked = instances("generate_until", [("The sea is", settings)] * 2)
    first = ours.generate_until(asked)
    assert first == ours.generate_until(asked) and first[0] != first[1]


def test_from_the_command_line(tasks: Any, tmp_path: Path) -> None:
    """As on the page, on a machine without a GPU, where the harness names one all the same."""
    tasks("generate_until", WRITES)
    options = f"--model_args pretrained={MODEL},dtype=float32,drafter=suffix --batch_size 8 --tasks sums --limit 3"
    command = [sys.executable, "-m", "foresay.integrations.lm_eval", "--model", "foresay", *options.split()]
    command += ["--include_path", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "exact_match" in done.stdout
    made = ForesayLM.create_from_arg_string(f"pretrained={MODEL},batch_size=2", {"batch_size": 1, "device": None})
    assert made.batch_size == 2, "what the model is given wins"


def test_what_cannot_be_honoured_is_named(ours: ForesayLM) -> None:
    asked = instances("generate_until", [("The sea is", {"until": [], "num_beams": 4})])
    with pytest.raises(foresay.ConfigError, match="num_beams"):
        ours.generate_until(asked)
    with pytest.raises(foresay.ConfigError, match="must be below the context length"):
        ours.generate_until(instances("generate_until", [("The sea is", {"until": [], "max_gen_toks": 9000})]))
    with pytest.raises(foresay.ConfigError, match="batch_size='many'"):
        ForesayLM(MODEL, batch_size="many")
    with pytest.raises(foresay.ConfigError):
        ForesayLM(MODEL, colour="red")
