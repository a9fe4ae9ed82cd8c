"""The acceptance head: it recovers chances that are known, stops drafts by them, and never changes what is written."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import foresay
from foresay.decoding.capabilities import Capabilities
from foresay.decoding.protocols import KVCache, Logits, ModelInput, ModelOutput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter
from foresay.errors import ModelLoadError, ModelNotFoundError
from foresay.lengths import AcceptanceLength
from foresay.lengths.acceptance_head import AcceptanceHead
from foresay.models.table import TableModel
from foresay_lab.training.acceptance import AcceptancePlan, evaluate_acceptance, train_acceptance, weighted_loss
from foresay_lab.training.accepted import Examples, collect, load_examples, split_examples
from helpers import tiny
from helpers.distribution_cells import ALPHA, LENGTH, PARAMS, PROMPT, SIZE, TARGET
from helpers.distribution_cells import DRAFT as OTHER
from helpers.reference import joint
from helpers.refusals import refused, refuses
from helpers.sequential import value_of
from helpers.support import Loop, run

V = 4


class Shows(TableModel):
    """A table that shows which two tokens it read last, [V * V]."""

    capabilities = Capabilities(trees=True, num_layers=1)

    def forward(self, model_input: ModelInput, cache: KVCache) -> ModelOutput:
        starts = list(cache.lengths)
        before = [list(tokens) for tokens in cache.tokens]  # type: ignore[attr-defined]
        out = super().forward(dataclasses.replace(model_input, logits=Logits.ALL), cache)
        hidden = torch.zeros(*model_input.token_ids.shape, self.vocab_size**2)
        for i, fed in enumerate(model_input.token_ids.tolist()):
            row = model_input.first_row + i
            line = before[row][: starts[row]] + fed
            for column, token in enumerate(fed):
                at = starts[row] + column
                hidden[i, column, (line[at - 1] if at else 0) * self.vocab_size + token] = 1
        return ModelOutput(None if model_input.logits is Logits.NONE else model_input.scored(out.scores()), {1: hidden})


def by_last(seed: int, kind: type = TableModel) -> Any:
    """A table whose distributions depend on the last token alone."""
    distributions = TableModel.random(V, seed=seed).table[0]
    return kind(distributions.expand(V, V, V).clone())


P, Q = by_last(1), by_last(2, Shows)


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Examples:
    generator = foresay.load(P, drafter=lambda: ModelDrafter(Q, V), max_batch_size=16)
    folder = tmp_path_factory.mktemp("data")
    params = SamplingParams(temperature=1.0, max_new_tokens=60, seed=5)
    prompts = [[i % V, (i // V) % V] for i in range(96)]
    collect(generator, prompts, params, folder, length=5)
    return Examples.joined(load_examples(folder))


def chance(before: int, token: int) -> float:
    return min(1.0, float(P.table[0, before, token] / Q.table[0, before, token]))


def test_labels_are_the_chances_of_acceptance(examples: Examples) -> None:
    """The token that was consumed, whatever was accepted before it."""
    for pair, label in zip(examples.hidden.argmax(-1).tolist(), examples.labels.tolist(), strict=True):
        assert label == pytest.approx(chance(pair // V, pair % V), abs=1e-4)
    assert len(examples) > 3000 and set(examples.drafted.tolist()) == {0, 1, 2, 3}
    first = examples.drafted == 0
    assert bool((examples.reached[first] == 1).all()) and bool((examples.reached[~first] < 1).any())


@pytest.mark.parametrize("blocks", [0, 2])
def test_known_chances_are_recovered(examples: Examples, blocks: int) -> None:
    plan = AcceptancePlan(blocks=blocks, rejection_weight=1, mixing=1, epochs=30, rate=0.03)
    head = train_acceptance(examples, plan)
    seen = torch.bincount(examples.hidden.argmax(-1), minlength=V * V)
    found = head.accepted(torch.eye(V * V)).tolist()
    for pair in range(V * V):
        if seen[pair] > 40:
            assert found[pair] == pytest.approx(chance(pair // V, pair % V), abs=0.06)
    measured = evaluate_acceptance(head, examples)
    assert measured.divergence < 0.02 < measured.without and measured.error < 0.03
    assert sum(n for _, _, n in measured.bins) == len(examples)


def of(*sizes: int) -> list[Examples]:
    """Files of so many tokens, each recognisable by its label."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    labels = [torch.arange(end - size, end, dtype=torch.float64) for size, end in zip(sizes, ends, strict=True)]
    return [Examples(one[:, None], one, one, one.long()) for one in labels]


def test_a_tenth_of_the_tokens_is_held_out() -> None:
    for sizes, held in (
        ((500, 500), 100),  # half of the tokens before
        ((1000,), 100),
        ((10, 10, 980), 100),
        ((100,) * 10, 100),
        ((90,) * 11, 90),  # whole files, whose prompts are in no other
        ((70,) * 20, 140),
        ((400, 400, 200), 100),
        ((1, 1), 1),
    ):
        learn, rest = split_examples(of(*sizes))
        assert len(rest) == held and len(learn) + len(rest) == sum(sizes)
        labels = torch.cat([learn.labels, rest.labels]).tolist()
        assert labels == list(range(sum(sizes))), "each once, the last are held out"
    with refused("total", 1):
        split_examples(of(1))


def test_the_shift_of_a_rejection_weight_can_be_taken_out(examples: Examples) -> None:
    """A linear head over one-hot states reaches the least loss, whose predictions are shifted by the weight alone."""
    plan = AcceptancePlan(blocks=0, rejection_weight=6.0, mixing=1, epochs=30, rate=0.03)
    head = train_acceptance(examples, plan)
    shifted, plain = evaluate_acceptance(head, examples), evaluate_acceptance(head, examples, 6.0)
    assert plain.error < 0.03 < 0.1 < shifted.error and plain.divergence < 0.02 < shifted.divergence
    assert shifted.bins != plain.bins and sum(n for _, _, n in plain.bins) == len(examples)
    careful = float(head.accepted(examples.hidden).mean().detach())
    assert careful < float(examples.labels.mean()) - 0.1, "rejections that weigh more make it careful"
    scores, labels = torch.tensor([[0.0, 1.0], [2.0, -1.0]]), torch.tensor([0.3, 0.9])
    c = scores.softmax(-1)[:, 1]
    by_hand = -(labels * c.log() + 6 * (1 - labels) * (1 - c).log())
    torch.testing.assert_close(weighted_loss(scores, labels, 6.0), by_hand)


def test_data_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    made = []
    generator = foresay.load(P, drafter=lambda: (made.append(1), ModelDrafter(Q, V))[1])
    params = SamplingParams(temperature=1.0, max_new_tokens=12, seed=5)

    def collected(count: int = 40, length: int = 3) -> int:
        return collect(generator, [[1, 2]] * count, params, tmp_path, length=length)

    assert collected() == 0
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert len(whole) == 4 and "settings.json" in whole
    (tmp_path / "000001.safetensors").unlink()
    made.clear()
    assert collected() == 2 and len(made) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == whole
    refuses(lambda: collected(length=4), "folder")
    refuses(lambda: collected(20), "folder")


def certain(value: float) -> AcceptanceHead:
    """A head that returns the same chance of any token."""
    head = AcceptanceHead(V * V, 0)
    with torch.no_grad():
        head.out.weight.zero_()
        head.out.bias.copy_(torch.tensor([math.log(1 - value), math.log(value)]))
    return head


@pytest.mark.parametrize(
    ("value", "threshold", "low", "drafted"),
    # 1 - 0.8^i: 0, 0.2, 0.36, 0.49, 0.59, ... when the token after i drafted ones is drawn
    [(0.8, 0.3, 1, 3), (0.8, 0.5, 1, 5), (0.8, 0.1, 1, 2), (0.8, 0.1, 4, 4), (0.999, 0.3, 1, 7), (0.8, 1.0, 1, 7)],
)
def test_a_draft_ends_after_the_token_drawn_when_a_rejection_is_likely(
    value: float, threshold: float, low: int, drafted: int
) -> None:
    policy = AcceptanceLength(certain(value), threshold, low=low, high=7)
    params = SamplingParams(max_new_tokens=60, temperature=1.0, seed=1)
    _, steps, _ = run(P, [[1, 2], [3]], params, drafter=ModelDrafter(Q, V), policy=policy)
    assert {step.num_drafted for step in steps if step.num_drafted < 7 or drafted == 7} >= {drafted}
    assert max(step.num_drafted for step in steps) == drafted


@pytest.mark.parametrize("rule", ["speculative", "block", "match", "coupled"])
def test_the_law_is_the_targets(rule: str) -> None:
    """Whatever the head returns for tokens that were drawn already."""
    torch.manual_seed(0)
    head = AcceptanceHead(SIZE * SIZE, 1)
    with torch.no_grad():
        head.out.weight.normal_(0, 3)
    policy, drafter = AcceptanceLength(head, 0.4, low=1, high=5), ModelDrafter(Shows(OTHER.table), SIZE)
    loop = Loop(TARGET, drafter=drafter, rule=rule, policy=policy, max_batch_size=64)
    probs = joint(TARGET, PARAMS["plain"], PROMPT, LENGTH)
    assert value_of(loop, PROMPT, PARAMS["plain"], probs, 1500) > ALPHA
    assert len({step.num_drafted for step in loop.steps}) > 2


def test_files_come_back(tmp_path: Path) -> None:
    """Also by the published names, with one weight for all blocks, as a sequence of blocks and a linear layer is saved."""
    torch.manual_seed(0)
    head, x, file = AcceptanceHead(6, 2), torch.randn(5, 6), tmp_path / "model.safetensors"
    torch.nn.init.normal_(head.blocks[0].weight)  # type: ignore[arg-type]
    head.save(tmp_path)
    assert torch.equal(AcceptanceHead.load(tmp_path)(x), head(x))
    weight, bias, last = torch.randn(6, 6), torch.randn(6), torch.randn(2, 6)
    published = {"0.linear.weight": weight, "0.linear.bias": bias, "3.weight": last}
    save_file(published, file)
    (tmp_path / "config.json").unlink()
    y = x
    for _ in range(3):
        y = y + torch.nn.functional.silu(y @ weight.T + bias)
    torch.testing.assert_close(AcceptanceHead.load(tmp_path)(x), y @ last.T)
    AcceptanceHead(6, 1).save(tmp_path)
    ours = load_file(file)
    for tensors, message in (
        (published | {"1.norm.weight": torch.ones(6)}, r"has 1\.norm\.weight, which it should not have"),
        ({"x": ours["out.weight"]}, "output layer"),
        (ours | {"out.weight": torch.ones(2, 9)}, r"blocks\.0\.weight .* is \[6, 6\], and .* gives \[9, 9\]"),
        (None, "cannot read"),
    ):
        if tensors is None:
            file.write_bytes(b"x")
        else:
            save_file(tensors, file)
        with pytest.raises(ModelLoadError, match=message):
            AcceptanceHead.load(tmp_path)
    file.unlink()
    with pytest.raises(ModelNotFoundError, match="acceptance head"):
        AcceptanceHead.load(tmp_path)
    refuses(lambda: AcceptanceLength(certain(0.5), 2.0), "threshold", 2.0)


def test_the_commands(tmp_path: Path, folder: Path, shell: tiny.Shell) -> None:
    target, draft = str(folder), tiny.save(tmp_path / "draft", tiny.llama(num_hidden_layers=1))
    prompts, outputs, head, other = (str(tmp_path / name) for name in ("prompts.txt", "outputs.jsonl", "head", "other"))
    Path(prompts).write_text("".join(f"line {i}\n" for i in range(40)))
    asked = ("--model", target, "--prompts", prompts, "-n", "24", "-t", "1", "--seed", "3")
    assert shell("record", outputs, *asked)[0] == 0
    given = ("--kind", "acceptance", "--model", target, "--outputs", outputs, "--epochs", "2")
    drafter = ("--drafter", f"model({draft})")
    out = shell.out("distill", head, *given, *drafter)
    assert "divergence" in out and f"acceptance({head})" in out and "mean acceptance" in out and ": accepted " in out
    assert "trained with rejection weight 6: it predicts a / (a + 6 (1 - a)) for a probability a" in out
    [found] = re.findall(r"([\d,]+) draft tokens, ([\d,]+) held out", out)
    tokens, held_out = (int(one.replace(",", "")) for one in found)
    assert 0.09 < held_out / (tokens + held_out) < 0.11
    again = shell("distill", head, *given, *drafter, "--rejection-weight", "1")
    assert again[0] == 0 and "3 files of data from an earlier run" in again[1] and "weight" not in again[1]
    plain = ("generate", "x", "--model", target, "-n", "16")
    code, out, _ = shell(*plain, "--draft", str(draft), "--length", f"acceptance({head}, 0.5)")
    assert code == 0 and out == shell(*plain, "--drafter", "none")[1]
    for name, more, message in (
        (other, (), "needs --drafter"),
        (other, (*drafter, "--epochs", "0.5"), "--epochs 0.5 must be an integer"),
        (other, ("--drafter", "suffix"), "hidden states"),
        (target, drafter, "contains something else"),
    ):
        assert message in shell.refused("distill", name, *given, *more)
