"""Distilling: what it computes next to plain loops, what it reaches, and what a run that was killed goes on with."""

from __future__ import annotations

import itertools
import json
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from foresay.drafters import HeadDrafter, ModelDrafter
from foresay.errors import ConfigError
from foresay.models.drafts.base import target_rows
from foresay.models.drafts.files import read_draft
from foresay.models.drafts.head import HeadModel
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import trimmed_head
from foresay.models.sources.wrapping import LoadedModel
from foresay_lab.training import fitting, teacher
from foresay_lab.training.batches import epoch_batches
from foresay_lab.training.curves import draw_curves, read_log
from foresay_lab.training.distil import distil, draft_learner, model_learner
from foresay_lab.training.evaluation import evaluate
from foresay_lab.training.fitting import Plan
from foresay_lab.training.losses import Objective
from foresay_lab.training.new_drafts import DraftShape, new_draft
from foresay_lab.training.optimisers import Muon
from foresay_lab.training.outputs import Text, coverage, frequent_tokens, split, texts_of
from foresay_lab.training.students import HeadStudent, ModelStudent
from foresay_lab.training.teacher import CachedPasses, TargetPasses, TeacherHead
from helpers.families import make
from helpers.heads import random_head
from helpers.refusals import refused
from helpers.training import VOCAB, batch, loaded, tokens_per_pass, written

CHEAP = Plan(epochs=1, batch_tokens=400, rate=3e-3, evaluate_minutes=60)
LEARNING = Plan(epochs=12, batch_tokens=500, rate=1.5e-2, evaluate_minutes=60)
KL, TV = Objective.parse("forward_kl"), Objective.parse("tv")


def shape(**changes: Any) -> DraftShape:
    return DraftShape(hidden_layers=(1, 2, 3), vocabulary_size=VOCAB, **changes)


def small(seed: int = 7, layers: int = 1, tied: bool = False) -> Any:
    return make("llama", seed, vocab_size=VOCAB, num_hidden_layers=layers, tie_word_embeddings=tied)


def bytes_of(texts: list[Text]) -> set[bytes]:
    return {text.tokens.tobytes() for text in texts}


def test_the_same_texts_are_held_out_whatever_else_there_is() -> None:
    texts = written(loaded(), 40)
    learn, rest = split(texts, 0.2)
    assert 3 <= len(rest) <= 14 and bytes_of(rest) == bytes_of(split([*reversed(texts)], 0.2)[1])
    fewer = split(texts[:25], 0.2)
    assert len(fewer[1]) > 1 and bytes_of(fewer[1]) <= bytes_of(rest)
    assert bytes_of(fewer[0]) <= bytes_of(learn), "none of them later either"
    assert bytes_of(rest).isdisjoint(bytes_of(learn))
    assert sum(map(len, split([*texts, *texts], 0.2))) == len(bytes_of(texts)), "no text is on both sides"
    with pytest.raises(ConfigError, match="fewer than two"):
        split([texts[0], texts[0]], 0.5)


def test_frequent_tokens_documents_and_batches() -> None:
    texts = [Text(np.array([9, 9, 9, 1, 2, 2, 5]), 3), Text(np.array([8, 2, 1]), 1)]
    for count, always, chosen in (
        *((2, [], [1, 2]), (2, [7], [2, 7])),
        *((5, [], [1, 2, 5, 8, 9]), (8, [], [0, 1, 2, 3, 4, 5, 8, 9])),
    ):
        assert frequent_tokens(texts, count, always=always).tolist() == chosen
    assert coverage(texts, frequent_tokens(texts, 1)) == 0.5
    texts = texts_of([list(range(10)), [1]], 4)
    assert [t.tokens.tolist() for t in texts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert {t.start for t in texts} == {1}
    texts = [Text(np.arange(2 + i % 30), 1) for i in range(100)]
    order = epoch_batches(texts, 64, 3, 1)
    assert sorted(i for some in order for i in some) == list(range(100)), "an epoch holds each text once"
    assert all(len(some) * max(len(texts[i].tokens) for i in some) <= 64 for some in order)
    assert order == epoch_batches(texts, 64, 3, 1) != epoch_batches(texts, 64, 3, 2), "it depends on the seed alone"


def test_distributions_are_those_of_the_target(tmp_path: Path) -> None:
    """Some tokens and all, kept and computed; of other layers, and of other weights under the same name."""
    target = loaded()
    model: Any = target.model
    text, ids = written(target, 1)[0], torch.tensor([3, 4, 17])
    shown = TargetPasses(model, (1, 3))(text)
    wanted = torch.softmax(model.uncached(torch.from_numpy(text.tokens)[None])[0].float(), -1)
    for some, head in ((wanted, TeacherHead(model, None)), (wanted[:, ids], TeacherHead(model, ids))):
        torch.testing.assert_close(head.probs(shown.last, shown.log_sum), some, atol=1e-5, rtol=1e-3)
    assert shown.states.shape == (len(text.tokens), 64)

    def kept(*layers: int) -> Any:
        return CachedPasses(tmp_path, TargetPasses(model, layers))(text)

    for _ in range(2):
        assert torch.equal(kept(1, 3).states, shown.states) and torch.equal(kept(1, 3).log_sum, shown.log_sum)
    assert torch.equal(kept(1, 2).states, TargetPasses(model, (1, 2))(text).states)
    assert torch.equal(kept(1, 3).states, shown.states), "others did not replace these"
    assert kept().states.shape == (len(text.tokens), 0) and len(list(tmp_path.rglob("*.safetensors"))) == 1
    with torch.no_grad():
        model.model.get_input_embeddings().weight[3] += 0.01
    kept()
    files = list(tmp_path.rglob("*.safetensors"))
    assert len(files) == 2
    for path in files:
        path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ConfigError, match=r"\.safetensors"):
        kept()


def test_texts_that_were_read_are_not_read_again_with_new_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = loaded()
    texts, asked = written(target, 3), []

    class Counted(TargetPasses):
        def __call__(self, text: Text) -> Any:
            asked.append(text)
            return super().__call__(text)

    for some in (texts[:2], texts[::-1]):
        kept = CachedPasses(tmp_path, Counted(target.model, (1,)))  # type: ignore[arg-type]
        for text in some:
            assert kept(text).last.shape[0] == len(text.tokens)
    assert asked == texts
    names = SimpleNamespace(keys=lambda: ["1", "last", "log_sum"])  # what is there is read when it is needed
    monkeypatch.setattr(teacher, "safe_open", lambda *_: nullcontext(names))
    kept.prepare(texts[0])


def learn_a_little(head: Any, target: LoadedModel, texts: list[Text]) -> None:
    """Plain steps, so that draft tokens are sometimes right."""
    student = HeadStudent(head, target.model, steps=3, decay=0.8)  # type: ignore[arg-type]
    given, optimiser = batch(target, texts, (1, 2, 3)), torch.optim.AdamW(student.parameters(), lr=3e-3)
    for _ in range(40):
        total, weight = student(given, KL)
        (total / weight).backward()
        optimiser.step()
        optimiser.zero_grad()


@pytest.mark.parametrize("cut", [False, True], ids=["all", "some"])
def test_tokens_per_pass_are_those_of_decoding(cut: bool) -> None:
    """The result of evaluating is what the engine does with a head or a model, pass by pass; cut to half of the tokens, too."""
    target, ids = loaded(), torch.arange(0, VOCAB, 2) if cut else None
    model: Any = target.model
    texts = written(target, 12)
    head = random_head(model, layers=(1, 2, 3), ids=None if ids is None else ids.tolist(), gain=1.5)
    learn_a_little(head, target, texts)
    student = HeadStudent(head, model, steps=4, decay=0.8)
    quality = evaluate(student, [batch(target, texts, (1, 2, 3))], torch.device("cpu"))
    for length, wanted in enumerate(quality.tokens_per_pass, 1):
        drafter = HeadDrafter(HeadModel(head, model), VOCAB)
        assert tokens_per_pass(target, texts, drafter, length) == pytest.approx(wanted, abs=0.02)
    assert quality.tokens_per_pass[-1] > 1.2, "some draft tokens were right"
    draft = CausalModel(small(1, 2))
    quality = evaluate(ModelStudent(small(1, 2), model, ids), [batch(target, texts, ())], torch.device("cpu"))
    drafter = ModelDrafter(draft if ids is None else trimmed_head(draft, ids), VOCAB)
    assert tokens_per_pass(target, texts, drafter, 3) == pytest.approx(quality.tokens_per_pass[2], abs=0.02)


@torch.no_grad()
def test_a_draft_that_is_cut_learns_the_tokens_that_it_keeps() -> None:
    """Its distribution is over those alone; what the target assigns to others counts as the rest, which it cannot have."""
    target = loaded()
    model: Any = target.model
    [text], weights, kept = written(target, 1, new=9), small(1, 2), torch.arange(1, VOCAB, 3)
    given = batch(target, [text], ())
    total, count = ModelStudent(weights, model, kept)(given, TV)
    ids = torch.from_numpy(text.tokens.astype("int64"))[None]
    p = model.uncached(ids)[0].float().softmax(-1)[text.start - 1 : -1, kept]
    q = weights(ids).logits[0].float()[text.start - 1 : -1, kept].softmax(-1)
    wanted = ((p - q).abs().sum(-1) + 1 - p.sum(-1)).sum() / 2
    assert float(total) == pytest.approx(float(wanted), abs=1e-3) and int(count) == len(p)
    whole, _ = ModelStudent(weights, model)(given, TV)
    assert abs(float(whole) - float(wanted)) > 0.01, "control: over all tokens it is another loss"


@torch.no_grad()
def test_the_loss_is_the_divergence_of_what_was_drafted() -> None:
    """One text by hand: which distribution is compared with which. Control: distributions of the neighbouring position."""
    target = loaded()
    model: Any = target.model
    text = written(target, 1, new=9)[0]
    head = random_head(model, layers=(1, 2, 3), gain=1.0)
    total, weight = HeadStudent(head, model, steps=3, decay=0.5)(batch(target, [text], (1, 2, 3)), KL)
    shown = TargetPasses(model, (1, 2, 3))(text)
    distributions = torch.softmax(model.uncached(torch.from_numpy(text.tokens)[None])[0].float(), -1)
    embedded = model.model.get_input_embeddings()(torch.from_numpy(text.tokens)[None, 1:])
    unrolled = head.module.unrolled(shown.states[None, :-1].float(), torch.nn.functional.pad(embedded, (0, 0, 0, 2)), 3)

    def by_hand(shift: int) -> tuple[float, float]:
        sums = [0.0, 0.0]
        for step in range(3):
            for pair in range(len(text.tokens) - 1):
                position = pair + 1 + step
                if not text.start - 1 <= position < len(text.tokens) - 1:
                    continue
                q = torch.softmax(target_rows(model, None) @ unrolled[step][0, pair], -1)
                p = distributions[position + shift]
                sums[0] += 0.5**step * float((p * (p.clamp(min=1e-9) / q.clamp(min=1e-9)).log()).sum())
                sums[1] += 0.5**step
        return sums[0], sums[1]

    assert (float(total), float(weight)) == pytest.approx(by_hand(0), rel=1e-3)
    assert float(total) != pytest.approx(by_hand(-1)[0], rel=1e-2)


def test_a_head_learns_a_random_target(tmp_path: Path) -> None:
    """From chance to more than half of its draft tokens accepted, and the folder drafts."""
    target = loaded()
    learn, rest = split(written(target, 100), 0.1)
    head = draft_learner(target, new_draft("head", target, learn, shape(), 0), steps=3)
    report = distil(target, head, learn, rest, LEARNING, KL, tmp_path)
    lines = list(read_log(tmp_path).values())
    assert lines[0]["acceptance_1"] < 0.1 and lines[-1]["acceptance_1"] > 0.5
    assert report.state.best == pytest.approx(lines[-1]["tokens_per_pass"], abs=1e-3)
    drafter = HeadDrafter(HeadModel(read_draft(tmp_path), target.model), VOCAB)  # type: ignore[arg-type]
    assert tokens_per_pass(target, rest, drafter, 3) > 1.6
    assert draw_curves(tmp_path, read_log(tmp_path)) and (tmp_path / "curves.png").stat().st_size > 5000


def test_a_model_learns_too_and_loads_as_any_other(tmp_path: Path) -> None:
    """Embeddings that are frozen stay."""
    target = loaded()
    learn, rest = split(written(target, 90), 0.1)
    distil(target, model_learner(target, small(), None, freeze_embeddings=False), learn, rest, LEARNING, KL, tmp_path)
    lines = list(read_log(tmp_path).values())
    assert lines[0]["acceptance_1"] < 0.1 and lines[-1]["acceptance_1"] > 0.4
    assert CausalModel(AutoModelForCausalLM.from_pretrained(tmp_path)).vocab_size == VOCAB
    (tmp_path / "frozen").mkdir()
    draft = small(tied=True)
    before, layer = draft.get_input_embeddings().weight.clone(), draft.model.layers[0].mlp.down_proj.weight.clone()
    mixed = Objective.parse("tv=0.5,reverse_kl=1")
    distil(target, model_learner(target, draft, None), learn[:20], rest, CHEAP, mixed, tmp_path / "frozen")
    assert torch.equal(draft.get_input_embeddings().weight, before)
    assert not torch.equal(draft.model.layers[0].mlp.down_proj.weight, layer)


@pytest.mark.parametrize("kind", ["head", "block"])
def test_a_run_that_was_killed_goes_on_as_if_it_had_not(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block drafter's anchors are those of their step; its target's states are kept."""
    target = loaded()
    learn, rest = split(written(target, 40), 0.1)
    options = {"steps": 2} if kind == "head" else {"anchors": 5}
    states = None if kind == "head" else tmp_path / "states"

    def go(name: str, **changes: Any) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        made = shape(own_head=True) if kind == "head" else shape(layers=1, block_size=4)
        plan = Plan(**{"epochs": 3, "batch_tokens": 400, "rate": 3e-3, "evaluate_minutes": 60, **changes})
        draft = draft_learner(target, new_draft(kind, target, learn, made, 0), **options)
        return distil(target, draft, learn, rest, plan, KL, tmp_path / name, states=states)

    def interrupted(name: str, owner: Any, method: str, stop: Any) -> None:
        """Run until the method, in the call of which `stop` is called with its number, ends the run."""
        honest, calls = getattr(owner, method), itertools.count(1)
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, lambda self, *args: (stop(next(calls)), honest(self, *args))[1])
            with pytest.raises(KeyboardInterrupt):
                go(name)

    def killed(call: int) -> None:
        if call == 6:
            raise KeyboardInterrupt

    def as_whole(name: str) -> None:
        theirs = load_file(tmp_path / "whole" / "model.safetensors")
        ours = load_file(tmp_path / name / "model.safetensors")
        assert all(torch.equal(weight, ours[key]) for key, weight in theirs.items())

    whole = go("whole")
    interrupted("cut", fitting.Fitting, "rate", killed)
    report = go("cut")
    assert report.resumed_at == 5 and report.state.step == whole.state.step
    as_whole("cut")
    with pytest.raises(ConfigError, match=r"rate=0.003.*0.1"):
        go("cut", rate=0.1)
    assert go("cut").state.step == whole.state.step, "it is done"
    if kind == "head":
        # one optimiser has made its step, the other has not; then twice within a step
        interrupted("pressed", Muon, "step", lambda call: os.kill(os.getpid(), signal.SIGINT) if call == 4 else None)
        twice = lambda call: [os.kill(os.getpid(), signal.SIGINT) for _ in range(2 * (call == 2))]  # noqa: E731
        interrupted("pressed", Muon, "step", twice)
        assert go("pressed").resumed_at == 4, "half a step was not kept"
        as_whole("pressed")


def test_minutes_end_a_run_and_the_best_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that advances 50 ms whenever it is read."""
    ticks = itertools.count()
    monkeypatch.setattr(fitting, "perf_counter", lambda: next(ticks) * 0.05)
    target = loaded()
    learn, rest = split(written(target, 40), 0.2)
    plan = Plan(epochs=1000, minutes=0.05, batch_tokens=400, rate=3e-3, evaluate_minutes=0.01)
    head = draft_learner(target, new_draft("head", target, learn, shape(), 0))
    report = distil(target, head, learn, rest, plan, TV, tmp_path)
    lines = read_log(tmp_path)
    assert 3 <= report.state.elapsed_s < 4 and len(lines) >= 3
    best = max(lines.values(), key=lambda line: line["tokens_per_pass"])
    assert report.state.best == pytest.approx(best["tokens_per_pass"], abs=1e-4)
    note = json.loads((tmp_path / "foresay.json").read_text())
    assert note["kind"] == "head" and note["provenance"]["versions"]["torch"]


def test_a_run_of_limited_time_has_batches_of_which_it_can_make_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The speed is given: batches of 90 tokens let fifty steps fit into the time left; a resumed run keeps them."""
    target = loaded()
    learn, rest = split(written(target, 60), 0.1)
    sizes: list[int] = []
    honest = fitting.Fitting.seconds_per_token

    def order(texts: Any, tokens: int, seed: int, epoch: int) -> list[list[int]]:
        sizes.append(tokens)
        return epoch_batches(texts, tokens, seed, epoch)

    monkeypatch.setattr(fitting, "epoch_batches", order)
    monkeypatch.setattr(fitting.Fitting, "seconds_per_token", lambda self: 3600 / 50 / 90)

    def go(folder: str, **changes: Any) -> int:
        (tmp_path / folder).mkdir(exist_ok=True)
        sizes.clear()
        plan = Plan(**{"epochs": 0.2, "minutes": 60, "rate": 3e-3, "evaluate_minutes": 60, **changes})
        head = draft_learner(target, new_draft("head", target, learn, shape(), 0))
        return int(distil(target, head, learn, rest, plan, TV, tmp_path / folder).state.batch_tokens)

    found = go("timed")
    assert 80 <= found <= 90 and sizes[0] == 4096, "the held-out texts are evaluated before anything is timed"
    assert set(sizes[1:]) == {found}
    monkeypatch.setattr(fitting.Fitting, "seconds_per_token", lambda self: 1e-9)
    assert go("timed", epochs=0.4) == found, "one that goes on keeps its batches"
    assert go("fast") == 4096 and go("given", batch_tokens=300) == 300 and go("untimed", minutes=None) == 4096
    assert fitting.affordable_batch(0.01, 120) == 240, "240 tokens, 2.4 seconds, fifty times"
    assert fitting.affordable_batch(1e-6, 120) == 4096
    assert fitting.affordable_batch(10, 1) == fitting.affordable_batch(1, -3) == 2

    student = HeadStudent(new_draft("head", target, learn, shape(), 0), target.model, steps=2, decay=0.8)  # type: ignore[arg-type]
    passes = TargetPasses(target.model, (1, 2, 3))  # type: ignore[arg-type]
    corpora = [fitting.Corpus(texts, lambda i, texts=texts: passes(texts[i])) for texts in (learn, rest)]
    run = fitting.Fitting(student, TV, *corpora, Plan(minutes=1), tmp_path, lambda: None)
    before = {name: weight.clone() for name, weight in student.named_parameters()}
    assert honest(run) > 0
    for name, weight in student.named_parameters():
        assert torch.equal(weight, before[name]) and weight.grad is None, "timing leaves the draft as it was"


def test_wrong_plans() -> None:
    wrong = {"rate": -1.0, "batch_tokens": 1, "precision": "fp8", "accumulate": 0, "minutes": -1.0}
    for name, value in wrong.items():
        with refused(name, value):
            Plan(**{name: value})  # type: ignore[arg-type]
