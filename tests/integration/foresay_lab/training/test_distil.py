"""Distilling: what it computes next to plain loops, what it reaches, and what a run that was killed goes on with."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import HeadDrafter, ModelDrafter
from foresay.errors import ConfigError
from foresay.models.drafts.base import target_rows
from foresay.models.drafts.files import read_draft
from foresay.models.drafts.head import HeadModel
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import trimmed_head
from foresay.models.sources.wrapping import LoadedModel
from foresay_lab.training import fitting
from foresay_lab.training.batches import batch_of, epoch_batches
from foresay_lab.training.curves import draw_curves, read_log
from foresay_lab.training.distil import distil, distil_model
from foresay_lab.training.evaluation import evaluate
from foresay_lab.training.fitting import Plan
from foresay_lab.training.losses import Objective
from foresay_lab.training.new_drafts import DraftShape, new_draft
from foresay_lab.training.outputs import Text, coverage, frequent_tokens, split, texts_of
from foresay_lab.training.students import HeadStudent, ModelStudent
from foresay_lab.training.teacher import CachedPasses, TargetPasses, TeacherHead
from helpers.families import make
from helpers.heads import random_head
from helpers.support import run
from helpers.training import NEW, VOCAB, loaded, written

CHEAP = Plan(epochs=1, batch_tokens=400, rate=3e-3, evaluate_minutes=60)


def shape(**changes: Any) -> DraftShape:
    return DraftShape(hidden_layers=(1, 2, 3), vocabulary_size=VOCAB, **changes)


class TestOutputs:
    def test_the_same_texts_are_held_out_whatever_else_there_is(self) -> None:
        target = loaded()
        texts = written(target, 40)
        learn, rest = split(texts, 0.2)
        again = split([*reversed(texts)], 0.2)[1]
        assert 3 <= len(rest) <= 14 and {t.tokens.tobytes() for t in rest} == {t.tokens.tobytes() for t in again}
        fewer = split(texts[:25], 0.2)
        assert len(fewer[1]) > 1 and {t.tokens.tobytes() for t in fewer[1]} <= {t.tokens.tobytes() for t in rest}
        assert {t.tokens.tobytes() for t in fewer[0]} <= {t.tokens.tobytes() for t in learn}, (
            "none of them later either"
        )
        assert {t.tokens.tobytes() for t in rest}.isdisjoint({t.tokens.tobytes() for t in learn})
        twice = split([*texts, *texts], 0.2)
        assert len(twice[0]) + len(twice[1]) == len({t.tokens.tobytes() for t in texts}), "no text is on both sides"
        with pytest.raises(ConfigError, match="fewer than two"):
            split([texts[0], texts[0]], 0.5)

    def test_frequent_tokens(self) -> None:
        texts = [Text(np.array([9, 9, 9, 1, 2, 2, 5]), 3), Text(np.array([8, 2, 1]), 1)]
        assert frequent_tokens(texts, 2).tolist() == [1, 2]
        assert frequent_tokens(texts, 2, always=[7]).tolist() == [2, 7]
        assert frequent_tokens(texts, 5).tolist() == [1, 2, 5, 8, 9]
        assert coverage(texts, None) == 1 and coverage(texts, frequent_tokens(texts, 1)) == 0.5
        assert frequent_tokens(texts, 8).tolist() == [0, 1, 2, 3, 4, 5, 8, 9][:8]

    def test_documents(self) -> None:
        texts = texts_of([list(range(10)), [1]], 4)
        assert [t.tokens.tolist() for t in texts] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert {t.start for t in texts} == {1}

    def test_an_epoch_holds_each_text_once_and_depends_on_the_seed_alone(self) -> None:
        texts = [Text(np.arange(2 + i % 30), 1) for i in range(100)]
        order = epoch_batches(texts, 64, 3, 1)
        assert sorted(i for batch in order for i in batch) == list(range(100))
        assert all(len(b) * max(len(texts[i].tokens) for i in b) <= 64 for b in order)
        assert order == epoch_batches(texts, 64, 3, 1) != epoch_batches(texts, 64, 3, 2)


class TestTeacher:
    def test_laws_are_those_of_the_target(self, tmp_path: Path) -> None:
        """Some tokens and all, kept and computed."""
        target = loaded()
        text, ids = written(target, 1)[0], torch.tensor([3, 4, 17])
        model: Any = target.model
        shown = TargetPasses(model, (1, 3))(text)
        logits = model.uncached(torch.from_numpy(text.tokens)[None])[0].float()
        wanted = torch.softmax(logits, -1)
        for some, head in ((wanted, TeacherHead(model, None)), (wanted[:, ids], TeacherHead(model, ids))):
            torch.testing.assert_close(head.probs(shown.last, shown.log_sum), some, atol=1e-5, rtol=1e-3)
        assert shown.states.shape == (len(text.tokens), 64)
        kept = CachedPasses(tmp_path, TargetPasses(model, (1, 3)))
        for _ in range(2):
            again = kept(text)
            assert torch.equal(again.states, shown.states) and torch.equal(again.log_sum, shown.log_sum)
        other = CachedPasses(tmp_path, TargetPasses(model, (1, 2)))
        assert torch.equal(other(text).states[:, :32], shown.states[:, :32]), "the first of both"
        assert torch.equal(other(text).states, TargetPasses(model, (1, 2))(text).states), "of other layers"
        assert torch.equal(kept(text).states, shown.states), "which did not replace these"
        assert CachedPasses(tmp_path, TargetPasses(model, ()))(text).states.shape == (len(text.tokens), 0)
        assert len(list(tmp_path.rglob("*.safetensors"))) == 1
        with torch.no_grad():
            model.model.get_input_embeddings().weight[3] += 0.01
        CachedPasses(tmp_path, TargetPasses(model, ()))(text)
        assert len(list(tmp_path.rglob("*.safetensors"))) == 2, "other weights under the same name"

    def test_texts_that_were_read_are_not_read_again_beside_new_ones(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
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
        monkeypatch.setattr(CachedPasses, "_read", lambda *_: pytest.fail("what is there is read when it is looked at"))
        kept.prepare(texts[0])

    def test_a_file_that_was_cut_short_is_named(self, tmp_path: Path) -> None:
        target = loaded()
        texts = written(target, 1)
        CachedPasses(tmp_path, TargetPasses(target.model, ())).prepare(texts[0])  # type: ignore[arg-type]
        path = next(tmp_path.rglob("*.safetensors"))
        path.write_bytes(path.read_bytes()[:50])
        with pytest.raises(ConfigError, match=path.name):
            CachedPasses(tmp_path, TargetPasses(target.model, ()))(texts[0])  # type: ignore[arg-type]


class TestQuality:
    @pytest.mark.parametrize("ids", [None, list(range(0, VOCAB, 2))])
    def test_tokens_per_pass_are_those_of_decoding(self, ids: list[int] | None) -> None:
        """The result of evaluating a head is what the engine does with it, pass by pass."""
        target = loaded()
        model: Any = target.model
        texts = written(target, 12)
        head = random_head(model, layers=(1, 2, 3), ids=ids, gain=1.5)
        learn_a_little(head, target, texts)
        student = HeadStudent(head, model, steps=4, decay=0.8)
        passes = TargetPasses(model, (1, 2, 3))
        batch = batch_of(range(len(texts)), texts, lambda i: passes(texts[i]))
        quality = evaluate(student, [batch], torch.device("cpu"))
        for length, wanted in enumerate(quality.tokens_per_pass, 1):
            drafter = HeadDrafter(HeadModel(head, model), VOCAB)
            prompts = [text.tokens[: text.start].tolist() for text in texts]
            params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
            outputs, steps, _ = run(model, prompts, params, drafter=drafter, gamma=length)
            assert outputs == [text.tokens[text.start :].tolist() for text in texts]
            assert sum(len(s.token_ids) for s in steps) / len(steps) == pytest.approx(wanted, abs=0.02)
        assert quality.tokens_per_pass[-1] > 1.2, "some draft tokens were right"

    @pytest.mark.parametrize("cut", [False, True])
    def test_a_draft_model_too(self, cut: bool) -> None:
        """cut: to half of the tokens, as it drafts and as it is verified."""
        target = loaded()
        kept = torch.arange(0, VOCAB, 2) if cut else None
        draft = CausalModel(make("llama", 1, vocab_size=VOCAB, num_hidden_layers=2, tie_word_embeddings=False))
        texts = written(target, 8)
        passes = TargetPasses(target.model, ())  # type: ignore[arg-type]
        batch = batch_of(range(len(texts)), texts, lambda i: passes(texts[i]))
        student = ModelStudent(
            make("llama", 1, vocab_size=VOCAB, num_hidden_layers=2, tie_word_embeddings=False),
            target.model,  # type: ignore[arg-type]
            kept,
        )
        draft = draft if kept is None else trimmed_head(draft, kept)
        quality = evaluate(student, [batch], torch.device("cpu"))
        prompts = [text.tokens[: text.start].tolist() for text in texts]
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
        _, steps, _ = run(target.model, prompts, params, drafter=ModelDrafter(draft, VOCAB), gamma=3)
        found = sum(len(s.token_ids) for s in steps) / len(steps)
        assert found == pytest.approx(quality.tokens_per_pass[2], abs=0.02)


@torch.no_grad()
def test_a_draft_that_is_cut_learns_the_tokens_that_it_keeps() -> None:
    """Its distribution is over those alone; what the target assigns to others counts as the rest, which it cannot have."""
    target, text = loaded(), written(loaded(), 1, new=9)[0]
    model: Any = target.model
    weights = make("llama", 1, vocab_size=VOCAB, num_hidden_layers=2, tie_word_embeddings=False)
    kept = torch.arange(1, VOCAB, 3)
    batch = batch_of([0], [text], lambda i: TargetPasses(model, ())(text))
    total, count = ModelStudent(weights, model, kept)(batch, Objective.parse("tv"))
    ids = torch.from_numpy(text.tokens.astype("int64"))[None]
    p = model.uncached(ids)[0].float().softmax(-1)[text.start - 1 : -1, kept]
    q = weights(ids).logits[0].float()[text.start - 1 : -1, kept].softmax(-1)
    wanted = ((p - q).abs().sum(-1) + 1 - p.sum(-1)).sum() / 2
    assert float(total) == pytest.approx(float(wanted), abs=1e-3) and int(count) == len(p)
    whole, _ = ModelStudent(weights, model)(batch, Objective.parse("tv"))
    assert abs(float(whole) - float(wanted)) > 0.01, "control: over all tokens it is another loss"


def learn_a_little(head: Any, target: LoadedModel, texts: list[Text], steps: int = 40) -> None:
    """Plain steps, so that draft tokens are sometimes right."""
    model: Any = target.model
    student = HeadStudent(head, model, steps=3, decay=0.8)
    passes = TargetPasses(model, (1, 2, 3))
    batch = batch_of(range(len(texts)), texts, lambda i: passes(texts[i]))
    optimiser = torch.optim.AdamW(student.parameters(), lr=3e-3)
    for _ in range(steps):
        total, weight = student(batch, Objective.parse("forward_kl"))
        (total / weight).backward()
        optimiser.step()
        optimiser.zero_grad()


@torch.no_grad()
def test_the_loss_is_the_divergence_of_what_was_drafted() -> None:
    """One text by hand: which distribution is compared with which. Control: distributions of the neighbouring position."""
    target = loaded()
    model: Any = target.model
    text = written(target, 1, new=9)[0]
    head = random_head(model, layers=(1, 2, 3), gain=1.0)
    student = HeadStudent(head, model, steps=3, decay=0.5)
    shown = TargetPasses(model, (1, 2, 3))(text)
    total, weight = student(batch_of([0], [text], lambda i: shown), Objective.parse("forward_kl"))
    distributions = torch.softmax(model.uncached(torch.from_numpy(text.tokens)[None])[0].float(), -1)
    embedded = model.model.get_input_embeddings()(torch.from_numpy(text.tokens)[None, 1:])
    unrolled = head.module.unrolled(shown.states[None, :-1].float(), torch.nn.functional.pad(embedded, (0, 0, 0, 2)), 3)

    def by_hand(shift: int) -> tuple[float, float]:
        sums = [0.0, 0.0]
        for step in range(3):
            for pair in range(len(text.tokens) - 1):
                place = pair + 1 + step
                if not text.start - 1 <= place < len(text.tokens) - 1:
                    continue
                q = torch.softmax(target_rows(model, None) @ unrolled[step][0, pair], -1)
                p = distributions[place + shift]
                sums[0] += 0.5**step * float((p * (p.clamp(min=1e-9) / q.clamp(min=1e-9)).log()).sum())
                sums[1] += 0.5**step
        return sums[0], sums[1]

    assert (float(total), float(weight)) == pytest.approx(by_hand(0), rel=1e-3)
    assert float(total) != pytest.approx(by_hand(-1)[0], rel=1e-2)


class TestDistilling:
    def test_a_head_learns_a_random_target(self, tmp_path: Path) -> None:
        """From chance to more than half of its draft tokens accepted, and the folder drafts."""
        target = loaded()
        learn, rest = split(written(target, 150), 0.1)
        head = new_draft("head", target, learn, shape(), 0)
        plan = Plan(epochs=12, batch_tokens=500, rate=1.5e-2, evaluate_minutes=60)
        report = distil(target, head, learn, rest, plan, Objective.parse("forward_kl"), tmp_path, steps=3)
        lines = list(read_log(tmp_path).values())
        assert lines[0]["acceptance_1"] < 0.1 and lines[-1]["acceptance_1"] > 0.5
        assert report.state.best == pytest.approx(lines[-1]["tokens_per_pass"], abs=1e-3)
        drafter = HeadDrafter(HeadModel(read_draft(tmp_path), target.model), VOCAB)  # type: ignore[arg-type]
        prompts = [text.tokens[: text.start].tolist() for text in rest]
        params = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
        outputs, steps, _ = run(target.model, prompts, params, drafter=drafter, gamma=3)
        assert outputs == [text.tokens[text.start :].tolist() for text in rest]
        assert sum(len(s.token_ids) for s in steps) / len(steps) > 1.6
        assert draw_curves(tmp_path, read_log(tmp_path)) and (tmp_path / "curves.png").stat().st_size > 5000

    def test_a_model_learns_too_and_loads_as_any_other(self, tmp_path: Path) -> None:
        target = loaded()
        learn, rest = split(written(target, 120), 0.1)
        draft = make("llama", 7, vocab_size=VOCAB, num_hidden_layers=1, tie_word_embeddings=False)
        plan = Plan(epochs=12, batch_tokens=500, rate=1.5e-2, evaluate_minutes=60)
        distil_model(
            target, draft, None, learn, rest, plan, Objective.parse("forward_kl"), tmp_path, freeze_embeddings=False
        )
        lines = list(read_log(tmp_path).values())
        assert lines[0]["acceptance_1"] < 0.1 and lines[-1]["acceptance_1"] > 0.4
        assert CausalModel(AutoModelForCausalLM.from_pretrained(tmp_path)).vocab_size == VOCAB

    def test_frozen_embeddings_stay(self, tmp_path: Path) -> None:
        target = loaded()
        learn, rest = split(written(target, 20), 0.2)
        draft = make("llama", 7, vocab_size=VOCAB, num_hidden_layers=1, tie_word_embeddings=True)
        before = draft.get_input_embeddings().weight.clone()
        layer = draft.model.layers[0].mlp.down_proj.weight.clone()
        distil_model(target, draft, None, learn, rest, CHEAP, Objective.parse("tv=0.5,reverse_kl=1"), tmp_path)
        assert torch.equal(draft.get_input_embeddings().weight, before)
        assert not torch.equal(draft.model.layers[0].mlp.down_proj.weight, layer)

    @pytest.mark.parametrize("states", [False, True])
    def test_a_run_that_was_killed_goes_on_as_if_it_had_not(
        self, states: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = loaded()
        learn, rest = split(written(target, 40), 0.1)
        kept = tmp_path / "states" if states else None
        objective = Objective.parse("forward_kl")

        def go(folder: Path, **changes: Any) -> Any:
            folder.mkdir(exist_ok=True)
            head = new_draft("head", target, learn, shape(own_head=True), 0)
            plan = Plan(**{"epochs": 3, "batch_tokens": 400, "rate": 3e-3, "evaluate_minutes": 60, **changes})
            return distil(target, head, learn, rest, plan, objective, folder, steps=2, states=kept)

        whole = go(tmp_path / "whole")
        step, calls = fitting.Fitting._step, []

        def killed(self: Any, share: float) -> None:
            calls.append(1)
            if len(calls) == 6:
                raise KeyboardInterrupt
            step(self, share)

        monkeypatch.setattr(fitting.Fitting, "_step", killed)
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path / "cut")
        monkeypatch.undo()
        report = go(tmp_path / "cut")
        assert report.resumed_at == 5 and report.state.step == whole.state.step
        ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("cut", "whole"))
        for name, weight in theirs.items():
            assert torch.equal(weight, ours[name]), name
        with pytest.raises(ConfigError, match=r"rate=0.003.*0.1"):
            go(tmp_path / "cut", rate=0.1)
        again = go(tmp_path / "cut")
        assert again.state.step == whole.state.step, "it is done"

        from foresay_lab.training.optimisers import Muon

        stepped, turns = Muon.step, []

        def pressed(self: Any, closure: Any = None) -> None:
            turns.append(1)
            if len(turns) == 4:
                os.kill(os.getpid(), signal.SIGINT)  # one optimiser has made its step, the other has not
            stepped(self, closure)

        monkeypatch.setattr(Muon, "step", pressed)
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path / "pressed")
        monkeypatch.undo()
        turns.clear()

        def pressed_twice(self: Any, closure: Any = None) -> None:
            turns.append(1)
            for _ in range(2 * (len(turns) == 2)):
                os.kill(os.getpid(), signal.SIGINT)
            stepped(self, closure)

        monkeypatch.setattr(Muon, "step", pressed_twice)
        with pytest.raises(KeyboardInterrupt):
            go(tmp_path / "pressed")
        monkeypatch.undo()
        assert go(tmp_path / "pressed").resumed_at == 4, "half a step was not kept"
        ours = load_file(tmp_path / "pressed" / "model.safetensors")
        assert all(torch.equal(weight, ours[name]) for name, weight in theirs.items())

    def test_minutes_end_a_run_and_the_best_is_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a clock that advances 50 ms whenever it is read."""
        ticks = itertools.count()
        monkeypatch.setattr(fitting, "perf_counter", lambda: next(ticks) * 0.05)
        target = loaded()
        learn, rest = split(written(target, 40), 0.2)
        plan = Plan(epochs=1000, minutes=0.05, batch_tokens=400, rate=3e-3, evaluate_minutes=0.01)
        report = distil(
            target, new_draft("head", target, learn, shape(), 0), learn, rest, plan, Objective.parse("tv"), tmp_path
        )
        lines = read_log(tmp_path)
        assert 3 <= report.state.elapsed_s < 4 and len(lines) >= 3
        best = max(lines.values(), key=lambda line: line["tokens_per_pass"])
        assert report.state.best == pytest.approx(best["tokens_per_pass"], abs=1e-4)
        note = json.loads((tmp_path / "foresay.json").read_text())
        assert note["kind"] == "head" and note["provenance"]["versions"]["torch"]

    def test_a_run_of_limited_time_has_batches_of_which_it_can_make_some(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The speed is given: batches of 90 tokens let fifty steps fit into the time left; a resumed run keeps them."""
        target = loaded()
        learn, rest = split(written(target, 60), 0.1)
        sizes: list[int] = []

        def order(texts: Any, tokens: int, seed: int, epoch: int) -> list[list[int]]:
            sizes.append(tokens)
            return epoch_batches(texts, tokens, seed, epoch)

        monkeypatch.setattr(fitting, "epoch_batches", order)
        monkeypatch.setattr(fitting.Fitting, "seconds_per_token", lambda self: 3600 / 50 / 90)

        def go(folder: str, **changes: Any) -> int:
            (tmp_path / folder).mkdir(exist_ok=True)
            sizes.clear()
            plan = Plan(**{"epochs": 0.2, "minutes": 60, "rate": 3e-3, "evaluate_minutes": 60, **changes})
            head, objective = new_draft("head", target, learn, shape(), 0), Objective.parse("tv")
            return int(distil(target, head, learn, rest, plan, objective, tmp_path / folder).state.batch_tokens)

        found = go("timed")
        assert 80 <= found <= 90 and sizes[0] == 4096, "the held-out texts are looked at before anything is timed"
        assert set(sizes[1:]) == {found}
        monkeypatch.setattr(fitting.Fitting, "seconds_per_token", lambda self: 1e-9)
        assert go("timed", epochs=0.4) == found, "one that goes on keeps its batches"
        assert go("fast") == 4096 and go("given", batch_tokens=300) == 300 and go("untimed", minutes=None) == 4096

    def test_batches_that_can_be_afforded(self) -> None:
        assert fitting.affordable_batch(0.01, 120) == 240, "240 tokens, 2.4 seconds, fifty times"
        assert fitting.affordable_batch(1e-6, 120) == 4096
        assert fitting.affordable_batch(10, 1) == fitting.affordable_batch(1, -3) == 2

    def test_timing_a_token_leaves_the_draft_as_it_was(self, tmp_path: Path) -> None:
        target = loaded()
        learn, rest = split(written(target, 10), 0.2)
        model: Any = target.model
        student = HeadStudent(new_draft("head", target, learn, shape(), 0), model, steps=2, decay=0.8)
        passes = TargetPasses(model, (1, 2, 3))
        corpora = [fitting.Corpus(texts, lambda i, texts=texts: passes(texts[i])) for texts in (learn, rest)]
        run = fitting.Fitting(student, Objective.parse("tv"), *corpora, Plan(minutes=1), tmp_path, lambda: None)
        before = {name: weight.clone() for name, weight in student.named_parameters()}
        assert run.seconds_per_token() > 0
        for name, weight in student.named_parameters():
            assert torch.equal(weight, before[name]) and weight.grad is None

    def test_wrong_plans(self) -> None:
        for changes in (
            {"rate": -1.0},
            {"batch_tokens": 1},
            {"precision": "fp8"},
            {"accumulate": 0},
            {"minutes": -1.0},
        ):
            with pytest.raises(ConfigError, match=next(iter(changes))):
                Plan(**changes)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="layers"):
            new_draft("head", loaded(), written(loaded(), 2), DraftShape(hidden_layers=(9,)), 0)
