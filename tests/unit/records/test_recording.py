"""Recordings and results as files: what is written is read again, a kill costs a line at most, wrong ones are named."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foresay.decoding.outcome import FinishReason, Origin, Step
from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.rows import Rows
from foresay.engine.stats import Stats
from foresay.errors import ConfigError
from foresay.json_files import Schema
from foresay.models.recording import RecordedText, RecordingModel
from foresay.records.lines import LineWriter, read_lines
from foresay.records.recording import Record, Recording, recording_writer
from foresay.records.results import Cell, Prediction, PromptResult, Results, Run, results_writer
from helpers.making import make_row

ANY: Schema[Any] = Schema(Any, "a value")
HEADER: dict[str, Any] = {
    "model": "tiny",
    "vocab_size": 50,
    "eos": [0],
    "tokenizer": None,
    "params": {"max_new_tokens": 8, "stop": ("x", "yz"), "logit_bias": [(3, 1.5)]},
    "settings": {"chat": True, "dtype": "float32"},
    "provenance": {"time": "now"},
}
RECORDS = [
    Record("a", (1, 2), (3, 4, 5), finish_reason="stop", category="chat"),
    Record(
        "b/2", (7,), (8,), source=(4, 4), seed=9, token_probs=(0.25,), logprobs=(-1.5,), top=(((8, -1.5), (2, -2.0)),)
    ),
]


def write(path: Path, records: list[Record] = RECORDS, **changes: Any) -> Path:
    with recording_writer(path, {**HEADER, **changes}) as writer:
        for record in records:
            writer.append(record.as_line())
    return path


def refused(call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(ConfigError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


# -- our own format ----------------------------------------------------------------------------------------------------


def test_round_trip(tmp_path: Path) -> None:
    recording = Recording.load(write(tmp_path / "r.jsonl"))
    assert list(recording.records) == RECORDS
    assert (recording.vocab_size, recording.eos, recording.model) == (50, frozenset({0}), "tiny")
    assert recording.params == {"max_new_tokens": 8, "stop": ["x", "yz"], "logit_bias": [[3, 1.5]]}
    assert recording.settings == HEADER["settings"] and recording.provenance == {"time": "now"}
    assert recording.greedy and recording.num_tokens == 4
    assert not Recording.load(write(tmp_path / "s.jsonl", params={"temperature": 0.5})).greedy


def test_what_is_not_known_is_not_written(tmp_path: Path) -> None:
    _, line = (tmp_path / write(tmp_path / "r.jsonl", RECORDS[:1])).read_text().splitlines()
    assert json.loads(line) == {
        "id": "a",
        "prompt": [1, 2],
        "output": [3, 4, 5],
        "finish_reason": "stop",
        "category": "chat",
    }


def test_going_on_reads_what_is_there(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", RECORDS[:1])
    with recording_writer(path, {**HEADER, "provenance": {"time": "later"}}) as writer:
        assert [line["id"] for line in writer.lines] == ["a"]
        writer.append(RECORDS[1].as_line())
    assert list(Recording.load(path).records) == RECORDS


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_killed_writer_loses_its_last_line_alone(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "r.jsonl")
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [r.id for r in Recording.load(path).records] == ["a"], "a reader does not wait for the writer"
    with recording_writer(path, HEADER) as writer:
        assert [line["id"] for line in writer.lines] == ["a"]
        writer.append(RECORDS[1].as_line())
    assert path.read_bytes() == whole


def test_a_writer_killed_in_its_header_begins_anew(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl")
    whole = path.read_bytes()
    for size in (0, 1, 5, 20, 40, len(whole.split(b"\n")[0])):
        path.write_bytes(whole[:size])
        assert write(path).read_bytes() == whole


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    """Naming a wrong file costs nothing, whether or not its last line is complete."""
    path = tmp_path / "mine"
    other = json.dumps({"format": "foresay-results", "version": 1}).encode()
    for data in (b'{"1_2": "1_2_3"}', b"two lines\nof notes", b"x", other + b"\nhalf a l", b'{"a": 1}\nhalf'):
        path.write_bytes(data)
        with pytest.raises(ConfigError):
            write(path)
        assert path.read_bytes() == data


def test_another_header_keeps_an_unfinished_line(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl")
    path.write_bytes(data := path.read_bytes()[:-3])
    refused(lambda: write(path, model="other"), "model")
    assert path.read_bytes() == data


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, 'was started with model="tiny", and this run has "other"'),
        ({"vocab_size": 51}, "was started with vocab_size=50, and this run has 51"),
        ({"params": {**HEADER["params"], "max_new_tokens": 9}}, "with params.max_new_tokens=8, and this run has 9"),
        ({"params": {"max_new_tokens": 8, "stop": ["x", "yz"]}}, "params.logit_bias=[[3, 1.5]], and this run has null"),
        ({"settings": {"chat": True, "dtype": "bfloat16"}}, 'settings.dtype="float32", and this run has "bfloat16"'),
        ({"tokenizer": "abc"}, 'tokenizer=null, and this run has "abc"'),
        ({"more": 1}, "more=null, and this run has 1"),
    ],
)
def test_another_header_names_what_differs(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "r.jsonl")
    refused(lambda: write(path, **changes), message, "give the same settings to resume it, or name another file")
    assert len(Recording.load(path).records) == 2


def test_a_header_alone_is_no_beginning(tmp_path: Path) -> None:
    """As a run leaves it that was refused before its first line: there is nothing to lose."""
    path = write(tmp_path / "r.jsonl", [])
    write(path, model="other")
    recording = Recording.load(path)
    assert recording.model == "other" and list(recording.records) == RECORDS


def test_tuples_and_number_keys_are_the_same_settings(tmp_path: Path) -> None:
    """A header goes through JSON: values that are equal there do not differ."""
    path = write(tmp_path / "r.jsonl", params={"stop": ("a",), "logit_bias": {5: 1.0}})
    write(path, [], params={"stop": ["a"], "logit_bias": {"5": 1.0}})
    assert len(Recording.load(path).records) == 2


def test_two_writers_at_once(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with recording_writer(path, HEADER) as writer:
        refused(lambda: write(path), f"another process is writing {str(path)!r}")
        writer.append(RECORDS[0].as_line())
        assert len(Recording.load(path).records) == 1, "reading is allowed"
    write(path, RECORDS[1:])
    assert list(Recording.load(path).records) == RECORDS


def test_a_line_is_there_whole_when_append_returns(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    with recording_writer(path, HEADER) as writer:
        for i in range(3):
            writer.append(Record(str(i), (1,), (2,)).as_line())
            assert path.read_bytes().endswith(b"}\n") and path.read_bytes().count(b"\n") == i + 2
        with pytest.raises(ValueError, match="not JSON compliant"):
            writer.append({"law": [float("nan")]})
        assert path.read_bytes().count(b"\n") == 4, "nothing of a line that cannot be written"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 3: not JSON"),
        ("", "line 3: not JSON"),
        ("[1]", "line 3: not an output: it should be an object, not [1]"),
        ('{"id": "a", "prompt": [1], "output": [2]}', "line 3: id='a' is not unique"),
        ('{"prompt": [1], "output": [2]}', "line 3: not an output: id: field required"),
        (
            '{"id": "c", "prompt": [1], "output": [2], "colour": 3}',
            "line 3: not an output: colour: unexpected keyword argument, not 3",
        ),
        ('{"id": "c", "prompt": [1]}', "line 3: not an output: output: field required"),
        (
            '{"id": "c", "prompt": [], "output": [2]}',
            "line 3: not an output: prompt should have at least 1 item, not []",
        ),
        ('{"id": "c", "prompt": [1], "output": [50]}', "line 3: token 50 of output must be in [0, 49]"),
        (
            '{"id": "c", "prompt": [1], "output": [true]}',
            "line 3: not an output: output.0 should be a valid integer, not true",
        ),
        (
            '{"id": "c", "prompt": [-1], "output": [1]}',
            "line 3: not an output: prompt.0 should be greater than or equal to 0, not -1",
        ),
        (
            '{"id": "c", "prompt": [1], "output": [1], "source": []}',
            "line 3: not an output: source should have at least 1 item",
        ),
        (
            '{"id": "c", "prompt": [1], "output": [1], "finish_reason": "bored"}',
            "line 3: not an output: finish_reason: 'bored' is not a valid",
        ),
        (
            '{"id": "c", "prompt": [1], "output": [1, 2], "token_probs": [0.5]}',
            "line 3: token_probs has 1 values for 2 tokens",
        ),
        (
            '{"id": "c", "prompt": [1], "output": [1], "logprobs": ["a"]}',
            "line 3: not an output: logprobs.0 should be a valid number, not",
        ),
        ('{"id": "c", "prompt": [1], "output": [1], "top": [[1]]}', "line 3:"),
    ],
)
def test_malformed_lines_are_named_by_number(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path / "r.jsonl", RECORDS[:1])
    path.write_text(path.read_text() + line + "\n" + '{"id": "z", "prompt": [1], "output": [2]}\n')
    refused(lambda: Recording.load(path), str(path), message)


def test_wrong_headers(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"

    def header(**values: Any) -> Path:
        path.write_text(json.dumps(values) + "\n" + '{"id": "z", "prompt": [1], "output": [2]}\n')
        return path

    ours = {"format": "foresay-recording", "version": 1, "vocab_size": 5}
    assert Recording.load(header(**ours)).vocab_size == 5
    for values, message in [
        (
            {"format": "foresay-results", "version": 1},
            'not a foresay-recording; its header has format="foresay-results"',
        ),
        ({**ours, "version": 2}, "line 1: version=2 of foresay-recording; this foresay reads version 1"),
        (
            {**ours, "vocab_size": None},
            "line 1: not a header of a recording: vocab_size should be a valid integer, not null",
        ),
        ({**ours, "eos": 5}, "line 1:"),
        (
            {**ours, "eos": [-1]},
            "line 1: not a header of a recording: eos.0 should be greater than or equal to 0, not -1",
        ),
        ({**ours, "params": [1]}, "line 1: not a header of a recording: params should be an object, not [1]"),
        ({**ours, "settings": 3}, "line 1: not a header of a recording: settings should be an object, not 3"),
    ]:
        refused(lambda values=values: Recording.load(header(**values)), message)  # type: ignore[misc]
    write_other = lambda: results_writer(path, {}, {})  # noqa: E731
    header(**ours)
    refused(write_other, "not a foresay-results")


def test_files_that_are_no_recordings(tmp_path: Path) -> None:
    path = tmp_path / "x"
    refused(lambda: Recording.load(path), f"cannot read {str(path)!r}: No such file or directory")
    refused(lambda: Recording.load(tmp_path), "Is a directory")
    for data in (b"", b"hello", b"[1, 2]", b"\xff\xfe"):
        path.write_bytes(data)
        refused(lambda: Recording.load(path), "is not a recording: neither foresay-recording")
    path.write_text(json.dumps({"format": "foresay-recording", "version": 1, "vocab_size": 5}) + "\n")
    refused(lambda: Recording.load(path), "the recording contains no outputs yet")
    refused(lambda: Recording.load(write(tmp_path / "r"), prompts=[[1]]), "contains its own prompts")
    refused(lambda: LineWriter(tmp_path / "no" / "such", "kind", 1, {}), "cannot write", "No such file or directory")
    refused(lambda: read_lines(tmp_path / "none", "kind", 1, ANY).__enter__(), "cannot read")
    path.write_bytes(b"")
    refused(lambda: read_lines(path, "kind", 1, ANY).__enter__(), "is empty, not a kind")


# -- logs of tensors ---------------------------------------------------------------------------------------------------

LOG = """tensor([[ 5,  6,
          7]])
tensor([[8, 9]], device='cuda:0')
tensor([[1,
         2,

         3, 4]])
"""


def test_a_log_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(LOG)
    recording = Recording.load(path, prompts=[[1], [2, 3], [4]])
    assert [r.output for r in recording.records] == [(5, 6, 7), (8, 9), (1, 2, 3, 4)]
    assert [(r.id, r.prompt) for r in recording.records] == [("1", (1,)), ("2", (2, 3)), ("3", (4,))]
    assert recording.vocab_size == 10 and recording.greedy and recording.settings == {"read_from": "tensor log"}
    fewer = Recording.load(path, prompts=[[1], [2, 30], [4], [40]])
    assert len(fewer.records) == 3 and fewer.vocab_size == 31, "a run that was stopped early"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor([[1, 2]])\n\ntensor([[3,\n ..., 4]])\n", "line 3: the tensor was printed abbreviated ('...')"),
        ("tensor([[1, 2.5]])\n", "line 1: not a list of token ids"),
        ("tensor([[1, 2]])\ntensor([[-3]])\n", "line 2: not a list of token ids (token=-3"),
        ("tensor([[1, 2]])\ntensor([[]])\n", "line 2: the output is empty"),
        ("tensor(5)\n", "contains no outputs"),
        (LOG, "contains 3 outputs for 2 prompts"),
    ],
)
def test_logs_that_cannot_be_read(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log.txt"
    path.write_text(text)
    refused(lambda: Recording.load(path, prompts=[[1], [2]]), message)


def test_a_log_needs_its_prompts(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    path.write_text(LOG)
    refused(lambda: Recording.load(path), "is a log of tensors, which contains outputs alone; give the prompts")


# -- CS-Drafting's cache -----------------------------------------------------------------------------------------------


def cache(tmp_path: Path, pairs: Any) -> Path:
    path = tmp_path / "cache.json"
    path.write_text(json.dumps(pairs))
    return path


def test_a_cache_of_a_decoder_only_target(tmp_path: Path) -> None:
    recording = Recording.load(cache(tmp_path, {"1_2": "1_2_3_4", "9": "9_8"}))
    assert [(r.prompt, r.output, r.source) for r in recording.records] == [((1, 2), (3, 4), None), ((9,), (8,), None)]
    assert recording.vocab_size == 10 and recording.settings == {"read_from": "CS-Drafting cache"}


def test_a_cache_of_an_encoder_decoder(tmp_path: Path) -> None:
    recording = Recording.load(cache(tmp_path, {"5_6_7": "0_3_4", "8": "0_2"}))
    assert [(r.prompt, r.output, r.source) for r in recording.records] == [
        ((0,), (3, 4), (5, 6, 7)),
        ((0,), (2,), (8,)),
    ]
    assert recording.vocab_size == 9, "sources count"


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ({"1_2": "1_2_3", "5_6": "0_7"}, "mixes outputs that begin with their prompts and outputs that do not"),
        ({"1_2": "1_2"}, "entry 1: the output is empty"),
        ({"1_2": "1_2_3", "4": "0"}, "entry 2: the output is empty"),
        ({"1_x": "1_2"}, "entry 1: must be token ids joined by '_'"),
        ({"1": "1_-2"}, "entry 1: must be token ids joined by '_' (token=-2"),
        ({"1": ""}, "entry 1: must be token ids"),
        ({"1": [1, 2]}, "1 should be a valid string, not [1, 2]"),
        ({}, "contains no outputs"),
    ],
)
def test_caches_that_cannot_be_read(tmp_path: Path, pairs: Any, message: str) -> None:
    refused(lambda: Recording.load(cache(tmp_path, pairs)), message)


def test_a_cache_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "cache.json"
    for data in (b'{"1": "1_2"', b'{"1": "\xff"}'):
        path.write_bytes(data)
        refused(lambda: Recording.load(path), "not JSON")


# -- a recording as a model --------------------------------------------------------------------------------------------


def test_a_recording_as_a_model_says_what_came_next() -> None:
    texts = [RecordedText([1, 2], [3, 4, 5]), RecordedText([7], [8])]
    model = RecordingModel(texts, 10)
    rows = [make_row([1, 2]), make_row([7])]
    rows[1].request_id = 1
    store = model.new_cache()
    model.admit(Rows(rows), 0, store)
    assert store.lengths == [0, 0]
    assert model.forward(ModelInput(torch.tensor([[1]]), [1], logits=Logits.NONE), store).token_ids is None
    assert store.lengths == [1, 0]
    fed = torch.tensor([[2, 3, 4], [7, 0, 0]])
    out = model.forward(ModelInput(fed, [3, 1]), store)
    assert out.logits is None and out.token_ids is not None
    assert out.token_ids[0].tolist() == [3, 4, 5] and out.token_ids[1, 0] == 8
    assert store.lengths == [4, 1]
    store.truncate([2, 0])
    last = model.forward(ModelInput(fed, [2, 1], logits=Logits.LAST), store)
    assert last.token_ids is not None and last.token_ids.tolist() == [[5], [8]]
    assert model.forward(ModelInput(fed, [0, 0], logits=Logits.NONE), store).token_ids is None
    store.rearrange([(1, 0)], 1)
    assert store.lengths == [1] and store.texts.tolist() == [1]


def test_a_recording_as_a_model_refuses() -> None:
    refused(lambda: RecordingModel([], 5), "nothing to replay")
    model = RecordingModel([RecordedText([1, 2], [3])], 5)
    for row in (make_row([1, 3]), make_row([1])):
        refused(
            lambda row=row: model.admit(Rows([row]), 0, model.new_cache()), "request 0 is not the recording's text 0"
        )
    other = make_row([1, 2])
    other.request_id = 1
    refused(lambda: model.admit(Rows([other]), 0, model.new_cache()), "request 1 is not")
    store = model.new_cache()
    model.admit(Rows([make_row([1, 2])]), 0, store)
    refused(lambda: model.forward(ModelInput(torch.tensor([[2]]), [1], hidden_layers=(1,)), store), "no hidden states")
    assert store.lengths == [0] and np.array_equal(store.texts, [0])


# -- results -----------------------------------------------------------------------------------------------------------

CELL = Cell("suffix, 12", "chat", 1)
STEPS = [
    Step(
        0,
        (1, 2, 3),
        (Origin.DRAFT, Origin.DRAFT, Origin.RESIDUAL),
        4,
        2,
        (1, 1, 1),
        draft_s=0.2,
        target_s=0.4,
        total_s=0.8,
    ),
    Step(0, (4,), (Origin.BONUS,), 0, 0, (), FinishReason.STOP, batch_size=2, target_s=0.1, total_s=0.2),
]


def test_a_prompts_record_by_the_published_names() -> None:
    one = PromptResult.of("a", "chat", STEPS)
    assert (one.generated_length, one.num_accepted) == (4, 2)
    assert (one.num_LM_call, one.num_mismatched_tokens, one.num_drafted, one.num_tested) == (2, 2, 4, 3)
    assert (one.spec_time, one.target_s, one.draft_s) == pytest.approx((0.9, 0.45, 0.2))
    alone = {"target_time", "draft_time", "generated_length_target", "generated_length_draft"}
    assert alone.isdisjoint(vars_of_result(one)), "in the source, those of the target and the draft model alone"
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
        writer.append(
            {"kind": "failed", "cell": {"method": "x", "dataset": "d", "batch_size": 2}, "repeat": 0, "error": "e"}
        )
        writer.append({"kind": "prediction", "cell": vars_of(CELL), "tokens_per_s": 5.0, "tokens_per_pass": 2.0})
        writer.append({"kind": "trace", "cell": vars_of(CELL), "id": "a", "pieces": [["hi", "draft"]]})
    results = Results.load(path)
    assert results.runs == [run, whole] and (run.tokens_per_s, run.speed_up, whole.speed_up) == (5, 2, None)
    assert results.by_cell() == {CELL: [run, whole]}
    assert results.predictions == [Prediction(CELL, 5.0, 2.0)]
    assert str(results.failures[0].cell) == "x on d, batch 2, greedy"
    assert results.traces[0].pieces == (("hi", "draft"),)
    for bad in ('{"kind": "runs", "cell": {"method": "x", "dataset": "d", "batch_size": 2}}', '{"kind": "run"}', "{}"):
        damaged = tmp_path / "bad.jsonl"
        damaged.write_text(path.read_text() + bad + "\n")
        refused(lambda damaged=damaged: Results.load(damaged), "line 7: not a result")


def vars_of_result(one: PromptResult) -> set[str]:
    return {field.name for field in dataclasses.fields(one)}


def vars_of(cell: Cell) -> dict[str, Any]:
    return {name: getattr(cell, name) for name in ("method", "dataset", "batch_size", "sampling")}


# -- stats ---------------------------------------------------------------------------------------------------------------


@st.composite
def a_step(draw: st.DrawFn) -> Step:
    drafted = draw(st.integers(0, 6))
    accepted = draw(st.integers(0, drafted))
    origins = [Origin.DRAFT] * accepted + [Origin.RESIDUAL if accepted < drafted else Origin.BONUS]
    kept = draw(st.integers(1, len(origins)))
    seconds = st.floats(0, 10, allow_nan=False)
    return Step(
        *(0, (1,) * kept, tuple(origins[:kept]), drafted, accepted, (1,) * min(accepted + 1, drafted)),
        batch_size=draw(st.integers(1, 8)),
        draft_s=draw(seconds),
        target_s=draw(seconds),
        total_s=draw(seconds),
    )


@given(st.lists(a_step(), max_size=12))
def test_stats_from_dict_undoes_as_dict(steps: list[Step]) -> None:
    stats = Stats.of(steps)
    written = json.loads(json.dumps(stats.as_dict()))
    again = Stats.from_dict(written)
    assert again.as_dict() == stats.as_dict() == written
    assert {name: getattr(again, name) for name in Stats.__slots__ if name != "origins"} == {
        name: getattr(stats, name) for name in Stats.__slots__ if name != "origins"
    }
    assert +again.origins == +stats.origins
    again.merge(stats)
    assert again.num_tokens == 2 * stats.num_tokens and again.accepted_at == stats.accepted_at + stats.accepted_at


def test_a_dict_that_lacks_a_count_is_no_stats() -> None:
    values = Stats.of(STEPS).as_dict()
    for name in ("num_passes", "origins", "tested_at"):
        with pytest.raises(KeyError, match=re.escape(name)):
            Stats.from_dict({key: value for key, value in values.items() if key != name})
