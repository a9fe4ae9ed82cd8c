"""lm-evaluation-harness over HTTP: its scores and texts are those of transformers in float32."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import lm_eval
import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers.client_page import blocks, run_recipe, sections
from helpers.client_server import NAME, Served

PAIRS = [
    (f"Question: what is {a} plus {b}?\nAnswer:", f" {text}")
    for a, b in ((3, 2), (5, 4))
    for text in (a + b, a, b, "hello")
]
TASK = """
task: endings
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{text}}}}"
doc_to_target: "{{{{target}}}}"
generation_kwargs: {{until: ["Q"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


class Direct:
    """transformers' own model, one text at a time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def loglikelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        before = self.tokenizer(context).input_ids
        after = self.tokenizer(context + continuation).input_ids[len(before) :]
        scores = self.model(torch.tensor([before + after])).logits[0, len(before) - 1 : -1].log_softmax(-1)
        wanted = torch.tensor(after)
        return float(scores.gather(1, wanted[:, None]).sum()), bool((scores.argmax(-1) == wanted).all())

    @torch.inference_mode()
    def greedy(self, context: str, count: int) -> str:
        ids = self.tokenizer(context, return_tensors="pt").input_ids
        new = self.model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :]
        return self.tokenizer.decode(new, skip_special_tokens=True)


@pytest.fixture(scope="module")
def direct(folders: Path) -> Direct:
    return Direct(folders / "random")


def completions(random: Served, **more: Any) -> LocalCompletionsAPI:
    return LocalCompletionsAPI(
        model=NAME, base_url=f"{random.url}/completions", tokenizer=str(random.folder), max_retries=1, **more
    )


def instances(kind: str, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, one, i) for i, one in enumerate(arguments)]  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [{"batch_size": 1}, {"batch_size": 4}, {"batch_size": 2, "num_concurrent": 3}])
def test_log_likelihoods(more: dict[str, Any], random: Served, direct: Direct) -> None:
    found = completions(random, **more).loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    wanted = [direct.loglikelihood(*pair) for pair in PAIRS]
    assert [one for one, _ in found] == pytest.approx([one for one, _ in wanted], abs=1e-3)
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    assert len({round(one, 3) for one, _ in wanted}) == len(PAIRS), "different texts have different scores"


def test_a_greedy_continuation_is_recognized(random: Served, direct: Direct) -> None:
    context = PAIRS[0][0]
    pairs = [(context, direct.greedy(context, 3)), (context, " no")]
    found = completions(random).loglikelihood(instances("loglikelihood", pairs), disable_tqdm=True)
    assert [greedy for _, greedy in found] == [True, False]


def test_whole_texts(random: Served, direct: Direct) -> None:
    text = "The tide comes in twice a day, and goes out again."
    [found] = completions(random).loglikelihood_rolling(
        instances("loglikelihood_rolling", [(text,)]), disable_tqdm=True
    )
    assert found == pytest.approx(direct.loglikelihood("<bos>", text)[0], abs=1e-3)


@pytest.mark.parametrize("kind", ["completions", "chat"])
def test_a_task_of_generation(kind: str, random: Served, direct: Direct, tmp_path: Path) -> None:
    """Answers are cut at the stop string, and compared with greedy decoding."""
    texts = ["The sea is", "hello there, the number is 7", "z"]
    chat = [
        direct.tokenizer.apply_chat_template(
            [{"role": "user", "content": one}], tokenize=False, add_generation_prompt=True
        )
        for one in texts
    ]
    wanted = [direct.greedy(one, 12).partition("Q")[0] for one in (chat if kind == "chat" else texts)]
    lines = [json.dumps({"text": text, "target": target}) for text, target in zip(texts, wanted, strict=True)]
    (tmp_path / "endings.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (tmp_path / "endings.yaml").write_text(TASK.format(file=tmp_path / "endings.jsonl"), encoding="utf-8")
    if kind == "chat":
        model: Any = LocalChatCompletion(model=NAME, base_url=f"{random.url}/chat/completions", max_retries=1)
    else:
        model = completions(random, batch_size=2)
    found = lm_eval.simple_evaluate(
        model=model,
        tasks=["endings"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        apply_chat_template=kind == "chat",
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["endings"], key=lambda one: one["doc_id"])
    assert [one["resps"][0][0] for one in samples] == wanted
    assert found["results"]["endings"]["exact_match,none"] == 1


def test_the_recipe_of_the_page(random: Served, direct: Direct, tmp_path: Path) -> None:
    printed = run_recipe("lm-evaluation-harness", random, tmp_path)
    [rows] = blocks(sections()["lm-evaluation-harness"], "json")
    right = []
    for row in map(json.loads, rows.splitlines()):
        scores = [direct.loglikelihood(f"Question: {row['question']}\nAnswer:", f" {one}")[0] for one in row["choices"]]
        right.append(scores[row["right"]] == max(scores))
    assert 0 < sum(right) < len(right), "the data has answers of both kinds"
    [value] = re.findall(r"^\|questions.*\|acc\s*\|↑\s*\|\s*([\d.]+)\|", printed, re.MULTILINE)
    assert float(value) == pytest.approx(sum(right) / len(right), abs=1e-4)
