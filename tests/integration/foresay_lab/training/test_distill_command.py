"""`foresay distill` as its users meet it: what it writes, what goes on after a kill, what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import foresay as library
from foresay.cli.app import _run
from foresay.drafters import Memory
from foresay.errors import ConfigError, VocabularyMismatchError
from foresay.models.drafts.files import read_draft
from foresay.models.sources.loading import load_model
from foresay.records.recording import Recording
from foresay.text.tokenizer import tokenizer_fingerprint
from foresay_lab.training.curves import read_log
from foresay_lab.training.outputs import read_outputs
from helpers import tiny

PROMPTS = [f"the number {i} and {i + 1}" for i in range(40)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(num_hidden_layers=4))


@pytest.fixture(scope="module")
def recorded(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    prompts, out = folder / "prompts.jsonl", folder / "outputs.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in PROMPTS))
    assert _run(["record", str(out), "--model", str(target), "--prompts", str(prompts), "-n", "32"]) == 0
    return out


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tiny.Shell:
    return tiny.Shell(monkeypatch, capsys)


def options(target: Path, recorded: Path, *more: str) -> list[str]:
    return [
        "--model",
        str(target),
        "--outputs",
        str(recorded),
        "--batch-tokens",
        "400",
        "--sequence-length",
        "96",
        *more,
    ]


def test_a_head_is_written_that_drafts(target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path) -> None:
    out = tmp_path / "head"
    code, said, err = shell(
        "distill",
        str(out),
        *options(
            target,
            recorded,
            "--epochs",
            "4",
            "--hidden-layers",
            "1,2,3",
            "--draft-steps",
            "3",
            "--states",
            str(tmp_path / "s"),
        ),
    )
    assert (code, err) == (0, "")
    assert f"head({out})" in said and "trained on 39 texts" in said and "tokens per pass" in said
    assert {"config.json", "model.safetensors", "foresay.json", "metrics.jsonl", "curves.png"} <= {
        p.name for p in out.iterdir()
    }
    assert json.loads((out / "config.json").read_text())["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [
        1,
        2,
        3,
    ]
    asked = ("generate", "--model", str(target), "the number 7", "-n", "24")
    plain = shell(*asked, "--drafter", "none")
    drafted = shell(*asked, "--drafter", f"head({out})", "--length", "3")
    assert plain[0] == drafted[0] == 0 and plain[1] == drafted[1]
    model = library.load(str(target), drafter=f"cascade(head={out}, suffix; k=[[2, 4], [0, 0]])")
    assert (
        model.generate("the number 7", max_new_tokens=24).text
        == library.change(model, drafter="none").generate("the number 7", max_new_tokens=24).text
    )


def test_a_log_for_tensorboard(
    target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "head"
    given = options(target, recorded, "--epochs", "1", "--hidden-layers", "1", "--draft-steps", "2", "--tensorboard")
    assert shell("distill", str(out), *given)[0] == 0
    assert list((out / "tensorboard").rglob("events.*"))
    monkeypatch.setattr("foresay_lab.commands.distill.is_tensorboard_available", lambda: False)
    assert "--tensorboard needs tensorboard: pip install" in shell.refused("distill", str(tmp_path / "x"), *given)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("layout", ["plain", "speculators"])
def test_a_head_is_exported_whole(layout: str, target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path) -> None:
    """With the output layer that it shares; what comes back drafts alike. A folder that holds something is left."""
    head, out = tmp_path / "head", tmp_path / "out"
    made = options(target, recorded, "--hidden-layers", "1,3", "--draft-steps", "2", "--vocabulary-size", "64")
    assert shell("distill", str(head), *made)[0] == 0
    asked = ("export", str(head), str(out), "--model", str(target), "--layout", layout)
    if layout == "plain":
        assert "--verifier org/name " in shell.refused(*asked, "--verifier", "org/name")
    else:
        asked = (*asked, "--verifier", "org/name")
    code, said, err = shell(*asked)
    assert (code, err) == (0, "") and "layers 1, 3" in said and "64 tokens" in said
    tensors = load_file(out / "model.safetensors")
    assert tensors["lm_head.weight"].shape[0] == 64 and int(tensors["t2d"].sum()) == 64
    config = json.loads((out / "config.json").read_text())
    assert ("speculators_model_type" in config) == (layout == "speculators")
    plain = ("generate", "the number 7", "--model", str(target), "-n", "16", "--length", "2", "--json")
    found = [json.loads(shell(*plain, "--drafter", f"head({one})")[1]) for one in (head, out)]
    assert found[0]["text"] == found[1]["text"]
    assert "exists and is not empty; name another folder" in shell.refused(*asked)
    assert "--layout" in shell.refused(*asked[:2], str(tmp_path / "x"), *asked[3:5], "--layout", "onnx")


def test_a_block_drafter_is_written_exported_and_drafts(
    target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path
) -> None:
    out, exported = tmp_path / "block", tmp_path / "exported"
    more = (
        "--kind",
        "block",
        "--epochs",
        "2",
        "--hidden-layers",
        "1,3",
        "--block-size",
        "4",
        "--vocabulary-size",
        "64",
    )
    code, said, err = shell("distill", str(out), *options(target, recorded, *more))
    assert (code, err) == (0, "") and f"block({out})" in said and "tokens per pass" in said
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["target_layer_ids"] == [0, 2]
    export = ("export", str(out), str(exported), "--model", str(target))
    assert "--layout speculators " in shell.refused(*export, "--layout", "speculators")
    assert "--verifier org/name " in shell.refused(*export, "--verifier", "org/name")
    code, said, err = shell(*export)
    assert (code, err) == (0, "") and "layers 1, 3" in said and "proposes 64 tokens" in said
    assert {"lm_head.weight", "embed_tokens.weight"} <= load_file(exported / "model.safetensors").keys()
    asked = ("generate", "--model", str(target), "the number 7", "-n", "24")
    plain = shell(*asked, "--drafter", "none")[1]
    for folder in (out, exported):
        assert shell(*asked, "--drafter", f"block({folder})", "--length", "3")[1] == plain
    assert "is a block drafter, not a head" in shell.refused(*asked, "--drafter", f"head({out})")
    again = ("--kind", "block", "--from", str(out), "--epochs", "1", "--learning-rate", "1e-4")
    assert shell("distill", str(tmp_path / "again"), *options(target, recorded, *again))[0] == 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--kind", "medusa"), "--kind medusa"),
        (("--block-size", "4"), "--block-size applies to --kind block and dflash2"),
        (("--kind", "dflash2", "--from", "x", "--rank", "2"), "--from sets the shape"),
        (("--kind", "block", "--draft-steps", "3"), "--draft-steps applies to --kind head"),
        (("--kind", "block", "--own-output-layer"), "--own-output-layer applies to --kind head"),
        (("--kind", "block", "--block-size", "1"), "--block-size 1"),
        (("--kind", "block", "--draft", "x"), "--draft applies to --kind model"),
        (("--order", "3"), "--order applies to --kind ngram"),
        (("--kind", "model"), "--kind model needs --draft"),
        (("--loss", "ce"), "applies to block drafters"),
        (("--kind", "block", "--from", "x", "--layers", "2"), "--from sets the shape"),
    ],
)
def test_options_of_block_drafters_that_are_refused(
    given: tuple[str, ...], message: str, target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path
) -> None:
    assert message in shell.refused("distill", str(tmp_path / "x"), *options(target, recorded, *given))


def test_a_head_is_no_block_drafter(target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path) -> None:
    out = tmp_path / "head"
    made = options(target, recorded, "--hidden-layers", "1,3", "--draft-steps", "2", "--vocabulary-size", "64")
    assert shell("distill", str(out), *made)[0] == 0
    asked = ("generate", "--model", str(target), "x", "--drafter", f"block({out})")
    assert "is a head, not a block drafter" in shell.refused(*asked)


def test_a_draft_model_is_written_that_transformers_loads(
    target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path
) -> None:
    small, out = tmp_path / "small", tmp_path / "draft"
    assert shell("distill", str(small), "--kind", "pruned", "--model", str(target), "--layers", "1")[0] == 0
    code, said, err = shell("distill", str(out), *options(target, recorded, "--draft", str(small), "--all-weights"))
    assert (code, err) == (0, "")
    assert f"--draft {out}" in said
    assert AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == 1
    assert shell("generate", "--model", str(target), "--draft", str(out), "x", "-n", "8")[0] == 0


def test_a_draft_model_is_cut_to_a_table_s_tokens(
    target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path
) -> None:
    """It prints what to draft with, as it learned it; a size without a table, and a table for a head, are refused."""
    small, out, table, text = (tmp_path / name for name in ("small", "draft", "table.safetensors", "a.txt"))
    text.write_text("the number 7 and the number 9 " * 40)
    assert shell("distill", str(table), "--kind", "ngram", "--model", str(target), "--text", str(text))[0] == 0
    assert shell("distill", str(small), "--kind", "pruned", "--model", str(target), "--layers", "1")[0] == 0
    given = options(target, recorded, "--draft", str(small), "--vocabulary-size", "12")
    code, said, err = shell("distill", str(out), *given, "--vocabulary", str(table))
    assert (code, err) == (0, "")
    drafter = said.split("--drafter '")[1].split("'")[0]
    assert drafter == f"model({out}, vocabulary={table}, vocabulary_size=12)"
    asked = ("generate", "--model", str(target), "the number 7", "-n", "12")
    assert shell(*asked, "--drafter", drafter, "--length", "3")[1] == shell(*asked, "--drafter", "none")[1]
    assert "need each other" in shell.refused("distill", str(tmp_path / "x"), *given)
    head = options(target, recorded, "--vocabulary", str(table), "--vocabulary-size", "12")
    assert "--vocabulary applies to --kind model" in shell.refused("distill", str(tmp_path / "x"), *head)


def test_on_text_alone(target: Path, shell: tiny.Shell, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("\n".join(f"line {i} of some text that is read" for i in range(200)))
    out = tmp_path / "head"
    given = ["--model", str(target), "--text", str(text), "--sequence-length", "64", "--draft-steps", "2"]
    code, said, _ = shell("distill", str(out), *given)
    assert code == 0 and "tokens per pass" in said


def test_on_texts_that_a_server_keeps(target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path) -> None:
    """Texts of all owners; a folder over another vocabulary, or of something else, is refused."""
    folder, length = tmp_path / "memory", 32
    tokenizer = load_model(str(target)).tokenizer
    assert tokenizer is not None
    name = tokenizer_fingerprint(tokenizer)
    memory = Memory(folder, fingerprint=name)
    texts = [np.array([*one.prompt, *one.output]) for one in Recording.load(recorded).records]
    for i, text in enumerate(texts):
        memory.add(f"owner {i % 2}", text)
    memory.close()
    found = read_outputs(str(folder), 1000, name, length)
    whole = [piece.tolist() for text in texts for piece in np.split(text, range(length, len(text), length))]
    assert sorted(one.tokens.tolist() for one in found) == sorted(one for one in whole if len(one) > 1)
    code, said, _ = shell("distill", str(tmp_path / "head"), *options(target, folder, "--draft-steps", "2"))
    assert code == 0 and "tokens per pass" in said
    with pytest.raises(ConfigError, match="outside the target's vocabulary of 5"):
        read_outputs(str(folder), 5, name, length)
    with pytest.raises(VocabularyMismatchError, match="another vocabulary"):
        read_outputs(str(folder), 1000, "other", length)
    (tmp_path / "empty").mkdir()
    assert "cannot be used" in shell.refused("distill", str(tmp_path / "x"), *options(target, tmp_path / "empty"))


def test_several_processes_take_the_steps_of_one(
    target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path
) -> None:
    """Two that train side by side make the steps of one that takes both of their batches; what they evaluate is the same."""
    two, one, less = (tmp_path / name for name in ("two", "one", "less"))
    more = [
        "--batch-tokens",
        "330",
        "--epochs",
        "3",
        "--hidden-layers",
        "1,2,3",
        "--draft-steps",
        "2",
        "--held-out",
        "0.1",
    ]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*launch, "-m", "foresay", "distill", str(two)]
    command += options(target, recorded, "--states", str(tmp_path / "s"), *more)
    done = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("tokens per pass") == 1, "one of them speaks"
    for out, batches in ((one, "2"), (less, "1")):
        assert shell("distill", str(out), *options(target, recorded, *more, "--accumulate", batches))[0] == 0
    theirs, ours, others = (read_log(out) for out in (two, one, less))
    assert theirs.keys() == ours.keys() != others.keys()
    for step, line in ours.items():
        for name in ("tokens", "loss", "divergence", "tokens_per_pass", "acceptance_1", "agreement_2"):
            if name in line:
                assert theirs[step][name] == pytest.approx(line[name], rel=2e-3, abs=2e-3), (step, name)
    weights = [load_file(out / "checkpoint" / "weights.safetensors") for out in (two, one)]
    for name, weight in weights[1].items():
        torch.testing.assert_close(weights[0][name], weight, rtol=1e-3, atol=1e-4)
    assert any(
        not torch.equal(weight, weights[0][name])
        for name, weight in load_file(less / "checkpoint" / "weights.safetensors").items()
    )
    assert "processes=2, not 1" in shell.refused("distill", str(two), *options(target, recorded, *more))


def test_a_head_goes_on_with_another_schedule(target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path) -> None:
    first, then = tmp_path / "first", tmp_path / "then"
    shape = ["--hidden-layers", "1,2,3", "--draft-steps", "2", "--vocabulary-size", "64", "--feed-forward", "40"]
    assert (
        shell("distill", str(first), *options(target, recorded, "--epochs", "12", "--learning-rate", "1e-2", *shape))[0]
        == 0
    )
    again = ["--from", str(first), "--draft-steps", "2", "--learning-rate", "1e-4"]
    assert shell("distill", str(then), *options(target, recorded, *again))[0] == 0
    ended, began = read_log(first), read_log(then)
    kept = max(ended.values(), key=lambda line: line["tokens_per_pass"])  # the first of the best
    assert began[0]["divergence"] == pytest.approx(kept["divergence"], abs=0.05)
    assert began[0]["divergence"] < 0.7 * ended[0]["divergence"], "not anew"
    assert json.loads((then / "foresay.json").read_text())["from"] == str(first)
    assert "--from sets the shape" in shell.refused(
        "distill", str(tmp_path / "x"), *options(target, recorded, *again, "--hidden-layers", "1")
    )
    other = tiny.save(tmp_path / "other", tiny.llama(hidden_size=48))
    assert "head" in shell.refused("distill", str(tmp_path / "y"), *options(other, recorded, *again))


def test_a_head_goes_on_with_other_tokens(target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path) -> None:
    """Such as those of new texts: the head's weights do not depend on the tokens that it drafts."""
    first, then, own = tmp_path / "first", tmp_path / "then", tmp_path / "own"
    new = ["--draft-steps", "2", "--epochs", "2"]
    assert shell("distill", str(first), *options(target, recorded, *new, "--vocabulary-size", "40"))[0] == 0
    again = [*new, "--from", str(first), "--vocabulary-size", "24"]
    code, said, _ = shell("distill", str(then), *options(target, recorded, *again))
    assert code == 0 and "it drafts 24 tokens, " in said and "% of those that the target generated" in said
    before, after = read_draft(first), read_draft(then)
    assert before.token_ids is not None and after.token_ids is not None and after.config.draft_vocab_size == 24
    assert len(after.token_ids) == 24 and set(after.token_ids.tolist()) < set(before.token_ids.tolist())
    assert json.loads((then / "config.json").read_text())["draft_vocab_size"] == 24
    whole = tmp_path / "whole"
    size = str(json.loads((target / "config.json").read_text())["vocab_size"])
    assert (
        shell("distill", str(whole), *options(target, recorded, *new, "--from", str(first), "--vocabulary-size", size))[
            0
        ]
        == 0
    )
    assert read_draft(whole).token_ids is None
    assert shell("distill", str(own), *options(target, recorded, *new, "--own-output-layer"))[0] == 0
    said = shell.refused(
        "distill", str(tmp_path / "x"), *options(target, recorded, *new, "--from", str(own), "--vocabulary-size", "24")
    )
    assert "output layer" in said


def test_a_run_that_ended_before_its_first_evaluation_goes_on(
    target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path
) -> None:
    out = tmp_path / "head"
    assert shell("distill", str(out), *options(target, recorded, "--hidden-layers", "1,2,3", "--epochs", "0.2"))[0] == 0
    for path in list(out.iterdir()):
        if path.name == "checkpoint":
            shutil.rmtree(path)
        elif path.name != "metrics.jsonl":
            path.unlink()
    assert shell("distill", str(out), *options(target, recorded, "--hidden-layers", "1,2,3", "--epochs", "0.2"))[0] == 0
    assert "--draft-steps 5" in shell.refused(
        "distill", str(out), *options(target, recorded, "--hidden-layers", "1,2,3", "--draft-steps", "4")
    )


def test_ctrl_c_leaves_a_checkpoint_that_goes_on(
    target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path
) -> None:
    out, endless = tmp_path / "head", ["--epochs", "100000"]
    child = subprocess.Popen(
        [*tiny.FORESAY, "distill", str(out), *options(target, recorded, *endless, "--evaluate-minutes", "50")],
        env=tiny.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # as under a terminal's shell
    )
    until = time.monotonic() + 90
    while time.monotonic() < until and not (out / "checkpoint").is_dir():
        assert child.poll() is None, child.communicate()
        time.sleep(0.05)
    time.sleep(1)
    child.send_signal(signal.SIGINT)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 130 and b"Traceback" not in err
    before = json.loads((out / "checkpoint" / "state.json").read_text())["step"]
    code, said, _ = shell("distill", str(out), *options(target, recorded, *endless, "--minutes", "0.03"))
    assert before > 0 and code == 0 and f"{before} of them earlier" in said


def test_what_is_refused(target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path) -> None:
    out = str(tmp_path / "head")
    assert "--outputs" in shell.refused("distill", out, "--model", str(target))
    assert "--loss kl" in shell.refused("distill", out, *options(target, recorded, "--loss", "kl"))
    assert "--hidden-layers 1,x" in shell.refused("distill", out, *options(target, recorded, "--hidden-layers", "1,x"))
    assert "--hidden-layers [1, 9]" in shell.refused(
        "distill", out, *options(target, recorded, "--hidden-layers", "1,9")
    )
    assert "vocabulary-size" in shell.refused("distill", out, *options(target, recorded, "--vocabulary-size", "9999"))
    assert "nothing.jsonl" in shell.refused("distill", out, *options(target, tmp_path / "nothing.jsonl"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine.txt").write_text("mine")
    assert "contains something else, and is not changed" in shell.refused(
        "distill", str(other), *options(target, recorded)
    )
    assert "tokenizer" in shell.refused(
        "distill",
        out,
        "--model",
        str(tiny.save(tmp_path / "chat", chat=True)),
        "--outputs",
        str(_renamed(recorded, tmp_path)),
    )
    assert "no such folder" in shell.refused("generate", "--model", str(target), "--drafter", "head(/nowhere)", "x")


def _renamed(recorded: Path, folder: Path) -> Path:
    """The recording of a target with another tokenizer."""
    first, rest = recorded.read_text().split("\n", 1)
    header = json.loads(first) | {"tokenizer": "another"}
    path = folder / "renamed.jsonl"
    path.write_text(json.dumps(header) + "\n" + rest)
    return path


@pytest.mark.parametrize("draft", ["head", pytest.param("model", marks=pytest.mark.long)])
def test_a_full_disk_is_one_line(draft: str, target: Path, recorded: Path, shell: tiny.Shell, tmp_path: Path) -> None:
    """A limit on the size of files stands in for it."""
    out, small = tmp_path / "draft", tmp_path / "small"
    given = ["--hidden-layers", "1,2,3"]
    if draft == "model":
        assert shell("distill", str(small), "--kind", "pruned", "--model", str(target), "--layers", "1")[0] == 0
        given = ["--draft", str(small), "--all-weights"]
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000,) * 2); "
    asked = ["distill", str(out), *options(target, recorded, "--epochs", "0.2", *given)]
    done = subprocess.run(
        [sys.executable, "-c", limit + "from foresay.cli import main; main(sys.argv[1:])", *asked],
        capture_output=True,
        timeout=120,
        env=tiny.environment(),
        text=True,
        check=False,
    )
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("foresay: ")]
    assert done.returncode == 2 and line == f"foresay: OUTPUT {out} cannot be written: File too large", done.stderr
    assert "Traceback" not in done.stderr
    assert not [path for path in out.rglob("*") if path.suffix in (".safetensors", ".work")]
    assert shell(*asked)[0] == 0
