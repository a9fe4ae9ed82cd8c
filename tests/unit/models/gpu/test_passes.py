"""Passes over flat tokens and pages against the family's own code, by a capture function that repeats the pass; pages of rows."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from foresay.decoding.protocols import Logits, ModelInput
from foresay.errors import OutOfMemoryError
from foresay.models.gpu import attention
from foresay.models.gpu.flat import PagedTokens, PageTable, size_of
from foresay.models.gpu.layers import PagedLayers
from foresay.models.gpu.pages import LayerShape, PagedCache, PagePool
from foresay.models.gpu.passes import PagedPasses, Replay
from foresay.models.hardware import Hardware
from foresay.models.huggingface import fused, layer_inputs
from foresay.models.huggingface.causal import CausalModel
from foresay.models.layer import Separate
from helpers.families import make, whole_product
from helpers.histories import play
from helpers.paged import PAGE, few_programs
from helpers.refusals import refused

VOCAB = 97
SLIDING, FULL = "sliding_attention", "full_attention"
OF_GEMMA4 = [SLIDING, SLIDING, FULL, SLIDING, FULL]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 1},
    "gemma2": {"num_hidden_layers": 2, "sliding_window": 20, "query_pre_attn_scalar": 16},
    "qwen3_moe": {"num_hidden_layers": 1},
    "gpt_oss": {"num_hidden_layers": 2},
    "glm4_moe": {"num_hidden_layers": 2},
    "ministral3": {"num_hidden_layers": 1},
    "olmo2": {"num_hidden_layers": 1},
    "gemma4": {"num_hidden_layers": 5, "layer_types": OF_GEMMA4, "num_kv_shared_layers": 2},
    "gemma4_equal": {"num_hidden_layers": 2, "layer_types": [SLIDING, FULL]},
}
"""Families with windows and caps, with norms of queries and keys, with experts, with queries that are scaled by their position or
normalized as one vector, with inputs of layers and shared or equal values."""


def run_before(run: Replay) -> Replay:
    """As graphs are captured: after a run of the pass, whose buffers are empty."""
    run()
    return run


def apart(*layers: Any) -> Any:
    """The products of a model that the caller owns, whose layers are not joined."""
    return layers[0] if len(layers) == 1 else Separate(layers)


def made(kind: str, monkeypatch: pytest.MonkeyPatch) -> tuple[PagedPasses, CausalModel]:
    few_programs(monkeypatch, apart if kind == "llama" else whole_product)
    monkeypatch.setattr(attention, "SPLITS", 2)
    monkeypatch.setattr(Hardware, "gpu_kernels", True)
    monkeypatch.setattr(layer_inputs, "product_of", whole_product)
    model = make(kind, 2, vocab_size=VOCAB, max_position_embeddings=256, **FAMILIES[kind])
    decoder, device = fused.FusedDecoder(model).on_pages(256), torch.device("cpu")
    pool = PagePool(decoder.layers, 12, torch.float32, device)
    capture = run_before if kind == "llama" else lambda run: run  # which takes half the time
    passes = PagedPasses(decoder, pool, rows=4, max_length=256, device=device, capture=capture)
    return passes, CausalModel(model)


@pytest.mark.parametrize("kind", FAMILIES)
@torch.inference_mode()
def test_passes_score_as_the_family_s_own_code(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill over a page's border, ragged chains with hidden states, a tree of which some tokens are kept, an idle row."""
    passes, model = made(kind, monkeypatch)
    ours, theirs = passes.new_cache(), model.new_cache()
    for cache in (ours, theirs):
        cache.add_rows(2)
    layers = tuple(range(model.num_layers + 1))
    ids = torch.randint(0, VOCAB, (2, PAGE + 10))
    parents = torch.tensor([[-1, 0, 0, 1], [-1, 0, -1, 0]])
    inputs = [
        ModelInput(ids[:, : PAGE + 2], [PAGE + 2, 2], logits=Logits.LAST, is_prompt=True),
        ModelInput(ids[:, :3], [1, 3], hidden_layers=layers),
        ModelInput(ids[:, 3:7], [4, 4], parents=parents, hidden_layers=layers),
        ModelInput(ids[:, 7:9], [2, 0], logits=Logits.LAST),
        ModelInput(ids[:, 9:10], [1, 1]),
    ]
    if kind != "llama":
        del inputs[1], inputs[2:]
    for one in inputs:
        scores, hidden = passes(one, ours)
        expected = model.forward(one, theirs)
        assert ours.lengths == theirs.lengths
        for i, count in enumerate(one.num_tokens):
            if scores is not None and count:
                last = 1 if one.logits is Logits.LAST else count
                torch.testing.assert_close(scores[i, :last], expected.scores()[i, :last], rtol=1e-4, atol=1e-4)
            for layer in one.hidden_layers:
                found = hidden[layer][i, :count]
                torch.testing.assert_close(found, expected.hidden[layer][i, :count], rtol=1e-4, atol=1e-4)
        if one.parents is not None:
            for cache in (ours, theirs):
                cache.keep([one - 4 for one in cache.lengths], [[0, 1, 3], [0, 3]])
    assert kind != "llama" or (passes.captures == 3 and passes.replays == 4)


@torch.inference_mode()
def test_a_layer_that_reads_another_one_s_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: Gemma 4's layers without keys of their own read those of the last layer of the other kind."""
    known = PagedLayers.__init__

    def init(self: Any, *given: Any, **options: Any) -> None:
        known(self, *given, **options)
        sizes = [self.shapes[store] for store in self._stores]
        own = [store for layer, store in zip(self._layers, self._stores, strict=True) if layer.shares is None]
        for i, layer in enumerate(self._layers):
            if layer.shares is not None:  # of the same size, or the pass would fail otherwise
                self._stores[i] = next(store for store in own if self.shapes[store] == sizes[i])

    monkeypatch.setattr(PagedLayers, "__init__", init)
    with pytest.raises(AssertionError, match="not close"):
        test_passes_score_as_the_family_s_own_code("gemma4", monkeypatch)


def empty(pages: int = 8) -> tuple[PagePool, PagedCache]:
    pool = PagePool([LayerShape(1, 2), LayerShape(2, 2)], pages, torch.float32, torch.device("cpu"))
    return pool, PagedCache(pool)


def write(cache: PagedCache, row: int, values: Sequence[int]) -> None:
    """Append one value a token, in both layers."""
    cache.reserve(row, len(values))
    at = torch.arange(cache.lengths[row], cache.lengths[row] + len(values))
    pages = torch.tensor(cache.pages[row])[at // attention.PAGE]
    for store in (*cache.pool.keys, *cache.pool.values):
        store[pages, :, at % attention.PAGE] = torch.tensor(values).float()[:, None, None]
    cache.lengths[row] += len(values)


def read(cache: PagedCache, row: int) -> list[int]:
    if not (length := cache.lengths[row]):
        return []
    stores = [one[0] for layer in range(2) for one in cache.read(layer, row, 1, length)]
    found = torch.cat([store.transpose(0, 1).flatten(1) for store in stores], 1)  # [length, numbers]
    assert torch.equal(found, found[:, :1].expand_as(found))
    numbers: list[int] = found[:, 0].int().tolist()
    return numbers


def history(data: st.DataObject) -> None:
    """Until every page is free again."""
    pool, cache = empty(1000)

    def run(row: int, values: list[list[int]], counts: list[int]) -> None:
        for i, (own, count) in enumerate(zip(values, counts, strict=True)):
            if count:
                write(cache, row + i, own[:count])

    play(data, cache, run, partial(read, cache))
    cache.rearrange([], 0)
    gc.collect()
    assert pool.num_free == 1000 and cache.nbytes == 0


test_rows_are_what_was_written_to_them = settings(max_examples=10, deadline=None)(given(st.data())(history))


def test_a_shared_page_that_is_not_copied_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control."""
    monkeypatch.setattr(PagePool, "own", lambda self, page: page)
    some = settings(
        max_examples=200,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        some(given(st.data())(history))()


def test_kept_tokens_of_a_tree_move_over_the_border_of_a_page() -> None:
    _, cache = empty()
    cache.add_rows(2)
    for row in range(2):
        write(cache, row, list(range(attention.PAGE - 2)))
        write(cache, row, [900, 901, 902, 903, 904])
    cache.keep([attention.PAGE - 2] * 2, [[0, 2, 4], [1]])
    assert read(cache, 0)[-4:] == [attention.PAGE - 3, 900, 902, 904] and read(cache, 1)[-2:] == [
        attention.PAGE - 3,
        901,
    ]


def test_a_discarded_cache_gives_its_pages_back() -> None:
    """Without a free one, a pool is out of memory."""
    pool, cache = empty()
    cache.add_rows(2)
    write(cache, 0, [1])
    write(cache, 1, [2] * 100)
    assert pool.num_free == 5
    del cache
    assert pool.num_free == 8
    _, cache = empty(2)
    cache.add_rows(1)
    with pytest.raises(OutOfMemoryError, match="all 2 pages of 64 tokens are in use"):
        write(cache, 0, [1] * 200)


def test_the_table_holds_the_rows_of_the_cache_that_runs() -> None:
    table = PageTable(3, 4 * attention.PAGE, torch.device("cpu"))
    address = table.pages.data_ptr()
    for rows in ([[4, 2], [1]], [[4, 2, 7], [1]], [[5], [4, 2]]):
        table.update(rows)
        assert [table.pages[i, : len(one)].tolist() for i, one in enumerate(rows)] == rows
    assert table.pages.data_ptr() == address


def test_a_tree_of_too_many_nodes_is_refused() -> None:
    _, cache = empty()
    cache.add_rows(1)
    parents = torch.tensor([[-1, *[0] * 65]])
    with refused("nodes", 65):
        PagedTokens.of(ModelInput(torch.zeros(1, 66, dtype=torch.int64), [66], parents=parents), cache, 4)


def test_passes_are_padded_to_the_next_size() -> None:
    assert [size_of(count) for count in (1, 5, 64, 65, 512)] == [1, 6, 64, 96, 512] and size_of(513) is None
