"""Training of block drafters: the loss next to plain loops, what it reaches, and runs that were killed and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from foresay.drafters import BlockDrafter
from foresay.models.drafts.base import target_rows
from foresay.models.drafts.block import BlockModel
from foresay.models.drafts.block_config import SELECTOR, PathShape, Sight
from foresay.models.drafts.files import read_draft
from foresay.models.drafts.path import Step
from foresay_lab.training.curves import read_log
from foresay_lab.training.distil import distil, draft_learner
from foresay_lab.training.evaluation import evaluate
from foresay_lab.training.fitting import Plan
from foresay_lab.training.losses import Objective
from foresay_lab.training.new_drafts import DraftShape, kind_of, new_draft, resumed_draft, usual_block_layers
from foresay_lab.training.outputs import split
from foresay_lab.training.students import BlockStudent
from foresay_lab.training.teacher import TargetPasses
from helpers.blocks import random_block
from helpers.refusals import refused
from helpers.training import VOCAB, batch, loaded, tokens_per_pass, written


def shape(**changes: Any) -> DraftShape:
    return DraftShape(**{"hidden_layers": (1, 2, 3), "vocabulary_size": VOCAB, "layers": 1, "block_size": 4, **changes})


SHAPES: list[dict[str, Any]] = [
    {},
    {"from_anchor": False},
    {
        "from_anchor": False,
        "path": PathShape(SELECTOR, 6, candidates=5),
        "taps": (2, 8),
        "sights": [Sight(window=4)] * 2,
    },
    {"path": PathShape("rnn", 6)},
]


@pytest.mark.parametrize("made_as", SHAPES, ids=["block", "shifted", "selector", "rnn"])
@pytest.mark.parametrize("ids", [None, [0, *range(3, 40)]], ids=["all", "some"])
def test_the_loss_is_that_of_plain_loops(made_as: dict[str, Any], ids: list[int] | None) -> None:
    """Every block alone, every position of it by hand; control: a Markov head that reads the token after."""
    target = loaded()
    model: Any = target.model
    made = random_block(model, layers=(1, 3), size=4, ids=ids, gain=1.0, **made_as)
    from_anchor, path = made.config.from_anchor, made.module.path
    texts = written(target, 3, new=9)
    passes = TargetPasses(model, made.config.hidden_layers)
    student = BlockStudent(made, model, anchors=None, decay=0.5)
    total, weights = student(batch(target, texts, made.config.hidden_layers), Objective.parse("ce=0.1, tv=1.8"))
    rows = target_rows(model, None if ids is None else torch.tensor(ids))
    kept = list(range(VOCAB)) if ids is None else ids
    wanted = count = 0.0
    for text in texts:
        outputs, tokens = passes(text), text.tokens.tolist()
        p_all = torch.softmax(model.uncached(torch.tensor([tokens]))[0].float(), -1)
        for anchor in range(text.start - 1, len(tokens) - 1):
            block_ids = torch.tensor([[[tokens[anchor], *[made.config.mask_token_id] * 3]]])
            embedded = model.model.get_input_embeddings()(block_ids)
            found = made.module.blocks(outputs.states[None].float(), embedded, torch.tensor([[anchor]]))[0, 0]
            found = found[0 if from_anchor else 1 :]
            memory = torch.zeros(0 if path is None else path.state_size)
            for j, state in enumerate(found[: len(tokens) - 1 - anchor]):
                token, label = torch.tensor(tokens[anchor + j]), tokens[anchor + j + 1]
                logits = rows @ state
                scored = [logits]
                if path is not None:
                    step = Step(logits, state, token, embedded[0, 0, 0], torch.tensor(j), memory)
                    logits, memory = path.step(step, lambda weight, x: weight @ x)
                    scored = [logits] if made.config.convolution is None else [*scored, logits]
                p, loss = p_all[anchor + j][kept], torch.tensor(0.0)
                for one in scored:  # of a selector also those that choose its candidates
                    q = torch.softmax(one, -1)
                    ce = -q[kept.index(label)].clamp(min=1e-9).log() if label in kept else torch.tensor(0.0)
                    loss = loss + 0.1 * ce + 1.8 * ((p - q).abs().sum() + abs(1 - p.sum())) / 2
                head = made.module.confidence_head
                if head is not None and path is not None:
                    score = head.proj(torch.cat([state, path.markov_w1(token)]))[0]
                    accepted = torch.minimum(p, q).sum().detach()
                    loss = loss + torch.nn.functional.binary_cross_entropy_with_logits(score, accepted)
                wanted, count = wanted + 0.5**j * float(loss.detach()), count + 0.5**j
    assert float(weights) == pytest.approx(count, rel=1e-5)
    assert float(total.detach()) == pytest.approx(wanted, rel=2e-3)


def test_anchors_are_the_targets_own_positions_and_follow_the_seed() -> None:
    target = loaded()
    texts = written(target, 4)
    made = random_block(target.model, layers=(1,), size=4)  # type: ignore[arg-type]
    student = BlockStudent(made, target.model, anchors=6, decay=0.5)  # type: ignore[arg-type]
    mask, found = batch(target, texts, (1,)).loss_mask(), []
    for seed in (1, 1, 2):
        student.begin_batch(seed)
        anchors, valid = student._anchors(mask)
        assert anchors.shape == (4, 6) and bool(valid.all())
        for row, text in zip(anchors.tolist(), texts, strict=True):
            assert row == sorted(set(row)) and row[0] >= text.start - 1 and row[-1] < len(text.tokens) - 1
        found.append(anchors)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
    student.eval()
    assert student._anchors(mask)[0].shape[1] == int(mask.sum(1).max()), "evaluation takes all"


@pytest.mark.parametrize("ids", [None, [0, *range(3, 40)]], ids=["all", "some"])
def test_evaluation_counts_how_often_the_token_is_a_candidate(ids: list[int] | None) -> None:
    target = loaded()
    given, share = batch(target, written(target, 4), (1, 2, 3)), {}
    for name, made_as in (("selector", SHAPES[2]), ("markov", SHAPES[0])):
        draft = random_block(target.model, layers=(1, 2, 3), ids=ids, **made_as)  # type: ignore[arg-type]
        student = BlockStudent(draft, target.model, decay=1.0, anchors=None).eval()  # type: ignore[arg-type]
        share[name] = evaluate(student, [given], torch.device("cpu")).candidates
        among = [
            bool((one.unary[i].topk(5).indices == one.labels[i]).any())
            for one in student.comparisons(given)
            if one.unary is not None and one.labels is not None
            for i in range(len(one.rows))
        ]
        assert share[name] == (pytest.approx(sum(among) / len(among)) if name == "selector" else None)
    assert 0.0 < (share["selector"] or 0.0) < 1.0


@pytest.mark.parametrize("kind", ["block", "dflash2"])
def test_evaluation_counts_what_decoding_accepts(kind: str, tmp_path: Path) -> None:
    """Tokens per pass of the simulated loop equal those of drafting with the saved block drafter."""
    target = loaded()
    learn, rest = split(written(target, 40), 0.2)
    block = new_draft(kind, target, learn, shape(block_size=4 + (kind == "dflash2")), 0)
    plan = Plan(epochs=12, batch_tokens=600, rate=1e-2, evaluate_minutes=60)
    distil(target, draft_learner(target, block), learn, rest, plan, Objective.parse("forward_kl"), tmp_path)
    best = max(read_log(tmp_path).values(), key=lambda line: line["tokens_per_pass"])
    drafter = BlockDrafter(BlockModel(read_draft(tmp_path), target.model), VOCAB)  # type: ignore[arg-type]
    assert tokens_per_pass(target, rest, drafter, 4) == pytest.approx(best["tokens_per_pass"], rel=0.03)
    assert best["acceptance_1"] > 0.35 > 5 * 1 / VOCAB, "from chance to more than a third"
    assert ("candidates" in best) == (kind == "dflash2")


def test_defaults() -> None:
    for layers, chosen in ((30, (2, 15, 28)), (36, (2, 13, 23, 34)), (64, (2, 17, 32, 47, 62)), (4, (2,))):
        assert usual_block_layers(layers) == chosen
    target = loaded()
    texts = written(target, 4)
    made = new_draft("block", target, texts, DraftShape(), 0)
    assert made.config.num_layers == 1 and made.config.block_size == 7 and made.token_ids is None
    other = new_draft("dflash2", target, texts, DraftShape(), 0).config
    assert (kind_of(made.config), kind_of(other)) == ("block", "dflash2") and not other.from_anchor
    with refused("hidden_layers", 3):
        resumed_draft(loaded(layers=2), new_draft("block", target, texts, shape(), 0))
    evaluate(BlockStudent(made, target.model, anchors=None, decay=0.5), [], torch.device("cpu"))  # type: ignore[arg-type]
