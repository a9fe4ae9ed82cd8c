"""Files that are made to harm: what their numbers request is compared with what they hold before anything is allocated."""

from __future__ import annotations

import functools
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foresay.drafters.ngram_table import NgramTable
from foresay.errors import ConfigError, ForesayError, ModelLoadError
from foresay.lengths.acceptance_head import AcceptanceHead
from foresay.models.recording import RecordedText, RecordingModel
from foresay.records.recording import Recording
from foresay.records.results import Results
from foresay.spec.settings_file import read_settings
from foresay_lab.data.datasets import load_items
from foresay_lab.replay.arrivals import from_trace
from foresay_lab.replay.grid import open_grid
from foresay_lab.training.accepted import load_examples
from helpers import fuzz_formats, tables


def refusal(call: Callable[[], object], kind: type[ForesayError] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(found: str, message: str) -> bool:
    """True if an error contains a message, whose "field should be ..." has the field with its value."""
    field, should, rest = message.partition(" should be")
    return (
        re.search(f"{re.escape(field)}=.*{should}{re.escape(rest)}" if should else re.escape(message), found)
        is not None
    )


def test_a_long_text_does_not_widen_the_others() -> None:
    texts = [RecordedText([1], [2])] * 20_000 + [RecordedText([1], [3] * 200_000)]
    model = RecordingModel(texts, 10)
    assert sum(a.nbytes for a in vars(model).values() if isinstance(a, np.ndarray)) < 5e6


def logged(path: Path) -> Recording:
    return Recording.load(path, prompts=[[1]] * 200_000)


def kept(path: Path) -> None:
    """Open replays after the header that a sound file has."""
    lines = path.read_text()
    path.unlink()
    with open_grid(path, {}):
        pass
    path.write_text(path.read_text() + lines)
    with open_grid(path, {}):
        pass


def recorded(line: Any = None, **header: Any) -> str:
    """A recording with other fields in its header, or in its line, which may be another text."""
    first = {"format": "foresay-recording", "version": 1, "vocab_size": 50, **header}
    fields = {"id": "a", "prompt": [1], "output": [2]}
    text = line if isinstance(line, str) else json.dumps(fields | (line or {})).replace("Infinity", "1e999")
    return f"{json.dumps(first)}\n{text}\n"


RESULTS = '{"format": "foresay-results", "version": 2, "settings": '
TEXTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "brackets after a log": ("tensor([[" * 300_000 + "1]])\n", logged, "line 1: not a list of token ids"),
    "brackets in a log": ("tensor([[" + "[" * 1_000_000 + "]])", logged, "line 1: not a list of token ids"),
    "digits in a log": ("tensor([[" + "9" * 30 + "]])", logged, "must be an integer in [0, 16777215]"),
    "a log without tokens": ("tensor([[7]])\n" * 100_000 + "tensor([[...]])\n", logged, "line 100001: the tensor was printed"),
    "an id": (recorded({"id": {}}), Recording.load, "id should be a valid string"),
    "a seed": (recorded({"seed": -1}), Recording.load, "seed should be greater than or equal to 0"),
    "infinity": (recorded({"logprobs": [float("inf")]}), Recording.load, "logprobs.0 should be a finite number"),
    "brackets": (recorded('{"id": "a", "prompt": ' + "[" * 100_000), Recording.load, "recursion limit exceeded"),
    "a parameter": (recorded(params={"heat": 1}), Recording.load, "params: parameter='heat' is unknown"),
    "a share": (recorded(params={"top_p": 7}), Recording.load, "params: top_p=7 must be"),
    "a mapping": (recorded(params={"logit_bias": 3}), Recording.load, "params: logit_bias=3 must map"),
    "a vocabulary": (recorded(vocab_size=10**18), Recording.load, "vocab_size should be less than"),
    "a model": (recorded(model=[]), Recording.load, "model should be a valid string"),
    "results in brackets": (RESULTS + "[" * 100_000 + "\n", Results.load, "line 1 is not JSON: recursion limit exceeded"),
    "results of a list": (RESULTS + "[1]}\n", Results.load, "line 1: settings=[1] must be an object"),
    "no replay": ('{"method": {}}\n', kept, "line 2: recording: not a replay: field required"),
    "settings in brackets": ("target = " + "[" * 50_000, read_settings, "not valid TOML"),
    "a number as settings": ("target = " + "9" * 5000, read_settings, "not valid TOML"),
    "large settings": ('target = "x"\n' + "#" * (1 << 20), read_settings, "is larger than 1048576 bytes"),
    "a late arrival": ("1" + "0" * 400, from_trace, "neither seconds nor an object with a timestamp in seconds"),
    "arrivals in brackets": ("[" * 100_000, from_trace, "neither seconds nor an object with a timestamp in seconds"),
    "a late timestamp": ('{"timestamp": 1' + "0" * 400 + "}", from_trace, "neither seconds nor an object with a timestamp"),
    "many columns": (",".join(f"c{i}" for i in range(200_000)) + ",c7\n", lambda path: load_items(str(path)),
        "the header row has the column 'c7' twice"),
}  # fmt: skip
"""Files of text, what reads them, and what it answers."""


@pytest.mark.parametrize("case", TEXTS)
def test_texts_that_are_refused(tmp_path: Path, case: str) -> None:
    """Each is read once: brackets that nothing closes made the time a square of the file's size."""
    text, read, message = TEXTS[case]
    path = tmp_path / ("a.csv" if case == "many columns" else "a.jsonl")
    path.write_text(text)
    assert names(refusal(lambda: read(path)), message)


def test_a_log_with_a_rest_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("tensor([[1, 2]])\n" + "tensor([[" * 300_000)
    assert Recording.load(tmp_path / "log.txt", prompts=[[1]]).records[0].output == (1, 2)


HEAD, WEIGHTS, MOMENTS = "config.json", "model.safetensors", "optimiser.safetensors"
NAMES = "tokenizer_config.json"
ROPE = "rope_parameters"
PARTS: list[tuple[str, str, dict[str, Any], str]] = [
    ("profile", "file", {"timings.0.seconds": "1"}, "timings.0.seconds should be a valid number"),
    ("profile", "file", {"timings.0.columns": 0}, "timings.0.columns should be greater than or equal to 1"),
    ("profile", "file", {"floor.bytes_per_s": 0}, "floor.bytes_per_s should be greater than or equal to 1"),
    ("profile", "file", {"fills.1": [32, 0.5]}, "fills has two times for the same point"),
    ("profile", "file", {"drafts.suffix.1": [1, 4, 0.5]}, "drafts.suffix has two times for the same point"),
    ("profile", "file", {"token_bytes": None}, "token_bytes should be a valid number"),
    ("profile", "file", {"ragged": "no"}, "ragged should be a valid boolean"),
    ("profile", "file", {"machine": 3}, "machine should be"),
    ("profile", "file", {"model": ["x"]}, "model should be a valid string"),
    ("head", HEAD, {"hidden_size": "16"}, "hidden_size should be a valid integer"),
    ("head", HEAD, {"hidden_size": 2**40}, "hidden_size should be less than or equal to"),
    ("head", HEAD, {"head_dim": 3}, "head_dim should be a multiple of 2"),
    ("head", HEAD, {"num_key_value_heads": 0}, "num_key_value_heads should be greater than or equal to 1"),
    ("head", HEAD, {"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
    ("head", HEAD, {"rms_norm_eps": "x"}, "rms_norm_eps should be a valid number"),
    ("head", HEAD, {"hidden_act": "gelo"}, "activation='gelo' is unknown. Did you mean 'gelu'?"),
    ("head", HEAD, {"rope_theta": 0}, "rope_theta should be greater than 0"),
    ("head", HEAD, {"rope_scaling": {"rope_type": "spiral"}}, "rope_scaling.rope_type should be"),
    ("head", HEAD, {"rope_scaling": {"rope_type": "linear"}}, "factor"),
    ("head", HEAD, {ROPE: {"rope_type": "default", "partial_rotary_factor": 1e9}}, "partial_rotary_factor should be"),
    ("head", HEAD, {"max_position_embeddings": -1}, "max_position_embeddings should be"),
    ("head", HEAD, {"vocab_size": [40]}, "vocab_size should be a valid integer"),
    ("head", HEAD, {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a"]}}, "layer_ids=['a'] must be numbers of layers"),
    ("head", HEAD, {"target_hidden_size": 1.5}, "target_hidden_size should be a valid integer"),
    ("head", WEIGHTS, {"fc.weight": torch.zeros(16)}, "has no fc.weight [out, in] whose `in` is a multiple of 12"),
    ("head", WEIGHTS, {"fc.weight": torch.zeros(16, 0)}, "has no fc.weight [out, in] whose `in` is a multiple of 12"),
    ("head", WEIGHTS, {"norm.weight": torch.zeros(16, 1)}, "is [16, 1], and its config.json gives [16]"),
    ("head", WEIGHTS, {"norm.weight": torch.zeros(16).long()}, "is I64, and weights are floating-point numbers"),
    ("head", WEIGHTS, {"d2t": torch.zeros(3).long()}, "d2t must be integer offsets of 10 ascending token ids below 40"),
    ("head", WEIGHTS, {"d2t": torch.zeros(10)}, "d2t must be integer offsets of 10 ascending token ids below 40"),
    ("checkpoint", "state.json", {"step": "3"}, "step should be a valid integer"),
    ("checkpoint", "state.json", {"plan": []}, "plan should be an object"),
    ("checkpoint", "weights.safetensors", {"bias": torch.zeros(3)}, "bias of weights.safetensors is [3], and the draft has [2]"),
    ("checkpoint", "weights.safetensors", {"more": torch.zeros(3)}, "has more, which it should not have"),
    ("checkpoint", MOMENTS, {"0.0.exp_avg": torch.zeros(())}, "'0.0.exp_avg' of shape [], which fits no"),
    ("checkpoint", MOMENTS, {"0.0.exp_avg": torch.zeros(7)}, "'0.0.exp_avg' of shape [7], which fits no"),
    ("checkpoint", MOMENTS, {"0.9.exp_avg": torch.zeros(2)}, "disagree about '0.9.exp_avg'"),
    *(("tokenizer", NAMES, {"model_max_length": one}, "cannot be loaded: TypeError") for one in ("long", [1], {})),
]  # fmt: skip
"""Formats, their files, fields or tensors that no sound one has, and what their readers answer."""


@pytest.mark.parametrize(("kind", "file", "changes", "message"), PARTS, ids=range(len(PARTS)))
def test_parts_that_no_sound_file_has(
    tmp_path: Path, kind: str, file: str, changes: dict[str, Any], message: str
) -> None:
    for name, data in fuzz_formats.SOUND[kind]().items():
        (tmp_path / name).write_bytes(data)
    path, read = tmp_path / file, fuzz_formats.FORMATS[kind].check
    read(tmp_path)
    if path.suffix == ".safetensors":
        save_file(load_file(path) | changes, path)
    else:
        values = json.loads(path.read_text())
        for field, value in changes.items():
            *keys, last = [int(key) if key.isdigit() else key for key in field.split(".")]
            functools.reduce(lambda inside, key: inside[key], keys, values)[last] = value
        path.write_text(json.dumps(values))
    found = refusal(lambda: read(tmp_path), ForesayError)
    assert names(found, message)
    assert kind != "checkpoint" or found.endswith("remove it to start again")


def test_a_gzip_file_that_unpacks_to_far_more(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * (1 << 27)))
    assert path.stat().st_size < 200_000
    assert "unpacks to more than 67108864 bytes" in refusal(lambda: load_items(str(path)))
    path.write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 100_000))
    assert len(load_items(str(path))) == 100_000, "repetitions pack well too"


def test_nothing_is_allocated_for_a_head_that_does_not_fit(tmp_path: Path) -> None:
    """200,000 numbers of an output layer request three blocks of 160 GB."""
    save_file({"out.weight": torch.zeros(2, 200_000)}, tmp_path / "model.safetensors")
    blocks = {f"blocks.{i}.weight": torch.zeros(1) for i in range(3)}
    assert AcceptanceHead.load(tmp_path).hidden_size == 200_000
    save_file({"out.weight": torch.zeros(2, 200_000), **blocks}, tmp_path / "model.safetensors")
    assert "lacks blocks.0.bias" in refusal(lambda: AcceptanceHead.load(tmp_path), ModelLoadError)
    for text in ("[" * 100_000, "null", '{"blocks": -1}', '{"blocks": true}'):
        (tmp_path / "config.json").write_text(text)
        assert "config.json" in refusal(lambda: AcceptanceHead.load(tmp_path), ModelLoadError)


def test_a_table_of_a_shape_that_numpy_cannot_have(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    tables.small(counts=None).save(path)
    size = int.from_bytes(path.read_bytes()[:8], "little")
    header, data = json.loads(path.read_bytes()[8 : 8 + size]), path.read_bytes()[8 + size :]
    header["counts"] = {"dtype": "I64", "shape": [0, 2**60, 7], "data_offsets": [len(data), len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    assert "not a valid safetensors file: array is too big" in refusal(lambda: NgramTable.load(path), ModelLoadError)


def test_data_for_an_acceptance_head(tmp_path: Path) -> None:
    sound = {"hidden": torch.zeros(3, 2), "labels": torch.zeros(3), "reached": torch.zeros(3)}
    sound["drafted"] = torch.zeros(3, dtype=torch.int64)
    save_file(sound, tmp_path / "a.safetensors")
    assert len(load_examples(tmp_path)[0]) == 3
    for name, tensor, message in (
        ("labels", torch.zeros(3, 1), "labels [N], hidden [N, H]"),
        ("reached", torch.zeros(2), "reached of it is [2], and its labels give [3]"),
        ("drafted", torch.zeros(3), "drafted must have 3 integers"),
    ):
        save_file(sound | {name: tensor}, tmp_path / "a.safetensors")
        assert message in refusal(lambda: load_examples(tmp_path))
