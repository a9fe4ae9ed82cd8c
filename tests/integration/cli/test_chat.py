"""`foresay chat`: piped lines in this process, and the real program in terminals of 80 and 40 columns."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

import foresay
from foresay.decoding.acceptance import Speculative
from foresay.spec.recipes import read_drafter
from helpers import tiny

READY = "\x1b[?2004h"
"""Sequence that the line editor sends when it waits for a line."""
SGR = re.compile(r"\x1b\[([0-9;]*)m")


@pytest.fixture(scope="session")
def folder(chat_folder: Path) -> Path:
    return chat_folder


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of the same tokens."""
    return tiny.save(tmp_path_factory.mktemp("chat") / "small", tiny.llama(1), chat=True)


class Piped:
    """Lines in, answers and notes out, in this process."""

    def __init__(self, shell: tiny.Shell, folder: Path) -> None:
        self._shell, self.base = shell, ["chat", "--model", str(folder), "--dtype", "fp32", "-n", "8"]

    def __call__(self, *lines: str, args: tuple[str, ...] = ()) -> tuple[list[str], list[str]]:
        """Lines of stdout and of stderr; the exit code is 0."""
        if "--drafter" not in args:
            args = ("--drafter", "prompt_lookup", *args)
        code, out, err = self._shell(*self.base, *args, stdin="".join(line + "\n" for line in lines).encode())
        assert code == 0, (out, err)
        return out.splitlines(), err.splitlines()


@pytest.fixture
def piped(shell: tiny.Shell, folder: Path) -> Piped:
    return Piped(shell, folder)


@pytest.fixture(scope="session")
def model(folder: Path) -> foresay.Generator:
    return foresay.load(folder, drafter="none", dtype="fp32")


def default_length(drafter: str) -> str:
    return read_drafter(drafter).length(Speculative())


def answers(model: foresay.Generator, *users: str, system: str | None = None, new: int = 8) -> list[str]:
    """Output of the library in the same conversation."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    out = []
    for user in users:
        messages.append({"role": "user", "content": user})
        out.append(str(model.generate(messages, max_new_tokens=new).text))
        messages.append({"role": "assistant", "content": out[-1]})
    return out


# -- lines from a pipe -----------------------------------------------------------------------------------------------


def test_messages(shell: tiny.Shell, piped: Piped, model: foresay.Generator) -> None:
    """System messages, many lines, a slash; the input's end ends them, and the conversation."""
    assert piped("hello", "hello again", "/quit", "not read") == (answers(model, "hello", "hello again"), [])
    assert piped() == piped("", "   ") == ([], [])
    expected = answers(model, "hello", "you", system="be brief")
    assert piped("hello", "you", args=("--system", "be brief"))[0] == expected
    changed = ["system: none", *answers(model, "hello")]
    lines = ("/system be brief", "hello", "you", "/clear", "/system none", "hello")
    assert piped(*lines)[0] == ["system: be brief", *expected, "a new conversation", *changed]
    for lines in (('"""', "one", "/two", '"""'), ("one\\", "/two"), ('"""one', "/two")):
        assert piped(*lines)[0] == answers(model, "one\n/two")
    assert piped("//etc")[0] == answers(model, "/etc")
    code, out, err = shell(*piped.base, stdin=b"caf\xe9\nhello\n")
    assert (code, out.splitlines()) == (0, answers(model, "hello"))
    assert err == "a line is not UTF-8 text: byte 0xe9 at 3\n"


def test_without_the_template_the_conversation_is_one_text(piped: Piped, model: foresay.Generator) -> None:
    first = model.generate("sys\nhello", max_new_tokens=8).text
    second = model.generate(f"sys\nhello{first}\nyou", max_new_tokens=8).text
    out, _ = piped("/template off", "hello", "you", args=("--system", "sys"))
    assert out == ["template: off", first, second]


def test_methods_change_and_the_text_does_not(piped: Piped, model: foresay.Generator, small: Path) -> None:
    [expected] = answers(model, "hello")
    lines = ["hello"]
    for setting in ("/drafter suffix(scale=3)", "/length heuristic", f"/draft {small}", "/rule block", "/length 2"):
        lines += [setting, "/retry"]
    out, err = piped(*lines, cascade := f"/drafter cascade(model={small}, max_gram; k=[[2, 4], [0, 4]])", "/retry")
    assert err == []
    assert out.count(expected) == 7
    assert [line for line in out if line != expected] == [
        *("drafter: suffix(scale=3)", f"length: {default_length('suffix')}", "length: heuristic"),
        *(f"drafter: model({small})", f"length: {default_length('model(a)')}", "rule: block (exact)"),
        *("length: 2 tokens", f"drafter: {cascade.removeprefix('/drafter ')}", "length: 6 tokens"),
    ]


WRONG = (
    "/drafter sufix", "/rule exact", "/length heuristics", "/temperature warm", "/temperature nan", "/temperature -1",
    "/top-p 2", "/seed x", "/max-new-tokens 0", "/trace maybe",
)  # fmt: skip
"""Lines that the note begins with."""
NOTES = {
    **dict.fromkeys(("/undo", "/retry", "/stats", "/compare"), "an answer does not exist yet"),
    "/nothing": "/nothing is unknown",
    "/drafter suffix(scal=3)": "drafter 'suffix': setting='scal'",
    "/drafter suffix(scale=0)": "suffix(scale=0): scale=0",
    "/draft ./nowhere": "no such file or folder: './nowhere'",
    "/rule lenience(0.5)": "lenience(0.5): lenience=0.5",
    "/gamma 99": "/length 99",
    "/forget 1": "/forget takes no value; drop '1'",
    "/save": "/save needs a file name",
    "/save /nowhere/at/all.json": "/nowhere/at/all.json",
    "/help lenth": "/lenth is unknown. Did you mean /length?",
    "x" * 5000: "the prompt has 5003 tokens",
}


def test_what_is_wrong_is_named_and_changes_nothing(piped: Piped) -> None:
    """The messages too: a prompt that is refused is none."""
    lines = {**{line: line for line in WRONG}, **NOTES}
    out, err = piped("/settings", *lines, "/settings", "/history")
    assert len(err) == len(lines)
    for note, start in zip(err, lines.values(), strict=True):
        assert note.startswith(start), err
    half = len(out) // 2
    assert out[:half] == out[half:-1] and out[-1] == "no messages yet"


def test_sampling(piped: Piped, model: foresay.Generator) -> None:
    lines = ("/temp 0.9", "/top-k 20", "/top-p 0.9", "/min-p 0.01", "/seed 5", "hello")
    out, err = piped(*lines, "/drafter none", "/retry", "/seed random", "/temp 0")
    message = [{"role": "user", "content": "hello"}]
    sampled = {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 5}
    expected = model.generate(message, max_new_tokens=8, **sampled).text
    assert err == []
    assert out[:5] == ["temperature: 0.9", "top-k: 20", "top-p: 0.9", "min-p: 0.01", "seed: 5"]
    assert piped("/top-k 5")[1] == ["(has no effect while decoding is greedy; /temperature 0.7 samples)"]
    assert out[5:] == [out[5], "drafter: none", "length: 0 tokens", expected, "seed: random", "temperature: greedy"]


def test_a_lossy_rule_is_marked(piped: Piped) -> None:
    out, _ = piped("hello", "/rule lenience(50)", "more", "/stats", args=("--drafter", "max_gram"))
    assert "rule: lenience(50) (lossy: the output may differ from plain decoding)" in out
    assert out[-2].startswith("last answer: 8 tokens in ") and out[-2].endswith("of the time, exact no")
    assert out[-1].startswith("conversation: 2 answers, 16 tokens in ") and out[-1].endswith("exact no")


def test_undo_clear_history_and_forgetting(piped: Piped, model: foresay.Generator) -> None:
    """With the same message again, suffix has seen the answer; after a reset it has not."""
    one, two = answers(model, "one", "two")
    out, _ = piped("one", "two", "/history", "/undo", "two", "/clear", "/history", "one")
    shown = ["you: one", f"answer: {one}", "you: two", f"answer: {two}"]
    assert out == [one, two, *shown, "removed: two", two, "a new conversation", "no messages yet", one]
    lines = ("hello", "/stats", "/retry", "/stats", "/forget", "/retry", "/stats")
    out, _ = piped(*lines, args=("--drafter", "suffix(keep=true)", "--length", "12"))
    passes = [line.split(", ")[2] for line in out if line.startswith("last answer")]
    assert passes[0] == passes[2] != passes[1]


def test_saving(piped: Piped, folder: Path, model: foresay.Generator, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    sampled = ("/temperature 1", "two", f"/save {file}", f"/save {file}")
    out, err = piped("one", *sampled, f"/save! {file}", args=("--system", "brief"))
    assert err == [f"/save {file} exists; /save! {file} replaces it"]
    assert out.count(f"saved to {file}") == 2
    kept = json.loads(file.read_text())
    assert list(tmp_path.iterdir()) == [file]
    assert [m["role"] for m in kept["messages"]] == ["system", "user", "assistant", "user", "assistant"]
    assert kept["messages"][2]["content"] == answers(model, "one", system="brief")[0]
    assert kept["foresay"] == foresay.__version__
    assert kept["settings"]["drafter"] == "prompt_lookup" and kept["settings"]["params"]["temperature"] == 1.0
    greedy, sampled_answer = kept["answers"]
    assert greedy["seed"] is None and greedy["exact"] is True and greedy["stats"]["num_tokens"] == 8
    by_itself = foresay.load(folder, drafter="prompt_lookup", dtype="fp32")
    again = by_itself.generate(kept["messages"][:4], **sampled_answer["params"])
    assert again.text == kept["messages"][4]["content"]  # the same seed, drafter and text
    method = {"drafter": "prompt_lookup", "length": default_length("prompt_lookup"), "rule": "speculative"}
    assert {name: sampled_answer[name] for name in method} == method
    assert sampled_answer["params"] == {"max_new_tokens": 8, "temperature": 1.0, "seed": sampled_answer["seed"]}


def test_the_oldest_exchanges_make_room(shell: tiny.Shell, tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "short", tiny.llama(context=96), chat=True)
    model = foresay.load(folder, drafter="none", dtype="fp32")
    piped = Piped(shell, folder)
    users = [f"message {i} of a talk" for i in range(6)]
    out, err = piped(*users, "/history", "/undo", "/clear", "hi", args=("--system", "S"))
    written = out[:6]
    seen: list[dict[str, str]] = []
    room = 96 - 8
    left_out, template = [], model.tokenizer.apply_chat_template

    def head(past: list[dict[str, str]]) -> list[dict[str, str]]:
        return [{"role": "system", "content": "S"}, *past]

    for user, text in zip(users, written, strict=True):
        turn = [{"role": "user", "content": user}]
        past = seen
        while len(template(head(past) + turn, add_generation_prompt=True)["input_ids"]) > room:
            past = past[2:]
        left_out.append((len(seen) - len(past)) // 2)
        assert model.generate(head(past) + turn, max_new_tokens=8).text == text
        seen = [*seen, *turn, {"role": "assistant", "content": text}]
    assert left_out[-1] > 1 and 1 in left_out
    some = {1: "the oldest exchange is"} | {n: f"the {n} oldest exchanges are" for n in range(2, 6)}
    notes = [line for line in err if "left out" in line]
    assert notes == [f"({some[n]} left out: the model's context is full)" for n in left_out if n]
    assert "(the model no longer sees the lines above)" in err
    assert out[-1] == model.generate([*head([]), {"role": "user", "content": "hi"}], max_new_tokens=8).text


def test_comparing(piped: Piped, small: Path) -> None:
    out, err = piped("hello hello", "/compare", f"/draft {small}", "/compare say this", "/history")
    rows = [line.split() for line in out]
    first, second = (i for i, row in enumerate(rows) if row[0] == "method")
    names = ["plain", "max_gram", "ngram_store", "suffix", "prompt_lookup"]
    assert [row[0] for row in rows[first + 1 : first + 6]] == names
    alone = rows[second + 2]
    assert alone[:2] == ["draft", "alone"] and alone[-1] == "another"
    assert [row[0] for row in rows[second + 3 : second + 8]] == [
        *("prompt_lookup", "max_gram", "ngram_store", "suffix", f"model({small})")
    ]
    assert all(row[-1] == "yes" for row in rows[second + 3 : second + 8])
    assert out[-2].startswith("you: hello hello") and err == []  # comparing is no part of the conversation
    out, _ = piped("/compare hello", args=("--drafter", "auto"))
    assert f": foresay serve {piped.base[2]} --dtype fp32" in out[-1], "loaded as here"


def test_help_names_every_command_and_the_trace_its_colours(piped: Piped) -> None:
    from foresay.cli.console.commands import COMMANDS

    out, _ = piped("/help", "/help /rule", "/help dra" + "fter")
    assert [line.split()[0].strip(":") for line in out[: len(COMMANDS)]] == [f"/{name}" for name in COMMANDS]
    assert any(line.startswith("  lenience(lenience=2.0): ") for line in out)
    assert any(line.startswith("  suffix(scale=") for line in out)
    out, err = piped("/trace on", "/trace", "/trace off")
    assert (out[0], out[-1], err) == ("trace: on", "trace: off", [])
    assert [line.split()[0] for line in out[1:4]] == ["[draft]", "{residual}", "bonus"]


# -- processes and terminals -----------------------------------------------------------------------------------------


class Terminal:
    """The program in a terminal."""

    def __init__(self, folder: Path, columns: int, *args: str, **changes: str) -> None:
        environment = tiny.environment(TERM="xterm-256color", PROMPT_TOOLKIT_NO_CPR="1", **changes)
        for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
            if name not in changes:
                environment.pop(name, None)
        command = [*tiny.FORESAY[1:], "chat", "--model", str(folder), "--dtype", "fp32", "--threads", "1", *args]
        self.child = pexpect.spawn(
            tiny.FORESAY[0], command, env=environment, dimensions=(40, columns), timeout=60, encoding="utf-8"
        )
        self.ready()

    def ready(self) -> str:
        """Output before the next prompt, without the echo of the typed text."""
        self.child.expect_exact(READY)
        return str(self.child.before)

    def __call__(self, text: str) -> str:
        """Type a line; what it printed, escape sequences included."""
        self.child.send(text + "\r")
        self.child.expect_exact("\x1b[?2004l")  # the line editor has let go
        return self.ready()

    def leave(self) -> int | None:
        """Ctrl-D; the exit code."""
        self.child.send("\x04")
        self.child.expect(pexpect.EOF)
        self.child.close()
        code = self.child.exitstatus
        return None if code is None else int(code)


def plain(text: str) -> str:
    """Without escape sequences and carriage returns; wrapped lines keep their breaks."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", text)


def colours(text: str) -> set[str]:
    """Which colours were set: 31 red, 32 green, 36 cyan, 2 dim."""
    return {code for found in SGR.findall(text) for code in found.split(";") if code not in ("", "0")}


@pytest.fixture
def terminals(folder: Path, tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    """Call with columns, options and variables: the program in a terminal, which ends with the test."""
    begun: list[Terminal] = []

    def start(columns: int, *args: str, **changes: str) -> Terminal:
        begun.append(Terminal(folder, columns, *args, XDG_STATE_HOME=str(tmp_path), **changes))
        return begun[-1]

    yield start
    for one in begun:
        one.child.close(force=True)


@pytest.mark.slow
def test_a_terminal_of_80_columns(terminals: Any, tmp_path: Path, model: foresay.Generator) -> None:
    """Ctrl-C ends a comparison, or an answer, which is kept; then drafts, colours, tables and the lines that are typed."""
    terminal = terminals(80, "-n", "4000", "--drafter", "none")
    terminal.child.send("/compare hello\r")
    terminal.child.expect_exact("plain, run 1 of 1")
    for _ in range(5):  # Python drops an interrupt that meets a finaliser at work
        terminal.child.send("\x03")
        if terminal.child.expect_exact(["(stopped)", pexpect.TIMEOUT], timeout=1) == 0:
            break
    terminal.ready()
    histories = [plain(terminal("/history")) for _ in range(2)]  # one interrupt too many may have its own prompt
    assert any("no messages yet" in history for history in histories)
    terminal.child.send("hello\r")
    begin = answers(model, "hello", new=6)[0]
    terminal.child.expect_exact(begin)
    terminal.child.send("\x03")
    assert "interrupted" in plain(terminal.ready())
    told = "".join(plain(terminal("/history")).split())
    assert f"answer(interrupted):{''.join(begin.split())}" in told
    file = tmp_path / "talk.json"
    terminal(f"/save {file}")
    kept = json.loads(file.read_text())
    [one] = kept["answers"]
    assert one["ended"] == "interrupted" and 6 <= one["stats"]["num_tokens"] < 4000
    text = kept["messages"][1]["content"]
    assert answers(model, "hello", new=one["stats"]["num_tokens"])[0] == text
    terminal("/max-new 6")
    after = model.generate([*kept["messages"], {"role": "user", "content": "go"}], max_new_tokens=6).text
    assert after in plain(terminal("go"))

    terminal("/clear")
    terminal("/max-new 40")
    written = terminal("hello")
    assert answers(model, "hello", new=40)[0] in plain(written)
    assert "40 tokens in" in plain(written) and colours(written) == {"2"}
    wrong = terminal("/drafter sufix")
    assert "Did you mean 'suffix'?" in plain(wrong) and "31" in colours(wrong)
    assert "drafter: max_gram" in plain(terminal("/drafter max_gram"))
    terminal("/length 4")  # a length that adapts may find that nothing pays
    assert "trace: on" in plain(terminal("/trace on"))
    assert colours(terminal("hello hello hello")) >= {"32", "36"}
    table = plain(terminal("/compare"))
    assert re.search(r"^method +tokens +drafted +accepted +used", table, re.MULTILINE)
    assert re.search(r"^max_gram +40 .* yes$", table, re.MULTILINE)
    assert (
        max(len(line) for line in table.splitlines() if "Comparing" not in line and "foresay serve" not in line) <= 80
    )
    terminal.child.send("\x03")
    assert "Ctrl-D or /quit leaves" in plain(terminal.ready())
    terminal.child.send("two\x1b\rlines")  # Alt-Enter
    terminal("")
    assert "you: two\nlines\n" in plain(terminal("/history"))
    assert terminal.leave() == 0
    assert "+hello\n" in (tmp_path / "foresay" / "history").read_text()


@pytest.mark.slow
def test_a_terminal_of_40_columns_without_colours_or_history(terminals: Any, tmp_path: Path) -> None:
    terminal = terminals(40, "-n", "12", "--drafter", "max_gram", "--no-history", NO_COLOR="1")
    printed = [terminal("/trace on") + terminal("hello hello")]
    printed += [terminal(line) for line in ("/compare", "/help", "/stats", "/foo")]
    assert [colours(text) for text in printed] == [set()] * 5
    compared = plain(printed[1]).replace("\n", " ")
    assert "plain   tokens 12" in compared and "prompt_lookup   tokens 12" in compared
    lines = plain("".join(printed[1:])).splitlines()
    assert max(len(line) for line in lines if "Comparing" not in line and "foresay serve" not in line) <= 40
    assert "/top-k N: sample from the N most likely\ntokens; 0 is all." in plain(printed[2]).replace(" \n", "\n")
    assert terminal.leave() == 0
    assert not (tmp_path / "foresay").exists()
