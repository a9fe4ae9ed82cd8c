"""`foresay distill --kind ngram` and `foresay info TABLE` in use: tables, output, errors, and files after Ctrl-C."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foresay.drafters.ngram_table import NgramTable
from foresay.text.tokenizer import tokenizer_fingerprint
from helpers import tiny
from helpers.training import full_disk

TEXT = "hello world, hello\nhello you, hello world\n\nyou hell\n"


@pytest.fixture
def names(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder that holds the tiny tokenizer and nothing else."""
    folder = tmp_path_factory.mktemp("names") / "tiny"
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a corpus."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text(TEXT)
    return tmp_path


@pytest.fixture
def base(here: Path, names: str) -> list[str]:
    return ["distill", "t.safetensors", "--kind", "ngram", "--model", names, "--text", "a.txt"]


def ids(text: str) -> list[int]:
    return list(tiny.tokenizer()(text, add_special_tokens=False).input_ids)


def after(table: NgramTable, text: str) -> str | None:
    token = table.next(ids(text))
    return None if token is None else tiny.tokenizer().decode([token])


# -- build -----------------------------------------------------------------------------------------------------------


def test_build(shell: tiny.Shell, base: list[str], here: Path) -> None:
    code, out, err = shell(*base, "--order", "3")
    assert (code, err) == (0, "")
    table = NgramTable.load("t.safetensors")
    tokens = ids(TEXT)
    assert (table.order, table.vocab_size) == (3, 264)
    assert table.fingerprint == tokenizer_fingerprint(tiny.tokenizer())
    assert table.corpus is not None and table.corpus.files == ("a.txt",) and table.corpus.num_tokens == len(tokens)
    assert table.counts is not None and table.counts.tolist() == np.bincount(tokens, minlength=264).tolist()
    assert (after(table, " w"), after(table, "d,"), after(table, ",")) == ("o", " ", " ")
    assert after(table, " y") == "o" and after(table, "z") is None
    lines = [line.strip() for line in out.splitlines()]
    assert lines[:3] == ["t.safetensors", "corpus: a.txt", f"tokens: {len(tokens)} in 1 documents"]
    two, three = (len({tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}) for n in (2, 3))
    assert lines[3] == f"distinct n-grams: {two} of 2, {three} of 3 tokens"
    assert lines[4].startswith("contexts: ") and lines[4].endswith(" of 2 tokens")
    assert lines[5].startswith("size: 0.0") and lines[5].endswith(" MB")
    assert lines[6].startswith("seconds: ") and lines[6].endswith(" tokens/s)")
    assert sorted(os.listdir(here)) == ["a.txt", "t.safetensors"]


def test_files_a_model_and_limits(
    shell: tiny.Shell, base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds of files and separators: unit/foresay_lab/training/test_corpus.py. The weights of a model are not read."""

    def built(*options: str, stdin: bytes = b"") -> tuple[NgramTable, str]:
        code, out, err = shell(*base[:4], *options, "--force", stdin=stdin)
        assert (code, err) == (0, "")
        return NgramTable.load("t.safetensors"), out

    names = base[4:6]
    whole, _ = built(*names, "--text", "a.txt")
    record = json.dumps({"body": TEXT}).encode()
    Path("d.jsonl.gz").write_bytes(gzip.compress(record))
    (tiny.save(tmp_path / "model") / "model.safetensors").unlink()
    for options, stdin in (
        ((*names, "--text", "d.jsonl.gz", "--field", "body"), b""), ((*names, "--text", "-"), TEXT.encode()),
        (("-m", str(tmp_path / "model"), "--text", "a.txt"), b""),
    ):  # fmt: skip
        table, _ = built(*options, stdin=stdin)
        assert table.successor.tolist() == whole.successor.tolist(), options
        assert table.counts is not None and whole.counts is not None and (table.counts == whole.counts).all()
        table.check(tokenizer_fingerprint(tiny.tokenizer()), 264)
    table, _ = built(*names, "--text", "a.txt", "--separator", "line")
    assert table.corpus is not None and table.corpus.num_documents == 3 and after(table, "\n") is None
    table, out = built(*names, "--text", "a.txt", "--max-tokens", "7", "--min-count", "2")
    assert "tokens: 7 in 1 documents" in out and "those that occur less than 2 times are dropped" in out
    assert table.counts is not None and table.counts.sum() == 7 and table.num_contexts == (0,)
    monkeypatch.setattr("foresay_lab.training.ngrams.MAX_ENTRIES", 6)
    shown = built(*names, "--text", "a.txt")[1]
    assert " n-grams, dropped for want of memory after up to 2 occurrences" in shown


WRONG = {
    **{f"--order {order}": f"--order {order} must be an integer in [2, 5]" for order in (1, 6)},
    **{f"{name} 0": f"{name} 0 must be an integer at least 1" for name in ("--min-count", "--max-tokens")},
    "--block-size 4": "--block-size applies to --kind block",
    "--dtype fp32": "--dtype applies to --kind head",
    "--separator lin": "--separator lin",
    "--field text": "--field text applies to .jsonl files only, and 'a.txt' is not one",
    "--text nothing.txt": "--text nothing.txt cannot be read",
    "--text .": "--text . cannot be read",
}


def test_wrong_parameters_and_outputs(
    shell: tiny.Shell, base: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is replaced by --force alone."""
    for options, problem in WRONG.items():
        assert problem.lower() in shell.refused(*base, *options.split()).lower()
    assert os.listdir(here) == ["a.txt"]
    assert "--outputs are missing" in shell.refused("distill", "t.safetensors", "--kind", "ngram")
    Path("d.safetensors").mkdir()
    for name, message in (
        ("t.bin", "OUTPUT t.bin "),
        ("no/t.safetensors", "OUTPUT no/t.safetensors is in the folder 'no'"),
        ("d.safetensors", "OUTPUT d.safetensors is a folder"),
    ):
        assert message in shell.refused("distill", name, *base[2:])
    Path("t.safetensors").write_text("precious")
    assert shell.refused(*base).startswith("OUTPUT t.safetensors exists; ")
    assert Path("t.safetensors").read_text() == "precious"
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK and access(path, mode))
    assert shell.refused(*base, "--force").startswith("OUTPUT t.safetensors is in the folder '.'")


def test_texts_that_are_wrong(shell: tiny.Shell, base: list[str], here: Path) -> None:
    for content in (b"", b"\n\n"):
        Path("a.txt").write_bytes(content)
        assert "a.txt" in shell.refused(*base, "--separator", "line")
    Path("a.txt").write_bytes(b"caf\xe9")
    assert shell.refused(*base).startswith("--text a.txt ")
    Path("a.jsonl").write_text('{"text": "x"}\n{"txt": "y"}\n')
    assert shell.refused(*base[:-1], "a.jsonl").startswith("--field text is in no text of a.jsonl, line 2")
    assert sorted(os.listdir(here)) == ["a.jsonl", "a.txt"]


def test_a_disk_without_room(shell: tiny.Shell, base: list[str], here: Path) -> None:
    """The system ends files at 1 KiB, as a full disk would. No tokenizer warns of texts beyond the model's context."""
    names = tiny.tokenizer()
    names.model_max_length = 8
    names.save_pretrained(base[5])
    with full_disk(1024):
        message = shell.refused(*base)
    assert message.startswith("OUTPUT t.safetensors ") and "File too large" in message
    assert os.listdir(here) == ["a.txt"]


def test_ctrl_c_while_the_table_is_written(
    shell: tiny.Shell, base: list[str], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(tensors: Any, path: Path, metadata: Any) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    Path("t.safetensors").write_text("old")
    monkeypatch.setattr("safetensors.numpy.save_file", interrupted)
    assert shell(*base, "--force") == (130, "", "")
    assert sorted(os.listdir(here)) == ["a.txt", "t.safetensors"] and Path("t.safetensors").read_text() == "old"


# -- show ------------------------------------------------------------------------------------------------------------


def test_show(shell: tiny.Shell, base: list[str], names: str, tmp_path: Path) -> None:
    """With a model the most frequent tokens are in words, unless it is one of another tokenizer."""
    assert shell(*base, "--order", "3")[0] == 0
    lines = dict(line.strip().split(": ", 1) for line in shell.out("info", "t.safetensors").splitlines()[1:])
    shown = "order, vocabulary, corpus, tokens, distinct n-grams, contexts, size, coverage, most frequent"
    assert ", ".join(lines) == shown
    mark, loaded, tokens = tokenizer_fingerprint(tiny.tokenizer())[:12], NgramTable.load("t.safetensors"), ids(TEXT)
    assert lines["order"] == "3" and lines["vocabulary"] == f"264 tokens, fingerprint {mark}"
    shares = [len(loaded.frequent(coverage=share)) for share in (0.9, 0.95, 0.99)]
    assert lines["coverage"] == "90% by {}, 95% by {}, 99% by {} tokens".format(*shares)
    frequent = sorted(set(tokens), key=lambda t: (-tokens.count(t), t))[:10]
    words = ", ".join(f"{tiny.tokenizer().decode([t])!r} {tokens.count(t)}" for t in frequent)
    assert shell("info", "t.safetensors", "--model", names)[1].endswith(f"  most frequent: {words}\n")
    other = tiny.tokenizer()
    other.add_tokens(["<more>"])
    other.save_pretrained(tmp_path / "other")
    refusal = shell.refused("info", "t.safetensors", "--model", str(tmp_path / "other"))
    assert refusal.startswith("the n-gram table was built with another tokenizer (fingerprint ")


def test_show_a_list_of_cs_drafting_and_files_that_are_no_table(shell: tiny.Shell, here: Path, names: str) -> None:
    Path("bigram.json").write_text(json.dumps([1, 2, None, -1, *[None] * 260]))
    out = shell.out("info", "bigram.json", "--model", names)
    shown = ["order: 2", "vocabulary: 264 tokens, no fingerprint", "corpus: unknown", "contexts: 2 of 1 token"]
    assert out.splitlines()[:5] == ["bigram.json", *(f"  {line}" for line in shown)]
    assert out.endswith("  token counts: none\n")
    Path("bigram.json").write_text(json.dumps([1, 2, None, -1]))
    Path("b.safetensors").write_text("text")
    for args, problem in (
        (["bigram.json", "--model", names], "built for a vocabulary of 4 tokens, but the one in use has 264"),
        (["no.safetensors"], "no such n-gram table: 'no.safetensors'"),
        (["b.safetensors"], "it is not a valid safetensors"),
    ):
        assert problem in shell.refused("info", *args)
