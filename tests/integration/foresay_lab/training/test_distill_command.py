"""`foresay distill` as its users meet it: what it writes, what goes on after a kill, what it refuses."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import foresay as library
from foresay.drafters import Memory
from foresay.errors import ConfigError, VocabularyMismatchError
from foresay.models.drafts.files import read_draft
from foresay.models.sources.loading import load_model
from foresay.records.recording import Recording
from foresay.text.tokenizer import tokenizer_fingerprint
from foresay_lab.training.curves import read_log
from foresay_lab.training.fitting import Fitting
from foresay_lab.training.outputs import read_outputs
from helpers import tiny
from helpers.forks import run_two
from helpers.training import full_disk

SMALL = "--hidden-layers 1,3 --draft-steps 2 --vocabulary-size 64"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save(tmp_path_factory.mktemp("target"), tiny.llama(num_hidden_layers=4))


@pytest.fixture(scope="module")
def recorded(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    prompts, out = folder / "prompts.txt", folder / "outputs.jsonl"
    prompts.write_text("".join(f"the number {i} and {i + 1}\n" for i in range(40)))
    tiny.printed("record", str(out), "--model", str(target), "--prompts", str(prompts), "-n", "32")
    return out


@pytest.fixture(scope="module")
def head(target: Path, recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head of 64 tokens over two layers."""
    out = tmp_path_factory.mktemp("head") / "head"
    tiny.printed("distill", str(out), *asked(target, recorded, SMALL))
    return out


@pytest.fixture(scope="module")
def pruned(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft of one of the target's layers."""
    out = tmp_path_factory.mktemp("pruned") / "small"
    tiny.printed("distill", str(out), "--kind", "pruned", "--model", str(target), "--layers", "1")
    return out


def asked(target: Path, recorded: Path, options: str = "") -> list[str]:
    given = ["--model", str(target), "--outputs", str(recorded)]
    return [*given, "--batch-tokens", "400", "--sequence-length", "96", *options.split()]


@dataclass
class Distil:
    """The command for the target and its recorded outputs."""

    shell: tiny.Shell
    target: Path
    recorded: Path

    def __call__(self, out: Path, options: str = "") -> str:
        return self.shell.out("distill", str(out), *asked(self.target, self.recorded, options))

    def refused(self, out: Path, options: str = "") -> str:
        return self.shell.refused("distill", str(out), *asked(self.target, self.recorded, options))

    def writes(self, *drafting: str) -> str:
        """The target's continuation of a prompt."""
        code, out, _ = self.shell("generate", "--model", str(self.target), "the number 7", "-n", "24", *drafting)
        assert code == 0
        return out

    def exports(self, draft: Path, out: Path, *options: str) -> list[str]:
        return ["export", str(draft), str(out), "--model", str(self.target), *options]


@pytest.fixture
def distil(shell: tiny.Shell, target: Path, recorded: Path) -> Distil:
    return Distil(shell, target, recorded)


def test_a_head_is_written_that_drafts(distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "head"
    printed = distil(out, f"--epochs 4 --hidden-layers 1,2,3 --draft-steps 3 --tensorboard --states {tmp_path / 's'}")
    assert f"head({out})" in printed and "trained on 39 texts" in printed and "tokens per pass" in printed
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "foresay.json", "metrics.jsonl", "curves.png"} <= names
    config = json.loads((out / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert list((out / "tensorboard").rglob("events.*"))
    plain = distil.writes("--drafter", "none")
    assert distil.writes("--drafter", f"head({out})", "--length", "3") == plain
    model = library.load(str(distil.target), drafter=f"cascade(head={out}, suffix; k=[[2, 4], [0, 0]])")
    assert model.generate("the number 7", max_new_tokens=24).text.strip() == plain.strip()
    monkeypatch.setattr("foresay_lab.commands.distill.is_tensorboard_available", lambda: False)
    assert "--tensorboard needs tensorboard: pip install" in distil.refused(tmp_path / "x", "--tensorboard")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("layout", ["plain", "speculators"])
def test_a_head_is_exported_whole(layout: str, distil: Distil, head: Path, tmp_path: Path) -> None:
    """With the output layer that it shares; what comes back drafts alike. A folder that holds something is left."""
    out, verifier = tmp_path / "out", ["--verifier", "org/name"]
    command = distil.exports(head, out, "--layout", layout)
    if layout == "plain":
        assert "--verifier org/name " in distil.shell.refused(*command, *verifier)
    printed = distil.shell.out(*command, *(verifier if layout == "speculators" else []))
    assert "layers 1, 3" in printed and "64 tokens" in printed
    tensors = load_file(out / "model.safetensors")
    assert tensors["lm_head.weight"].shape[0] == 64 and int(tensors["t2d"].sum()) == 64
    config = json.loads((out / "config.json").read_text())
    assert ("speculators_model_type" in config) == (layout == "speculators")
    found = [json.loads(distil.writes("--drafter", f"head({one})", "--json")) for one in (head, out)]
    assert found[0]["text"] == found[1]["text"]
    assert "exists and is not empty; name another folder" in distil.shell.refused(*command)
    assert "--layout" in distil.shell.refused(*distil.exports(head, tmp_path / "x", "--layout", "onnx"))


def test_a_block_drafter_is_written_exported_and_drafts(distil: Distil, head: Path, tmp_path: Path) -> None:
    out, exported, again = (tmp_path / name for name in ("block", "exported", "again"))
    printed = distil(out, "--kind block --epochs 2 --hidden-layers 1,3 --block-size 4 --vocabulary-size 64")
    assert f"block({out})" in printed and "tokens per pass" in printed
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["target_layer_ids"] == [0, 2]
    export = distil.exports(out, exported)
    assert "--layout speculators " in distil.shell.refused(*export, "--layout", "speculators")
    assert "--verifier org/name " in distil.shell.refused(*export, "--verifier", "org/name")
    printed = distil.shell.out(*export)
    assert "layers 1, 3" in printed and "proposes 64 tokens" in printed
    assert {"lm_head.weight", "embed_tokens.weight"} <= load_file(exported / "model.safetensors").keys()
    plain = distil.writes("--drafter", "none")
    for folder in (out, exported):
        assert distil.writes("--drafter", f"block({folder})", "--length", "3") == plain
    generate = ["generate", "--model", str(distil.target), "x", "--drafter"]
    assert "is a block drafter, not a head" in distil.shell.refused(*generate, f"head({out})")
    assert "is a head, not a block drafter" in distil.shell.refused(*generate, f"block({head})")
    distil(again, f"--kind block --from {out} --epochs 1 --learning-rate 1e-4")
    kept = max(read_log(out).values(), key=lambda line: line["tokens_per_pass"])
    assert read_log(again)[0]["divergence"] == pytest.approx(kept["divergence"], rel=0.05), "it goes on"


def test_a_draft_model_is_written_that_transformers_loads(distil: Distil, pruned: Path, tmp_path: Path) -> None:
    """Cut to a table's tokens, it prints what to draft with, as it learned it; the table and the size need each other."""
    out, cut, table, text = (tmp_path / name for name in ("draft", "cut", "table.safetensors", "a.txt"))
    assert f"--draft {out}" in distil(out, f"--draft {pruned} --all-weights")
    assert AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == 1
    distil.writes("--draft", str(out))
    text.write_text("the number 7 and the number 9 " * 40)
    distil.shell.out("distill", str(table), "--kind", "ngram", "--model", str(distil.target), "--text", str(text))
    given = f"--draft {pruned} --vocabulary-size 12"
    drafter = distil(cut, f"{given} --vocabulary {table}").split("--drafter '")[1].split("'")[0]
    assert drafter == f"model({cut}, vocabulary={table}, vocabulary_size=12)"
    assert distil.writes("--drafter", drafter, "--length", "3") == distil.writes("--drafter", "none")
    assert "need each other" in distil.refused(tmp_path / "x", given)
    other = f"--vocabulary {table} --vocabulary-size 12"
    assert "--vocabulary applies to --kind model" in distil.refused(tmp_path / "x", other)


def test_on_text_alone(distil: Distil, tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("\n".join(f"line {i} of some text that is read" for i in range(200)))
    given = ["--model", str(distil.target), "--text", str(text), "--sequence-length", "64", "--draft-steps", "2"]
    assert "tokens per pass" in distil.shell.out("distill", str(tmp_path / "head"), *given)


def test_on_texts_that_a_server_keeps(distil: Distil, tmp_path: Path) -> None:
    """Texts of all owners; a folder over another vocabulary, or of something else, is refused."""
    folder, length = tmp_path / "memory", 32
    name = tokenizer_fingerprint(load_model(str(distil.target)).tokenizer)  # type: ignore[arg-type]
    memory = Memory(folder, fingerprint=name)
    texts = [np.array([*one.prompt, *one.output]) for one in Recording.load(distil.recorded).records]
    for i, text in enumerate(texts):
        memory.add(f"owner {i % 2}", text)
    memory.close()
    found = read_outputs(str(folder), 1000, name, length)
    whole = [piece.tolist() for text in texts for piece in np.split(text, range(length, len(text), length))]
    assert sorted(one.tokens.tolist() for one in found) == sorted(one for one in whole if len(one) > 1)
    distil.recorded = folder
    assert "tokens per pass" in distil(tmp_path / "head", "--draft-steps 2")
    with pytest.raises(ConfigError, match="outside the target's vocabulary of 5"):
        read_outputs(str(folder), 5, name, length)
    with pytest.raises(VocabularyMismatchError, match="another vocabulary"):
        read_outputs(str(folder), 1000, "other", length)
    distil.recorded = tmp_path / "empty"
    distil.recorded.mkdir()
    assert "cannot be used" in distil.refused(tmp_path / "x")


def test_several_processes_take_the_steps_of_one(distil: Distil, tmp_path: Path) -> None:
    """Two that train side by side make the steps of one that takes both of their batches; what they evaluate is the same."""
    two, one, less = (tmp_path / name for name in ("two", "one", "less"))
    more = "--batch-tokens 330 --epochs 3 --hidden-layers 1,2,3 --draft-steps 2 --held-out 0.1"
    command = ["foresay", "distill", str(two)]
    command += asked(distil.target, distil.recorded, f"--states {tmp_path / 's'} {more}")
    printed = run_two(command, tmp_path)
    assert "".join(printed).count("tokens per pass") == 1, "one of them speaks"
    for out, batches in ((one, 2), (less, 1)):
        distil(out, f"{more} --accumulate {batches}")
    theirs, ours, others = (read_log(out) for out in (two, one, less))
    assert theirs.keys() == ours.keys() != others.keys()
    for step, line in ours.items():
        for name in {"tokens", "loss", "divergence", "tokens_per_pass", "acceptance_1", "agreement_2"} & line.keys():
            assert theirs[step][name] == pytest.approx(line[name], rel=2e-3, abs=2e-3), (step, name)
    weights, same, control = (load_file(out / "checkpoint" / "weights.safetensors") for out in (two, one, less))
    for name, weight in same.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-4)
    assert any(not torch.equal(weight, weights[name]) for name, weight in control.items())
    assert "processes=2, not 1" in distil.refused(two, more)


def test_a_head_goes_on_with_another_schedule_or_other_tokens(distil: Distil, tmp_path: Path) -> None:
    """Such as those of new texts: the head's weights do not depend on the tokens that it drafts."""
    first, then, fewer, own, whole = (tmp_path / name for name in ("first", "then", "fewer", "own", "whole"))
    shape = "--hidden-layers 1,2,3 --draft-steps 2 --vocabulary-size 64 --feed-forward 40"
    distil(first, f"--epochs 12 --learning-rate 1e-2 {shape}")
    given = f"--from {first} --draft-steps 2 --learning-rate 1e-4"
    distil(then, given)
    ended, began = read_log(first), read_log(then)
    kept = max(ended.values(), key=lambda line: line["tokens_per_pass"])  # the first of the best
    assert began[0]["divergence"] == pytest.approx(kept["divergence"], abs=0.05)
    assert began[0]["divergence"] < 0.7 * ended[0]["divergence"], "not anew"
    assert json.loads((then / "foresay.json").read_text())["from"] == str(first)
    printed = distil(fewer, f"{given} --vocabulary-size 24")
    assert "it drafts 24 tokens, " in printed and "% of those that the target generated" in printed
    before, after = read_draft(first), read_draft(fewer)
    assert before.token_ids is not None and after.token_ids is not None and after.config.draft_vocab_size == 24
    assert len(after.token_ids) == 24 and set(after.token_ids.tolist()) < set(before.token_ids.tolist())
    assert json.loads((fewer / "config.json").read_text())["draft_vocab_size"] == 24
    size = json.loads((distil.target / "config.json").read_text())["vocab_size"]
    distil(whole, f"{given} --vocabulary-size {size}")
    assert read_draft(whole).token_ids is None
    distil(own, "--draft-steps 2 --own-output-layer")
    for more, message in (
        (f"{given} --hidden-layers 1", "--from sets the shape"),
        (f"--from {own} --draft-steps 2 --vocabulary-size 24", "output layer"),
    ):
        assert message in distil.refused(tmp_path / "x", more)
    distil.target = tiny.save(tmp_path / "other", tiny.llama(hidden_size=48))
    assert "head" in distil.refused(tmp_path / "y", given)


def test_a_run_that_ended_before_its_first_evaluation_goes_on(distil: Distil, tmp_path: Path) -> None:
    out, given = tmp_path / "head", "--hidden-layers 1,2,3 --epochs 0.2"
    distil(out, given)
    shutil.rmtree(out / "checkpoint")
    for path in out.iterdir():
        if path.name != "metrics.jsonl":
            path.unlink()
    distil(out, given)
    assert "--draft-steps 5" in distil.refused(out, "--hidden-layers 1,2,3 --draft-steps 4")


def test_ctrl_c_leaves_a_checkpoint_that_goes_on(
    distil: Distil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the fourth step."""
    out, rate, left = tmp_path / "head", Fitting.rate, [None] * 3

    def interrupted(self: Fitting, share: float) -> float:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return rate(self, share)

    monkeypatch.setattr(Fitting, "rate", interrupted)
    command = ["distill", str(out), *asked(distil.target, distil.recorded, "--epochs 2")]
    assert distil.shell(*command) == (130, "", "")
    monkeypatch.undo()
    assert "3 of them earlier" in distil.shell.out(*command)


def test_options_that_are_refused(distil: Distil, tmp_path: Path) -> None:
    for options, message in (
        ("--kind medusa", "--kind medusa"),
        ("--block-size 4", "--block-size applies to --kind block and dflash2"),
        ("--kind dflash2 --from x --rank 2", "--from sets the shape"),
        ("--kind block --draft-steps 3", "--draft-steps applies to --kind head"),
        ("--kind block --own-output-layer", "--own-output-layer applies to --kind head"),
        ("--kind block --block-size 1", "--block-size 1"),
        ("--kind block --draft x", "--draft applies to --kind model"),
        ("--order 3", "--order applies to --kind ngram"),
        ("--kind model", "--kind model needs --draft"),
        ("--loss ce", "applies to block drafters"),
        ("--kind block --from x --layers 2", "--from sets the shape"),
        ("--loss kl", "--loss kl"),
        ("--hidden-layers 1,x", "--hidden-layers 1,x"),
        ("--hidden-layers 1,9", "--hidden-layers [1, 9]"),
        ("--vocabulary-size 9999", "vocabulary-size"),
    ):
        assert message in distil.refused(tmp_path / "x", options), options


def test_what_is_refused(distil: Distil, tmp_path: Path) -> None:
    out, recorded, model = tmp_path / "head", distil.recorded, ("--model", str(distil.target))
    assert "--outputs" in distil.shell.refused("distill", str(out), *model)
    assert "no such folder" in distil.shell.refused("generate", *model, "--drafter", "head(/nowhere)", "x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    assert "contains something else, and is not changed" in distil.refused(tmp_path / "other")
    distil.recorded = tmp_path / "nothing.jsonl"
    assert "nothing.jsonl" in distil.refused(out)
    header, rest = recorded.read_text().split("\n", 1)
    distil.recorded.write_text(json.dumps(json.loads(header) | {"tokenizer": "another"}) + "\n" + rest)
    distil.target = tiny.save(tmp_path / "chat", chat=True)
    assert "tokenizer" in distil.refused(out)


@pytest.mark.parametrize("draft", ["head", pytest.param("model", marks=pytest.mark.long)])
def test_a_full_disk_is_one_line(draft: str, distil: Distil, pruned: Path, tmp_path: Path) -> None:
    out = tmp_path / "draft"
    given = "--epochs 0.2 " + ("--hidden-layers 1,2,3" if draft == "head" else f"--draft {pruned} --all-weights")
    with full_disk(20_000):
        assert distil.refused(out, given) == f"OUTPUT {out} cannot be written: File too large"
    assert not [path for path in out.rglob("*") if path.suffix in (".safetensors", ".work")]
    distil(out, given)
