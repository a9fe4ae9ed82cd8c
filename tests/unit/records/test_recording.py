"""Recordings and results as files: what is written is read again, a kill costs a line at most, wrong ones are named."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from foresay import ConfigError, Logits, ModelInput, Rows, Stats
from foresay.decoding.outcome import FinishReason, Origin, Step
from foresay.json_files import Schema
from foresay.models.recording import RecordedText, RecordingModel
from foresay.records.lines import LineWriter, read_lines
from foresay.records.recording import Record, Recording, recording_writer
from foresay.records.results import Cell, Prediction, PromptResult, Results, Run, results_writer
from helpers.making import make_row
from helpers.refusals import refused, refuses

ANY: Schema[Any] = Schema(Any, "a value")
HEADER: dict[str, Any] = {
    "model": "tiny", "vocab_size": 50, "eos": [0], "tokenizer": None, "provenance": {"time": "now"},
    "params": {"max_new_tokens": 8, "stop": ("x", "yz"), "logit_bias": [(3, 1.5)]},
    "settings": {"chat": True, "dtype": "float32"},
}  # fmt: skip
TOP = ((8, -1.5), (2, -2.0))
RECORDS = [
    Record("a", (1, 2), (3, 4, 5), finish_reason="stop", category="chat"),
    Record("b/2", (7,), (8,), source=(4, 4), seed=9, token_probs=(0.25,), logprobs=(-1.5,), top=(TOP,)),
]


def write(path: Path, records: list[Record] = RECORDS, **changes: Any) -> Path:
    with recording_writer(path, {**HEADER, **changes}) as writer:
        for record in records:
            writer.append(record.as_line())
    return path


def test_round_trip(tmp_path: Path) -> None:
    """Fields that are not known are not written."""
    recording = Recording.load(path := write(tmp_path / "r.jsonl"))
    assert list(recording.records) == RECORDS
    assert (recording.vocab_size, recording.eos, recording.model) == (50, frozenset({0}), "tiny")
    assert recording.params == {"max_new_tokens": 8, "stop": ["x", "yz"], "logit_bias": [[3, 1.5]]}
    assert recording.settings == HEADER["settings"] and recording.provenance == {"time": "now"}
    assert recording.greedy and recording.num_tokens == 4
    assert not Recording.load(write(tmp_path / "s.jsonl", params={"temperature": 0.5})).greedy
    known = {"id": "a", "prompt": [1, 2], "output": [3, 4, 5], "finish_reason": "stop", "category": "chat"}
    assert json.loads(path.read_text().splitlines()[1]) == known


def test_a_killed_writer_loses_its_last_line_alone(tmp_path: Path) -> None:
    """One that was killed in its header begins anew; with another header, the unfinished line stays."""
    path = write(tmp_path / "r.jsonl")
    whole = path.read_bytes()
    for cut in range(1, 60, 7):
        path.write_bytes(whole[:-cut])
        assert [r.id for r in Recording.load(path).records] == ["a"], "a reader does not wait for the writer"
        refuses(lambda: write(path, model="other"), "path", str(path))
        assert path.read_bytes() == whole[:-cut]
        with recording_writer(path, {**HEADER, "provenance": {"time": "later"}}) as writer:
            assert [line["id"] for line in writer.lines] == ["a"]
            writer.append(RECORDS[1].as_line())
        assert path.read_bytes() == whole
    for size in (0, 1, 5, 20, 40, len(whole.split(b"\n")[0])):
        path.write_bytes(whole[:size])
        assert write(path).read_bytes() == whole


def test_another_header_names_what_differs(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl")
    changed: list[tuple[dict[str, Any], str]] = [
        ({"model": "other"}, "model='tiny'"),
        ({"vocab_size": 51}, "vocab_size=50"),
        ({"params": {**HEADER["params"], "max_new_tokens": 9}}, "params.max_new_tokens=8"),
        ({"params": {"max_new_tokens": 8, "stop": ["x", "yz"]}}, "params.logit_bias=[[3, 1.5]]"),
        ({"settings": {"chat": True, "dtype": "bfloat16"}}, "settings.dtype='float32'"),
        ({"tokenizer": "abc"}, "tokenizer=None"),
        ({"more": 1}, "more=None"),
    ]
    for changes, name in changed:
        with refused("path", str(path)) as caught:
            write(path, **changes)
        assert name in str(caught.value)
    assert len(Recording.load(path).records) == 2


def test_a_header_alone_is_no_beginning(tmp_path: Path) -> None:
    """As a run leaves it that was refused before its first line; values that are equal in JSON do not differ."""
    path = write(tmp_path / "r.jsonl", [])
    write(path, model="other", params={"stop": ("a",), "logit_bias": {5: 1.0}})
    write(path, [], model="other", params={"stop": ["a"], "logit_bias": {"5": 1.0}})
    recording = Recording.load(path)
    assert recording.model == "other" and list(recording.records) == RECORDS


def test_two_writers_at_once(tmp_path: Path) -> None:
    """A line is there whole when append returns, and nothing of a line that cannot be written."""
    path = tmp_path / "r.jsonl"
    with recording_writer(path, HEADER) as writer:
        refuses(lambda: write(path), "path", path)
        writer.append(RECORDS[0].as_line())
        assert len(Recording.load(path).records) == 1, "reading is allowed"
        with pytest.raises(ValueError, match="not JSON compliant"):
            writer.append({"probs": [float("nan")]})
        assert path.read_bytes().endswith(b"}\n") and path.read_bytes().count(b"\n") == 2
    write(path, RECORDS[1:])
    assert list(Recording.load(path).records) == RECORDS


def test_malformed_lines_are_named_by_number(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", RECORDS[:1])
    before, line = path.read_text(), {"id": "c", "prompt": [1], "output": [1]}
    cases: list[tuple[Any, str, Any]] = [
        *[("{", "", None), ("", "", None), ([1], "", [1])],
        ({"prompt": [1], "output": [2]}, "id", mock.ANY),
        ({"id": "c", "prompt": [1]}, "output", mock.ANY),
        (line | {"id": "a"}, "id", "a"),
        (line | {"colour": 3}, "colour", 3),
        (line | {"prompt": []}, "prompt", []),
        (line | {"output": [50]}, "output", 50),
        (line | {"output": [True]}, "output.0", True),
        (line | {"prompt": [-1]}, "prompt.0", -1),
        (line | {"source": []}, "source", []),
        (line | {"finish_reason": "bored"}, "finish_reason", "bored"),
        (line | {"output": [1, 2], "token_probs": [0.5]}, "token_probs", mock.ANY),
        (line | {"logprobs": ["a"]}, "logprobs.0", "a"),
        (line | {"top": [[1]]}, "top.0.0", 1),
    ]
    for wrong, param, value in cases:
        text = wrong if isinstance(wrong, str) else json.dumps(wrong)
        path.write_text(f"{before}{text}\n" + json.dumps(line | {"id": "z"}) + "\n")
        refuses(lambda: Recording.load(path), param, value, at=f"{path}, line 3")


def test_wrong_headers(tmp_path: Path) -> None:
    path, ours = tmp_path / "r.jsonl", {"format": "foresay-recording", "version": 1, "vocab_size": 5}

    def header(**values: Any) -> Path:
        path.write_text(json.dumps(ours | values) + "\n" + '{"id": "z", "prompt": [1], "output": [2]}\n')
        return path

    assert Recording.load(header()).vocab_size == 5
    refuses(lambda: results_writer(path, {}, {}), "format", "foresay-recording", at=f"{path}, line 1")
    for name, value, param, shown in (
        ("format", "foresay-results", "format", "foresay-results"),
        ("version", 2, "version", 2),
        ("vocab_size", None, "vocab_size", None),
        ("eos", 5, "eos", 5),
        ("eos", [-1], "eos.0", -1),
        ("params", [1], "params", [1]),
        ("settings", 3, "settings", 3),
    ):
        with refused(param, shown, at=f"{path}, line 1"):
            Recording.load(header(**{name: value}))


def test_files_that_are_no_recordings(tmp_path: Path) -> None:
    """Naming a wrong file costs nothing, whether or not its last line is complete."""
    path, far = tmp_path / "x", tmp_path / "no" / "such"
    for unread in (path, tmp_path):
        refuses(lambda unread=unread: Recording.load(unread), "path", unread)  # type: ignore[misc]
    for data in (b"", b"hello", b"[1, 2]", b"\xff\xfe"):
        path.write_bytes(data)
        refuses(lambda: Recording.load(path), "path", path)
    other = json.dumps({"format": "foresay-results", "version": 1}).encode()
    for data in (b'{"1_2": "1_2_3"}', b"two lines\nof notes", b"x", other + b"\nhalf a l", b'{"a": 1}\nhalf'):
        path.write_bytes(data)
        with pytest.raises(ConfigError):
            write(path)
        assert path.read_bytes() == data
    path.write_text(json.dumps({"format": "foresay-recording", "version": 1, "vocab_size": 5}) + "\n")
    refuses(lambda: Recording.load(path), "recording")
    refuses(lambda: Recording.load(write(tmp_path / "r"), prompts=[[1]]), "path")
    refuses(lambda: LineWriter(far, "kind", 1, {}), "path", far)
    refuses(lambda: read_lines(far, "kind", 1, ANY).__enter__(), "path", far)
    path.write_bytes(b"")
    refuses(lambda: read_lines(path, "kind", 1, ANY).__enter__(), "path", str(path))


LOG = "tensor([[ 5,  6,\n          7]])\ntensor([[8, 9]], device='cuda:0')\ntensor([[1,\n         2,\n\n         3, 4]])\n"


def test_a_log_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(LOG)
    recording = Recording.load(path, prompts=[[1], [2, 3], [4]])
    assert [(r.id, r.prompt, r.output) for r in recording.records] == [
        *(("1", (1,), (5, 6, 7)), ("2", (2, 3), (8, 9)), ("3", (4,), (1, 2, 3, 4)))
    ]
    assert recording.vocab_size == 10 and recording.greedy and recording.settings == {"read_from": "tensor log"}
    fewer = Recording.load(path, prompts=[[1], [2, 30], [4], [40]])
    assert len(fewer.records) == 3 and fewer.vocab_size == 31, "a run that was stopped early"
    refuses(lambda: Recording.load(path), "path", str(path))
    for text, param, value in (
        ("tensor([[1, 2]])\n\ntensor([[3,\n ..., 4]])\n", f"{path}, line 3", None),
        ("tensor([[1, 2.5]])\n", f"{path}, line 1", "1, 2.5"),
        ("tensor([[1, 2]])\ntensor([[-3]])\n", f"{path}, line 2", "-3"),
        ("tensor([[1, 2]])\ntensor([[]])\n", f"{path}, line 2", None),
        ("tensor(5)\n", "path", mock.ANY),
        (LOG, "path", mock.ANY),
    ):
        path.write_text(text)
        refuses(lambda: Recording.load(path, prompts=[[1], [2]]), param, value)


def test_a_cache_of_cs_drafting(tmp_path: Path) -> None:
    """A decoder's, and that of a pair, whose sources count."""
    path = tmp_path / "cache.json"
    cases: list[tuple[dict[str, str], list[Any], int]] = [
        ({"1_2": "1_2_3_4", "9": "9_8"}, [((1, 2), (3, 4), None), ((9,), (8,), None)], 10),
        ({"5_6_7": "0_3_4", "8": "0_2"}, [((0,), (3, 4), (5, 6, 7)), ((0,), (2,), (8,))], 9),
    ]
    for pairs, records, vocab in cases:
        path.write_text(json.dumps(pairs))
        recording = Recording.load(path)
        assert [(r.prompt, r.output, r.source) for r in recording.records] == records
        assert recording.vocab_size == vocab and recording.settings == {"read_from": "CS-Drafting cache"}
    wrong: list[Any] = [{"1_2": "1_2_3", "5_6": "0_7"}, {"1_2": "1_2"}, {"1_2": "1_2_3", "4": "0"}, {"1_x": "1_2"}]
    wrong += [{"1": "1_-2"}, {"1": ""}, {"1": [1, 2]}, {}, b'{"1": "1_2"', b'{"1": "\xff"}']
    for pairs in wrong:
        path.write_bytes(pairs if isinstance(pairs, bytes) else json.dumps(pairs).encode())
        refuses(lambda: Recording.load(path), "path", path)


def test_a_recording_as_a_model_refuses() -> None:
    refuses(lambda: RecordingModel([], 5), "recording")
    model = RecordingModel([RecordedText([1, 2], [3])], 5)
    for row in (make_row([1, 3]), make_row([1])):
        refuses(lambda row=row: model.admit(Rows([row]), 0, model.new_cache()), "request", 0)
    other = make_row([1, 2])
    other.request_id = 1
    refuses(lambda: model.admit(Rows([other]), 0, model.new_cache()), "request", 1)
    store = model.new_cache()
    model.admit(Rows([make_row([1, 2])]), 0, store)
    refuses(lambda: model.forward(ModelInput(torch.tensor([[2]]), [1], hidden_layers=(1,)), store), "recording")
    assert store.lengths == [0] and np.array_equal(store.texts, [0])
    last = model.forward(ModelInput(torch.tensor([[1, 2]]), [2], logits=Logits.LAST), store)
    assert last.token_ids is not None and last.token_ids.tolist() == [[3]]


CELL = Cell("suffix, 12", "chat", 1)
KEPT = (Origin.DRAFT, Origin.DRAFT, Origin.RESIDUAL)
STEPS = [
    Step(0, (1, 2, 3), KEPT, 4, 2, (1, 1, 1), draft_s=0.2, target_s=0.4, total_s=0.8),
    Step(0, (4,), (Origin.BONUS,), 0, 0, (), FinishReason.STOP, batch_size=2, target_s=0.1, total_s=0.2),
]


def test_a_prompts_record_by_the_published_names() -> None:
    one = PromptResult.of("a", "chat", STEPS)
    assert (one.generated_length, one.num_accepted) == (4, 2)
    assert (one.num_LM_call, one.num_mismatched_tokens, one.num_drafted, one.num_tested) == (2, 2, 4, 3)
    assert (one.spec_time, one.target_s, one.draft_s) == pytest.approx((0.9, 0.45, 0.2))
    alone = {"target_time", "draft_time", "generated_length_target", "generated_length_draft"}
    assert alone.isdisjoint(dataclasses.asdict(one)), "in the source, those of the target and the draft model alone"
    assert one.finish_reason == "stop"
    empty = PromptResult.of("a", "chat", [])
    assert (empty.num_drafted, empty.finish_reason) == (0, "")


def test_results_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    run = Run(CELL, 0, 2.0, 10, 4.0, identical=True, stats=Stats.of(STEPS).as_dict())
    whole = Run(CELL, 1, 4.0, 10, note="x", prompts=(PromptResult.of("a", "chat", STEPS),))
    with results_writer(path, {"model": "tiny"}, {"time": "now"}) as writer:
        for one in (run, whole):
            writer.append(one.as_line())
        failed = {"method": "x", "dataset": "d", "batch_size": 2}
        cell = {name: getattr(CELL, name) for name in ("method", "dataset", "batch_size", "sampling")}
        writer.append({"kind": "failed", "cell": failed, "repeat": 0, "error": "e"})
        writer.append({"kind": "prediction", "cell": cell, "tokens_per_s": 5.0, "tokens_per_pass": 2.0})
        writer.append({"kind": "trace", "cell": cell, "id": "a", "pieces": [["hi", "draft"]]})
    results = Results.load(path)
    assert results.runs == [run, whole] and (run.tokens_per_s, run.speed_up, whole.speed_up) == (5, 2, None)
    assert results.by_cell() == {CELL: [run, whole]}
    assert results.predictions == [Prediction(CELL, 5.0, 2.0)]
    assert str(results.failures[0].cell) == "x on d, batch 2, greedy"
    assert results.traces[0].pieces == (("hi", "draft"),)
    for bad, param in (('{"kind": "runs"}', ""), ('{"kind": "run"}', "run.cell"), ("{}", "")):
        damaged = tmp_path / "bad.jsonl"
        damaged.write_text(path.read_text() + bad + "\n")
        refuses(lambda damaged=damaged: Results.load(damaged), param, at=f"{damaged}, line 7")
