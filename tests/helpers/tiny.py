"""A tiny random Llama with a byte-level tokenizer, saved as a user's model folder, and ways to run the command line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from helpers.families import make

FORESAY = [sys.executable, "-m", "foresay"]
SPECIALS = ("<eos>", "<bos>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "<bos>{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]


def tokenizer(*, chat: bool | str = False) -> PreTrainedTokenizerFast:
    """Four special tokens, the 256 bytes, and a few merges: any text has ids, and any id has text. chat: or a template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*SPECIALS, *alphabet, *("".join(pair) for pair in MERGES)]
    inner = Tokenizer(BPE({word: i for i, word in enumerate(words)}, MERGES))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(SPECIALS))
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", bos_token="<bos>", pad_token="<eos>")
    if chat:
        fast.chat_template = CHAT_TEMPLATE if chat is True else chat
    return fast


def llama(seed: int = 0, *, context: int = 4096, **changes: Any) -> PreTrainedModel:
    """A tiny Llama for the tokenizer that writes printable ASCII and, when greedy, never ends by itself."""
    names = tokenizer()
    model = make("llama", seed, vocab_size=len(names), max_position_embeddings=context, **changes)
    texts = (names.decode([i]) for i in range(len(names)))
    silent = [i for i, text in enumerate(texts) if i < len(SPECIALS) or not text.isascii() or not text.isprintable()]
    model.lm_head.weight.data[silent] = 0
    return model


def save(folder: Path, model: PreTrainedModel | None = None, *, chat: bool | str = False) -> Path:
    """The model and its tokenizer as a folder."""
    (llama() if model is None else model).save_pretrained(folder)
    tokenizer(chat=chat).save_pretrained(folder)
    return folder


def save_filling(folder: Path) -> Path:
    """A model in a folder, whose tokenizer has the tokens for filling in."""
    names = tokenizer()
    names.add_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"], special_tokens=True)
    save(folder, make("llama", vocab_size=len(names)))
    names.save_pretrained(folder)
    return folder


def environment(**changes: str) -> dict[str, str]:
    """The environment of a child: offline, quiet threads, and what a test requests."""
    offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **offline, **changes}


def foresay(*args: str, stdin: bytes = b"", timeout: float = 120, **changes: str) -> subprocess.CompletedProcess[bytes]:
    """Run the command line in a process of its own."""
    return subprocess.run(
        [*FORESAY, *args], input=stdin, capture_output=True, timeout=timeout, env=environment(**changes), check=False
    )


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # no one writes to it any more
        return b""


@contextlib.contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Iterator[list[bytes]]:
    """A terminal as standard error. Yield a list that gets what is written to it."""
    ours, theirs = os.openpty()
    shown: list[bytes] = []
    reader = threading.Thread(target=lambda: shown.extend(iter(lambda: _read(ours), b"")))
    reader.start()
    with monkeypatch.context() as patch, open(theirs, "w", encoding="utf-8") as stream:
        patch.setattr(sys, "stderr", stream)
        for name, value in {"TERM": "xterm", **variables}.items():
            patch.setenv(name, value)
        yield shown
    reader.join()
    os.close(ours)


def printed(*args: str) -> str:
    """Standard output of the command line in this process, for fixtures that outlive a test. The exit code is 0."""
    from foresay.cli.app import _run

    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert _run(list(args)) == 0
    return out.getvalue()


class Shell:
    """The command line in this process: exit code, and what it printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *args: str, stdin: bytes = b"") -> tuple[int, str, str]:
        from foresay.cli.app import _run

        self._monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        self._capsys.readouterr()
        code = _run(list(args))
        printed = self._capsys.readouterr()
        return code, printed.out, printed.err

    def out(self, *args: str) -> str:
        """Standard output of a command that succeeds, with nothing on standard error."""
        code, out, err = self(*args)
        assert (code, err) == (0, ""), (out, err)
        return out

    def watched(self, *args: str, stdin: bytes = b"") -> tuple[int, str, str]:
        """With a terminal for its standard error: exit code, standard output, and what the terminal got."""
        with terminal(self._monkeypatch) as shown:
            code, out, _ = self(*args, stdin=stdin)
        return code, out, b"".join(shown).decode(errors="replace")

    def objects(self, *args: str) -> list[Any]:
        """The JSON objects that it prints, one per line."""
        return [json.loads(line) for line in self.out(*args).splitlines()]

    def refused(self, *args: str, stdin: bytes = b"") -> str:
        """The one line that a wrong input gives, without its "foresay: "."""
        code, out, err = self(*args, stdin=stdin)
        assert code == 2, (code, out, err)
        assert out == ""
        assert err.startswith("foresay: ") and err.count("\n") == 1 and err.endswith("\n"), err
        return err.removeprefix("foresay: ").strip()
