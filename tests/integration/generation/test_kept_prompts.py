"""Beginnings of prompts in a folder: a later process copies them with the same bits, and reads nothing else."""

from __future__ import annotations

import errno
import json
import logging
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import foresay
from foresay.generation import kept_prompts
from foresay.generation.kept_prompts import MIN_TOKENS, KeptPrompts
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.drafts.files import write_draft
from foresay.models.huggingface.causal import CausalModel
from helpers import tiny
from helpers.families import make, make_seq2seq
from helpers.heads import random_head
from helpers.refusals import refused

PROMPT = [i * 7 % 250 for i in range(3 * MIN_TOKENS)]
ENDS = ([3, 5], [4, 4])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("model") / "llama", make("llama", vocab_size=264))


def answered(source: Any, folder: Path | None, prompt: Any = PROMPT, **options: Any) -> tuple[list[int], int]:
    """Output and number of prompt tokens that were copied, by a new process as far as the folder is concerned."""
    given = {name: options.pop(name) for name in ("drafter", "dtype", "keep_prompts_gb") if name in options}
    with foresay.load(source, **({"drafter": "none", "dtype": "fp32"} | given), keep_prompts=folder) as one:
        done = one.generate(prompt, max_new_tokens=12, **options)
    return done.token_ids, done.steps[0].num_cached


def _logprobs(source: Path, folder: Path | None) -> tuple[list[Any], int]:
    done = foresay.load(source, drafter="none", dtype="fp32", keep_prompts=folder).generate(PROMPT, logprobs=3)
    return [step.logprobs for step in done.steps], done.steps[0].num_cached


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


@pytest.fixture
def kept(model: Path, tmp_path: Path) -> tuple[Path, list[int]]:
    """A folder with one prompt, and its output."""
    folder = tmp_path / "kept"
    output, copied = answered(model, folder, keep_prompt=True)
    assert copied == 0 and len(files(folder)) == 1
    assert folder.stat().st_mode & 0o777 == 0o700 and files(folder)[0].stat().st_mode & 0o777 == 0o600
    return folder, output


def test_a_later_process_copies_what_an_earlier_one_computed(model: Path, kept: tuple[Path, list[int]]) -> None:
    """The prompt and others that begin alike; sampled output, too. Control: a folder of its own has nothing."""
    folder, output = kept
    assert answered(model, folder) == (output, len(PROMPT) - 1)
    (copied, some), (computed, none) = (_logprobs(model, one) for one in (folder, None))
    assert copied == computed and some > none == 0, "the same bits"
    sampled = {"temperature": 1.0, "seed": 3}
    longer = [*PROMPT, 9, 9]
    assert answered(model, folder, longer, **sampled) == (answered(model, None, longer, **sampled)[0], len(PROMPT))
    assert answered(model, folder, PROMPT[: 2 * MIN_TOKENS])[1] == 2 * MIN_TOKENS - 1
    assert answered(model, folder, [1, *PROMPT])[1] == 0 and len(files(folder)) == 1
    assert answered(model, folder.parent / "other") == (output, 0)


def test_a_beginning_is_kept_when_it_is_used_again(model: Path, tmp_path: Path) -> None:
    with foresay.load(model, drafter="none", dtype="fp32", keep_prompts=tmp_path) as one:
        one.generate(PROMPT, max_new_tokens=2)
        one.generate([[*PROMPT, *end] for end in ENDS], max_new_tokens=2)
    assert [len(load_file(path)["tokens"]) for path in files(tmp_path)] == [len(PROMPT)]


def test_a_kept_prompt_is_copied_once(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding waits for the copy that stays in memory alone; the file is written from it, and without one, from its own."""
    copied, honest = list[int](), SlotCache.save_prefix
    monkeypatch.setattr(SlotCache, "save_prefix", lambda self, row, n: (copied.append(n), honest(self, row, n))[1])
    for prefix_bytes, lengths in ((1 << 30, [len(PROMPT) + 11]), (0, [len(PROMPT)])):
        with foresay.load(model, drafter="none", dtype="fp32", keep_prompts=tmp_path / str(prefix_bytes)) as one:
            copied.clear()
            session = one.session(prefix_bytes=prefix_bytes)
            session.submit(PROMPT, foresay.SamplingParams(max_new_tokens=12, keep_prompt=True))
            while session.has_work:
                session.step()
        assert copied == lengths and len(files(tmp_path / str(prefix_bytes))) == 1


def test_nothing_else_is_read(model: Path, kept: tuple[Path, list[int]], tmp_path: Path) -> None:
    """Another salt, other weights under the same name, another dtype; and no more than the tokens in common."""
    folder, output = kept
    assert answered(model, folder, cache_salt="b") == (output, 0)
    assert answered(model, folder, dtype="bf16")[1] == 0
    before = {path: path.read_bytes() for path in model.iterdir() if path.is_file()}
    try:
        tiny.save(model, make("llama", 5, vocab_size=264))
        assert answered(model, folder)[1] == 0
    finally:
        for path, data in before.items():
            path.write_bytes(data)
    assert answered(model, folder)[1] == len(PROMPT) - 1


def _salts_are_equal(patch: pytest.MonkeyPatch) -> None:
    longest, keep = KeptPrompts.longest, KeptPrompts.keep
    patch.setattr(KeptPrompts, "longest", lambda self, salt, *given: longest(self, "", *given))
    patch.setattr(KeptPrompts, "keep", lambda self, salt, *given: keep(self, "", *given))


def _results_are_equal(patch: pytest.MonkeyPatch) -> None:
    make = KeptPrompts
    patch.setattr(kept_prompts, "KeptPrompts", lambda folder, most, identity, layout: make(folder, most, "", layout))


@pytest.mark.parametrize("breaks", [_salts_are_equal, _results_are_equal])
def test_a_key_that_lacks_a_part_is_found(
    breaks: Any, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls."""
    breaks(monkeypatch)
    output, _ = answered(model, tmp_path / "kept", keep_prompt=True)
    with pytest.raises(AssertionError):
        test_nothing_else_is_read(model, (tmp_path / "kept", output), tmp_path)


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "a bit":
        data[-5] ^= 4
    elif how == "cut":
        del data[len(data) // 2 :]
    elif how == "another layout":
        tensors = load_file(path)
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])["__metadata__"]
        tensors["slots.0"] = tensors["slots.0"][:, :1].contiguous()
        save_file(tensors, path, header | {"digest": kept_prompts._checksum(tensors)})
        return
    elif how == "no tokens":
        save_file({"a": torch.zeros(1)}, path, {"format": "foresay-prompt", "identity": "?"})
        return
    path.write_bytes(data)


@pytest.mark.parametrize("how", ["a bit", "cut", "another layout", "no tokens"])
def test_a_damaged_file_is_left_alone(
    how: str, model: Path, kept: tuple[Path, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, output = kept
    (folder / "notes.txt").write_text("not ours")
    damaged(files(folder)[0], how)
    caplog.set_level(logging.WARNING, "foresay")
    with foresay.load(model, drafter="none", dtype="fp32", keep_prompts=folder) as one:
        for _ in range(2):
            done = one.generate(PROMPT, max_new_tokens=12)
            assert (done.token_ids, done.steps[0].num_cached) == (output, 0)
    said = [record.message for record in caplog.records if "is not used" in record.message]
    assert len(said) == (how != "no tokens") and len(files(folder)) == 1, "a file of another model is no news"
    answered(model, folder, keep_prompt=True)
    assert answered(model, folder) == (output, len(PROMPT) - 1), "it is replaced"


def test_every_bit_counts() -> None:
    """In sums, and in what is left after them."""
    one = {"a": torch.randn(3 * kept_prompts._COLUMNS, 9).bfloat16()}
    known, bits = kept_prompts._checksum(one), one["a"].view(torch.int16).view(-1)
    for at in (0, 7, len(bits) // 2, len(bits) - 1):
        bits[at] ^= 1 << at % 15
        assert kept_prompts._checksum(one) != known
        bits[at] ^= 1 << at % 15
    assert kept_prompts._checksum(one) == known


def test_a_disk_that_refuses_ends_keeping(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(kept_prompts, "save_file", full)
    with foresay.load(model, drafter="none", dtype="fp32", keep_prompts=tmp_path) as one:
        for start in (1, 2):
            assert len(one.generate([start, *PROMPT], max_new_tokens=3, keep_prompt=True).token_ids) == 3
            assert one.kept_prompts is not None
            one.kept_prompts.close()
    said = [record.message for record in caplog.records if "not kept from now on" in record.message]
    assert len(said) == 1 and "No space left" in said[0] and list(tmp_path.iterdir()) == []


def test_the_files_of_two_processes_and_the_limit(model: Path, tmp_path: Path) -> None:
    """One sees what the other has written since; the least recently used leave."""
    first, second = (foresay.load(model, drafter="none", dtype="fp32", keep_prompts=tmp_path) for _ in range(2))
    first.generate(PROMPT, max_new_tokens=2, keep_prompt=True)
    first.close()
    assert second.generate(PROMPT, max_new_tokens=2).steps[0].num_cached == len(PROMPT) - 1
    size = files(tmp_path)[0].stat().st_size
    small = foresay.load(model, drafter="none", dtype="fp32", keep_prompts=tmp_path, keep_prompts_gb=2.5 * size / 1e9)
    for start in (1, 2):
        small.generate([start, *PROMPT[:-1]], max_new_tokens=2, keep_prompt=True)
        small.close()
        small.generate(PROMPT, max_new_tokens=2)  # used again
    assert sorted(int(load_file(path)["tokens"][0]) for path in files(tmp_path)) == [PROMPT[0], 2]


def test_hidden_states_are_kept_for_drafts_that_read_them(model: Path, tmp_path: Path) -> None:
    """A file without them is not read by such a draft; one with them is, by all."""
    target = foresay.load(model, drafter="none").target.model
    assert isinstance(target, CausalModel)
    (head := tmp_path / "head").mkdir()
    write_draft(random_head(target), head)
    folder, drafter = tmp_path / "kept", f"head({head})"
    output, _ = answered(model, folder, keep_prompt=True)
    assert answered(model, folder, drafter=drafter, keep_prompt=True) == (output, 0)
    assert answered(model, folder, drafter=drafter) == (output, len(PROMPT) - 1) == answered(model, folder)


@pytest.mark.parametrize("family", ["mamba", "qwen3_next", "lfm2"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_states_of_recurrent_layers_are_kept(family: str, dtype: str, tmp_path: Path) -> None:
    """Compiled passes and a family's own: a prompt goes on where its prefill ended, another at an earlier end of a pass.

    Control: a file without its longest state is not read so far.
    """
    sizes = {} if family == "mamba" else {"max_position_embeddings": 2048}
    source = tiny.save(tmp_path / family, make(family, vocab_size=264, **sizes))
    folder, length = tmp_path / "kept", 1100
    prompt = [i * 7 % 250 for i in range(length)]
    output, copied = answered(source, folder, prompt, keep_prompt=True, dtype=dtype)
    assert (copied, len(files(folder))) == (0, 1) and answered(source, None, prompt, dtype=dtype)[0] == output
    assert answered(source, folder, prompt, dtype=dtype) == (output, length - 1)
    [path] = files(folder)
    tensors = load_file(path)
    ends = sorted({int(name.split(".")[1]) for name in tensors if name.startswith("state.")})
    other = [*prompt[:1000], 1, 2, 3]
    wanted = answered(source, None, other, dtype=dtype)[0]
    assert len(ends) > 1 and ends[-1] == length - 1 == len(tensors["tokens"]), (
        "a file ends where another process goes on"
    )
    assert answered(source, folder, other, dtype=dtype) == (wanted, max(end for end in ends if end <= 1000))
    with safe_open(path, framework="pt") as file:
        header = file.metadata()
    less = {name: one for name, one in tensors.items() if not name.startswith(f"state.{length - 1}.")}
    save_file(less, path, header | {"digest": kept_prompts._checksum(less)})
    assert answered(source, folder, prompt, dtype=dtype) == (output, ends[-2])


def test_what_cannot_be_kept_is_refused(model: Path, tmp_path: Path) -> None:
    encoder = tiny.save(tmp_path / "t5", make_seq2seq("t5", vocab_size=264))
    for param, source, options in (
        ("keep_prompts", encoder, {"keep_prompts": tmp_path}),
        ("keep_prompts", model, {"keep_prompts": 3}),
        ("keep_prompts", model, {"keep_prompts": tmp_path, "share_prefixes": False}),
        ("keep_prompts_gb", model, {"keep_prompts": tmp_path, "keep_prompts_gb": 0}),
    ):
        with refused(param, options[param]):
            foresay.load(source, drafter="none", **options)
    (tmp_path / "file").touch()
    with pytest.raises(foresay.ConfigError, match="cannot be written"):
        foresay.load(model, drafter="none", dtype="fp32", keep_prompts=tmp_path / "file" / "x")
