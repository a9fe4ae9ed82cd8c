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
from foresay.models.drafts.base import StoredDraft
from foresay.models.drafts.config import HeadConfig
from foresay.models.drafts.files import read_draft, write_draft
from foresay.models.drafts.head import HeadModule
from foresay.models.recording import RecordedText, RecordingModel
from foresay.models.sources.loading import load_tokenizer
from foresay.records.profile import Floor, Profile, Timing
from foresay.records.recording import Recording
from foresay.records.results import Results
from foresay.spec.settings_file import read_settings
from foresay_lab.data.datasets import load_items
from foresay_lab.replay.arrivals import from_trace
from foresay_lab.replay.grid import open_grid
from foresay_lab.training.accepted import load_examples
from foresay_lab.training.checkpoints import State, load_checkpoint, save_checkpoint
from helpers import tables, tiny


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


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("timings.0.seconds", "1", "timings.0.seconds should be a valid number"),
        ("timings.0.columns", 0, "timings.0.columns should be greater than or equal to 1"),
        ("floor.bytes_per_s", 0, "floor.bytes_per_s should be greater than or equal to 1"),
        ("fills.1", [32, 0.5], "fills has two times for the same point"),
        ("drafts.suffix.1", [1, 4, 0.5], "drafts.suffix has two times for the same point"),
        ("token_bytes", None, "token_bytes should be a valid number"),
        ("ragged", "no", "ragged should be a valid boolean"),
        ("machine", 3, "machine should be"),
        ("model", ["x"], "model should be a valid string"),
    ],
)
def test_profiles_of_other_types(tmp_path: Path, field: str, value: Any, message: str) -> None:
    path = tmp_path / "p.json"
    timings = tuple(Timing(1, c, 8, 0.1, 0.1, 0.1) for c in (1, 5))
    made = Profile("tiny", "float32", {}, timings, ((32, 0.1), (64, 0.2)), Floor(100, 10, 1e9))
    made.with_drafts("suffix", [(1, 4, 0.1), (2, 4, 0.1)], 0.1).save(path)
    values = json.loads(path.read_text())
    *keys, last = [int(key) if key.isdigit() else key for key in field.split(".")]
    part = functools.reduce(lambda inside, key: inside[key], keys, values)
    part[last] = value
    path.write_text(json.dumps(values))
    assert names(refusal(lambda: Profile.load(path)), message)


def test_a_gzip_file_that_unpacks_to_far_more(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n" * (1 << 27)))
    assert path.stat().st_size < 200_000
    assert "unpacks to more than 67108864 bytes" in refusal(lambda: load_items(str(path)))
    path.write_bytes(gzip.compress(b'{"prompt": "x"}\n' * 100_000))
    assert len(load_items(str(path))) == 100_000, "repetitions pack well too"


LAYER = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 24}


@pytest.fixture
def head(tmp_path: Path) -> Path:
    sizes: dict[str, Any] = {"vocab_size": 40, "draft_vocab_size": 40, "target_hidden_size": 16}
    config = HeadConfig(layer=LAYER, **sizes, hidden_layers=(0, 1, 2), norm_before_residual=False, target="tiny")
    write_draft(StoredDraft(config, HeadModule(config, 3), None), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "16"}, "hidden_size should be a valid integer"),
        ({"hidden_size": 2**40}, "hidden_size should be less than or equal to"),
        ({"head_dim": 3}, "head_dim should be a multiple of 2"),
        ({"num_key_value_heads": 0}, "num_key_value_heads should be greater than or equal to 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3 must divide num_attention_heads=4"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps should be a valid number"),
        ({"hidden_act": "gelo"}, "activation='gelo' is unknown. Did you mean 'gelu'?"),
        ({"rope_theta": 0}, "rope_theta should be greater than 0"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_scaling.rope_type should be"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1e9}},
            "partial_rotary_factor should be",
        ),
        ({"max_position_embeddings": -1}, "max_position_embeddings should be"),
        ({"vocab_size": [40]}, "vocab_size should be a valid integer"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": ["a"]}}, "layer_ids=['a'] must be numbers of layers"),
        ({"target_hidden_size": 1.5}, "target_hidden_size should be a valid integer"),
    ],
)
def test_configurations_of_heads(head: Path, changes: dict[str, Any], message: str) -> None:
    values = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(values | changes))
    assert names(refusal(lambda: read_draft(head)), message)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("fc.weight", torch.zeros(16), "has no fc.weight [out, in] whose `in` is a multiple of 16"),
        ("fc.weight", torch.zeros(16, 0), "has no fc.weight [out, in] whose `in` is a multiple of 16"),
        ("norm.weight", torch.zeros(16, 1), r"is [16, 1], and its config.json gives [16]"),
        ("norm.weight", torch.zeros(16, dtype=torch.int64), "is I64, and weights are floating-point numbers"),
        ("d2t", torch.zeros(3, dtype=torch.int64), "d2t must be integer offsets of 40 ascending token ids below 40"),
        ("d2t", torch.zeros(40), "d2t must be integer offsets of 40 ascending token ids below 40"),
    ],
)
def test_weights_of_heads(head: Path, name: str, tensor: torch.Tensor, message: str) -> None:
    save_file(load_file(head / "model.safetensors") | {name: tensor}, head / "model.safetensors")
    assert message in refusal(lambda: read_draft(head), ModelLoadError)


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


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("state.json", {"step": "3"}, "step should be a valid integer"),
        ("state.json", {"plan": []}, "plan should be an object"),
        ("weights.safetensors", {"bias": torch.zeros(3)}, "bias of weights.safetensors is [3], and the draft has [2]"),
        ("weights.safetensors", {"more": torch.zeros(3)}, "has more, which it should not have"),
        ("optimiser.safetensors", {"0.0.exp_avg": torch.zeros(())}, "'0.0.exp_avg' of shape [], which fits no"),
        ("optimiser.safetensors", {"0.0.exp_avg": torch.zeros(7)}, "'0.0.exp_avg' of shape [7], which fits no"),
        ("optimiser.safetensors", {"0.9.exp_avg": torch.zeros(2)}, "disagree about '0.9.exp_avg'"),
    ],
)
def test_checkpoints_of_other_types(tmp_path: Path, file: str, changes: dict[str, Any], message: str) -> None:
    model = torch.nn.Linear(3, 2)
    optimiser = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimiser.step()
    save_checkpoint(tmp_path / "c", State(step=3), {"a": 1, "processes": 1}, model, [optimiser])
    path = tmp_path / "c" / file
    if path.suffix == ".json":
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    else:
        save_file(load_file(path) | changes, path)
    found = refusal(lambda: load_checkpoint(tmp_path / "c", {"a": 1, "processes": 1}, model, [optimiser]))
    assert names(found, message) and found.endswith("remove it to start again")


@pytest.mark.parametrize("length", ["long", [1], {}])
def test_a_tokenizer_that_cannot_encode(tmp_path: Path, length: Any) -> None:
    tiny.tokenizer().save_pretrained(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": length}))
    assert "cannot be loaded: TypeError" in refusal(lambda: load_tokenizer(tmp_path), ModelLoadError)
