"""The guarantees of every model, over the table of families, formats and engines; each is written once.

Greedy output is that of transformers; after each step the cache is that of a fresh pass; a token has the same bits
alone, in any batch and under any draft. What is refused stands next to what refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from foresay.decoding.protocols import ModelInput
from foresay.decoding.sampling_params import SamplingParams
from foresay.drafters import ModelDrafter, PromptLookup
from foresay.engine.prefixes import PrefixStore
from foresay.models.cache.state_cache import SLOTS
from foresay.models.huggingface.self_check import probe
from helpers import guarantees
from helpers.comparing import NEW, plain, prompts
from helpers.families import VOCAB
from helpers.guarantees import (
    FILES,
    HYBRIDS,
    KERNELS,
    OWN,
    QUANTIZED,
    READ,
    Cell,
    assert_greedy,
    made,
    on,
    outputs_of,
    target_of,
)
from helpers.passes import started
from helpers.racing import race
from helpers.support import Always, Loop, Never, Sometimes, run

PARAMS = SamplingParams(max_new_tokens=NEW)
STATES = on("own code", "mamba", "qwen3_5", "jamba", "zamba2")
"""Families of different kinds whose own code keeps states, for tests that need no more."""
ON_KERNELS = on("kernels", *HYBRIDS)
cells = pytest.mark.parametrize


@cells(
    "cell",
    [*(one for one in OWN if one.family not in READ or one.family == "llama"), *KERNELS, *FILES, *QUANTIZED],
    ids=str,
)
def test_greedy_output_is_that_of_transformers(cell: Cell) -> None:
    """Token for token in float32: ragged rows join while others decode, past windows of 8; drafts are rejected, and accepted.

    A difference is excused where the two top logits are within 1e-4. Drafts may be longer than what a row of states keeps.
    """
    reference, wanted, target = guarantees.reference_of(cell.family, cell.format), outputs_of(cell), target_of(cell)
    assert len({token for output in wanted for token in output}) > 5, "a model that repeats itself proves little"
    assert cell.family != "llama" or wanted[1] == plain(reference, prompts()[1]), "as `generate` does"
    for gamma in (4, SLOTS + 6) if cell in ON_KERNELS else (4,):
        loop = Loop(target, drafter=Sometimes(wanted, cell.vocab), gamma=gamma)
        ours = loop.outputs(prompts(), PARAMS, join_later=3)
        assert loop.engine.draft_failures == 0
        assert any(step.num_accepted < step.num_drafted for step in loop.steps)
        whole = 3 if gamma == 4 else 0
        assert any(step.num_accepted == step.num_drafted > whole for step in loop.steps)
        for prompt, one, theirs in zip(prompts(), ours, wanted, strict=True):
            if one != theirs:
                assert_greedy(reference, prompt, one)


def padded(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)


def difference_from_fresh_passes(model: Any, vocab: int) -> float:
    """The largest one as a share of the scores' range: two rows, whose drafts of 0 to 6 tokens are rejected at each position."""
    generator, length = torch.Generator().manual_seed(2), min(60, model.max_length - 8)
    texts = torch.randint(2, vocab, (2, length), generator=generator)
    with torch.inference_mode():
        fresh = model.uncached(texts)
    cache, at, worst = model.new_cache(), [0, 0], 0.0
    cache.add_rows(2)
    for turn in range(60):
        drafted = [(turn + 3 * row) % 7 for row in range(2)] if turn else [11, 2]
        accepted = [(turn * 5 + row) % (count + 1) for row, count in enumerate(drafted)] if turn else drafted
        starts, ends = list(cache.lengths), [min(a + 1 + n, length) for a, n in zip(at, accepted, strict=True)]
        noise = torch.randint(2, vocab, (2, 7), generator=generator)
        fed = [
            torch.cat([texts[row, starts[row] : ends[row]], noise[row, : drafted[row] - accepted[row]]])
            for row in range(2)
        ]
        scores = model.forward(ModelInput(padded(fed), [len(one) for one in fed]), cache).scores()
        for row in range(2):
            found, own = scores[row, : ends[row] - starts[row]], fresh[row, starts[row] : ends[row]]
            worst = max([worst, *(found - own).abs().flatten().tolist()])
        cache.truncate(at := ends)
        assert all(kept <= end for kept, end in zip(cache.lengths, ends, strict=True))
        if min(at) == length:
            break
    assert min(at) == length
    return worst / float(fresh.max() - fresh.min())


@cells("cell", [*OWN, *KERNELS], ids=str)
def test_after_each_step_the_cache_is_that_of_a_fresh_pass(cell: Cell) -> None:
    """As the check of models finds when they are loaded. It is all that differs between families by their own code."""
    target = target_of(cell)
    assert difference_from_fresh_passes(target, cell.vocab) < 1e-4
    assert cell not in OWN or probe(target) < 1e-4


BITS = [(cell, ("float32", "bfloat16", "int8", "int4")[i % 4]) for i, cell in enumerate(KERNELS)]


@cells(("cell", "weights"), [*BITS, *((cell, "int4") for cell in ON_KERNELS if (cell, "int4") not in BITS)], ids=str)
def test_a_token_has_its_bits_in_any_pass(cell: Cell, weights: str) -> None:
    """Alone, in a ragged batch with pads, in pieces of a prompt, by any number of threads."""
    model = target_of(cell, weights)
    most = min(60, model.max_length - 10)
    tokens = torch.randint(2, 90, (3, most + 10), generator=torch.Generator().manual_seed(5))
    cache = started(model, 3)
    filled = model.forward(ModelInput(tokens[:, :most], (most, 3, 37)), cache).scores()
    together = model.forward(ModelInput(tokens[:, most:], (10, 4, 1)), cache).scores()
    before = torch.get_num_threads()
    try:
        for row, (length, block) in enumerate(((most, 10), (3, 4), (37, 1))):
            torch.set_num_threads(1 + row)
            own = started(model)
            parts = [
                *tokens[row, :length].split([1 + row, length - 1 - row]),
                *tokens[row, most : most + block].split(1),
            ]
            found = [model.forward(ModelInput(part[None], (len(part),)), own).scores()[0] for part in parts]
            assert torch.equal(torch.cat(found), torch.cat([filled[row, :length], together[row, :block]]))
    finally:
        torch.set_num_threads(before)


@cells("cell", [*ON_KERNELS, *FILES, *QUANTIZED], ids=str)
def test_outputs_depend_on_neither_drafts_nor_batch(cell: Cell) -> None:
    """Bit for bit: in bfloat16 or blocks of 8 bits, where a rounding error would change some token."""
    model, params = target_of(cell, "bfloat16"), SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    some = prompts()[1:5]
    alone = [run(model, [prompt], params, gamma=0)[0][0] for prompt in some]
    sometimes = Sometimes(alone, cell.vocab)
    drafters = [(4, sometimes), (1, Never(alone, cell.vocab)), (8, PromptLookup()), (SLOTS + 2, Always(alone))]
    for gamma, drafter in drafters if cell in ON_KERNELS else [(4, sometimes)]:
        ours, _, engine = run(model, some, params, drafter=drafter, gamma=gamma, max_batch_size=3)
        assert ours == alone and engine.draft_failures == 0


PLAIN = on("own code", "llama", "gemma3", "mixtral_sliding", "phi3_longrope", "deepseek_v3", "bloom", "opt")
"""Families that differ in what a cache or a mask must do: plain, with windows, experts, ropes of two kinds, latent keys, biases
and learned positions."""


@cells("cell", [*PLAIN, *STATES, *ON_KERNELS], ids=str)
def test_a_draft_model_of_the_family(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cache is rewound by any number of draft tokens without feeding its context again; its drafts are its greedy ones."""
    wanted, draft, fed = outputs_of(cell), made(cell), list[int]()
    forward = draft.forward

    def counted(model_input: ModelInput, cache: Any) -> Any:
        fed.extend(model_input.num_tokens)
        return forward(model_input, cache)

    monkeypatch.setattr(draft, "forward", counted)
    gamma = 8 if cell in ON_KERNELS else 4
    drafter = ModelDrafter(draft, VOCAB)
    ours, steps, engine = run(target_of(cell), prompts()[:3], PARAMS, drafter=drafter, gamma=gamma)
    assert engine.draft_failures == 0
    for prompt, one, theirs in zip(prompts(), ours, wanted, strict=False):
        if one != theirs:
            assert_greedy(guarantees.reference_of(cell.family), prompt, one)
    assert sum(step.num_accepted for step in steps) > 0.9 * sum(step.num_tested for step in steps)
    assert sum(fed) < 3 * sum(map(len, ours)) + sum(map(len, prompts()[:3]))


@cells("cell", [*on("own code", "mamba2", "qwen3_5"), *ON_KERNELS], ids=str)
def test_a_seed_gives_its_text_in_any_batch(cell: Cell) -> None:
    """Under a rule whose text depends on the draft length, a sampled row keeps its length while others draft fewer tokens."""
    target, draft = target_of(cell), made(cell, seed=5)
    params = [SamplingParams(max_new_tokens=10, temperature=1.0, seed=seed, ignore_eos=True) for seed in range(4)]
    params[1] = SamplingParams(max_new_tokens=10, ignore_eos=True)
    alone = [
        run(target, [prompt], one, drafter=ModelDrafter(draft, VOCAB), gamma=4)[0][0]
        for prompt, one in zip(prompts(), params, strict=False)
    ]
    assert run(target, prompts()[:4], params, drafter=ModelDrafter(draft, VOCAB), gamma=4)[0] == alone


@cells("cell", [*STATES, *ON_KERNELS], ids=str)
def test_rows_share_prefixes_of_states(cell: Cell) -> None:
    """A prompt that continues an earlier text, and prompts with a common start that join together."""
    reference, target, params = guarantees.reference_of(cell.family), target_of(cell), SamplingParams(max_new_tokens=8)
    first = torch.randint(2, VOCAB, (40,), generator=torch.Generator().manual_seed(8)).tolist()
    loop = Loop(target, prefixes=PrefixStore(1 << 24))
    [output] = loop.outputs([first], params)
    assert_greedy(reference, first, output)
    second, before = [*first, *output, 5, 6, 7], len(loop.steps)
    [found] = loop.outputs([second], params)
    cached = loop.steps[before].num_cached
    assert cached is not None and cached >= len(first) - 1 + (len(output) if cell in ON_KERNELS else 0)
    assert_greedy(reference, second, found)
    joined = [[*first, 9, 4, *range(2, 30)], [*first, 4, 9, 8], [*first[:30], 7]]
    together = run(target, joined, params, prefixes=PrefixStore(), join_later=2)[0]
    for prompt, one in zip(joined, together, strict=True):
        assert_greedy(reference, prompt, one)


@cells("cell", [*STATES, *on("kernels", "llama", "qwen3_5")], ids=str)
def test_two_threads_share_a_model(cell: Cell) -> None:
    """Passes of one thread leave those of the other alone, also where a family's code keeps states in its modules."""
    target, params = target_of(cell), SamplingParams(max_new_tokens=10)
    wanted = [run(target, [prompt], params)[0][0] for prompt in prompts()[1:3]]
    found: list[list[list[int]]] = [[], []]

    def work(index: int) -> None:
        for _ in range(2):
            found[index - 1].append(run(target, [prompts()[index]], params)[0][0])

    assert race(work, 2) == [] and found == [[one] * 2 for one in wanted]


def test_the_table_holds_each_family_that_is_read() -> None:
    read = {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "phi3", "olmo2", "granite"}
    assert read <= set(READ)


# -- controls ----------------------------------------------------------------------------------------------------------


@cells("family", ["llama", "bloom"])
def test_a_broken_mask_is_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose queries are placed one slot too far."""
    from foresay.models.cache.slot_cache import SlotCache

    intact = SlotCache.begin_pass

    def shifted(self: SlotCache, *args: Any) -> Any:
        at = intact(self, *args)
        at.indices(at.positions.device)  # the slots written stay right, the positions seen do not
        at.positions = at.positions + 1
        return at

    model = made(*on("own code", family))
    monkeypatch.setattr(SlotCache, "begin_pass", shifted)
    assert probe(model) > 1e-3 and difference_from_fresh_passes(model, VOCAB) > 1e-3
