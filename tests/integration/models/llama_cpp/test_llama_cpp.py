"""llama.cpp under foresay's loop, with its C interface over a table: rows, growing, beginnings, failures, and every output.

The real library is in tests/engines.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import foresay
from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.rows import Rows
from foresay.engine.prefixes import SharesPrefixes
from foresay.errors import ConfigError, ModelLoadError, OutOfMemoryError, UnsupportedModelError
from foresay.models.llama_cpp import binding
from foresay.models.llama_cpp.cache import MAX_PASS_TOKENS, PassError
from foresay.models.llama_cpp.model import LlamaCppModel
from foresay.models.table import TableModel
from helpers.llama_library import Library
from helpers.making import make_row
from helpers.refusals import refused

V = 9


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    yield from put(monkeypatch, Library(table().table))


def put(monkeypatch: pytest.MonkeyPatch, library: Library) -> Iterator[Library]:
    package = ModuleType("llama_cpp")
    package.llama_cpp, package.__version__ = library, "0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "llama_cpp", package)
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", library)
    binding.library.cache_clear()
    yield library
    gc.collect()
    binding.library.cache_clear()


def table() -> TableModel:
    return TableModel.random(V, seed=3, concentration=0.2)


def weights(name: str = "a.gguf") -> binding.Weights:
    return binding.Weights(name, gpu_layers=None, main_gpu=0)


def model() -> LlamaCppModel:
    return LlamaCppModel(weights())


def admitted(one: Any, count: int) -> Any:
    cache = one.new_cache()
    one.admit(Rows([make_row() for _ in range(count)]), 0, cache)
    return cache


METHODS, RULES = ("none", "suffix", "max_gram", "prompt_lookup"), ("speculative", "match", "coupled", "block")


@pytest.mark.parametrize(
    ("drafter", "rule"), [(m, r) for i, m in enumerate(METHODS) for j, r in enumerate(RULES) if (i + j) % 4 == 0]
)
def test_texts_are_those_of_the_table(library: Library, drafter: str, rule: str) -> None:
    """In ragged batches with rows that join, greedy and sampled, with lengths that outgrow the first context."""
    prompts = [[1 + i % (V - 1) for i in range(3 + 7 * n)] for n in range(11)]
    own = [{"max_new_tokens": 40 + 9 * n, "temperature": 0.8 * (n % 2), "seed": n} for n in range(11)]
    params = [foresay.SamplingParams(ignore_eos=True, **one) for one in own]  # type: ignore[arg-type]
    options: dict[str, Any] = {"rule": rule, "max_batch_size": 4, "length": None if drafter == "none" else 4}
    wanted, found = (
        [out.token_ids for out in foresay.load(one, drafter=drafter, **options).generate(prompts, params)]
        for one in (table(), model())
    )
    assert found == wanted
    if drafter == "suffix":  # control: a model with other scores writes something else
        library.logits = library.logits[..., ::-1].copy()
        other = foresay.load(model(), drafter="suffix").generate(prompts[:1], params[:1])
        assert other[0].token_ids != wanted[0]


Action = st.one_of(
    st.tuples(st.just("feed"), st.lists(st.integers(0, 5), min_size=6, max_size=6), st.integers(0, 99)),
    st.tuples(st.just("cut"), st.integers(0, 5), st.integers(0, 12)),
    st.tuples(st.just("copy"), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.just("keep"), st.integers(0, 5), st.integers(0, 5)),
    st.tuples(st.just("leave"), st.integers(0, 5), st.just(0)),
    st.tuples(st.just("come"), st.integers(1, 3), st.just(0)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(Action, min_size=5, max_size=25))
def test_rows_hold_what_a_table_s_rows_hold(library: Library, actions: list[Any]) -> None:
    """Whatever is fed, cut, copied, saved, moved and admitted: each pass scores as one over rows that are whole."""
    both = [table(), model()]
    caches = [admitted(one, 2) for one in both]
    saved: list[Any] = []
    wanted: list[torch.Tensor] = []
    for name, one, other in actions:
        count = len(caches[0].lengths)
        for which, (scorer, cache) in enumerate(zip(both, caches, strict=True)):
            if name == "feed":
                numbers = [one[i % len(one)] for i in range(count)]
                ids = torch.randint(V, (count, max(1, *numbers)), generator=torch.Generator().manual_seed(other))
                out = scorer.forward(ModelInput(ids, numbers), cache)
                scores = [out.scores()[i, :n] for i, n in enumerate(numbers)]
                if which:
                    assert all(torch.equal(a, b) for a, b in zip(scores, wanted, strict=True))
                wanted = scores
            elif name == "cut":
                cache.truncate([max(0, n - other) if i == one % count else n for i, n in enumerate(cache.lengths)])
            elif name == "copy" and one % count != other % count:
                cache.copy_prefix(one % count, other % count, max(0, cache.lengths[one % count] - 1))
            elif name == "keep" and not cache.lengths[one % count]:
                pass  # nothing is kept
            elif name == "keep" and which:
                row, to = one % count, other % count
                saved.append(cache.save_prefix(row, cache.lengths[row]))
                cache.load_prefix(to, saved[-1], cache.lengths[row])
            elif name == "keep":
                row, to = one % count, other % count
                cache.copy_prefix(row, to, cache.lengths[row])
            elif name == "leave" and count > 1:
                last = count - 1
                cache.rearrange([(last, one % count)] if one % count != last else [], last)
            elif name == "come":
                now = len(cache.lengths)
                scorer.admit(Rows([make_row() for _ in range(now + one)]), now, cache)
        assert caches[0].lengths == caches[1].lengths


def test_a_context_grows_with_its_rows(library: Library) -> None:
    one = model()
    cache = admitted(one, 3)
    ids = torch.arange(700)[None] % V
    for _ in range(3):
        one.forward(ModelInput(ids, [700], first_row=1, logits=Logits.NONE), cache)
    sizes = [made.params.n_ctx for made in library.contexts]
    assert len(sizes) > 1 and sizes == sorted(sizes) and max(library.contexts[-1].passes) <= MAX_PASS_TOKENS
    assert library.contexts[-1].of(1) == (ids[0].tolist() * 3)
    one.admit(Rows([make_row() for _ in range(20)]), 3, cache)
    assert library.contexts[-1].params.n_seq_max >= 20
    gc.collect()
    assert len([x for x in library.freed if x != 1]) == len(library.contexts) - 1, "old ones are given back"
    with refused("max_batch_size"):
        one.admit(Rows([make_row() for _ in range(300)]), 20, cache)
    with pytest.raises(ConfigError, match="256"):
        foresay.load(model(), drafter="none", max_batch_size=300).generate([[1, 2]], max_new_tokens=2)


def test_rows_that_share_a_beginning_share_cells(library: Library) -> None:
    """Cells that are held are no memory lost: rows that end leave room for as many."""
    one = model()
    cache = admitted(one, 2)
    assert cache.nbytes == library.contexts[-1].params.n_ctx * one.cache_bytes([1]) > 0
    assert isinstance(cache, SharesPrefixes)
    one.forward(ModelInput(torch.tensor([[1, 2, 3, 4]]), [4]), cache)
    cache.copy_prefix(0, 1, 3)
    assert len(library.contexts[-1].cells) == 4 and library.contexts[-1].of(1) == [1, 2, 3]
    cache.truncate([1, 3])
    assert library.contexts[-1].of(1) == [1, 2, 3], "what one row forgets the other keeps"


def test_what_a_row_held_is_found_again(library: Library) -> None:
    """Through the engine's store of beginnings, as the server uses it."""
    generator = foresay.load(model(), drafter="none", max_batch_size=2)
    engine = generator.session(prefix_bytes=1 << 20)
    prompt = [1 + i % 7 for i in range(40)]
    for _ in range(2):
        engine.submit(prompt, foresay.SamplingParams(max_new_tokens=4, ignore_eos=True))
        while engine.has_work:
            done = [chunk.generation for chunk in engine.step() if chunk.generation is not None]
    assert done[0].num_cached >= 39


def test_a_pass_that_fails_leaves_rows_as_they_were(library: Library) -> None:
    one = model()
    cache = admitted(one, 2)
    one.forward(ModelInput(torch.tensor([[1, 2], [3, 4]]), [2, 2]), cache)
    library.fails_at = 7
    with pytest.raises(PassError, match="code -2"):
        one.forward(ModelInput(torch.tensor([[5, 6], [6, 7]]), [2, 2]), cache)
    assert cache.lengths == [2, 2] and [library.contexts[0].of(i) for i in (0, 1)] == [[1, 2], [3, 4]]
    assert one.forward(ModelInput(torch.tensor([[5], [6]]), [1, 1]), cache).scores().shape == (2, 1, V)


def test_only_wanted_scores_are_asked_for(library: Library) -> None:
    one, reference = model(), table()
    for logits, shape in ((Logits.LAST, (2, 1, V)), (Logits.ALL, (2, 3, V)), (Logits.NONE, None)):
        cache, other = admitted(one, 2), admitted(reference, 2)
        model_input = ModelInput(torch.tensor([[1, 2, 3], [4, 0, 0]]), [3, 1], logits=logits)
        found, wanted = one.forward(model_input, cache), reference.forward(model_input, other)
        assert cache.lengths == other.lengths == [3, 1]
        if shape is None:
            assert found.logits is None
        elif logits is Logits.LAST:
            assert torch.equal(found.scores(), wanted.scores())
        else:
            assert found.scores().shape == shape and torch.equal(found.scores()[0], wanted.scores()[0])


def test_what_cannot_be_decoded_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in put(monkeypatch, Library(table().table, encoder=True)):
        with pytest.raises(UnsupportedModelError, match="it has an encoder"):
            weights()
    for _ in put(monkeypatch, Library(table().table, rewinds=False)):
        one = model()
        cache = admitted(one, 1)
        one.forward(ModelInput(torch.tensor([[1, 2]]), [2]), cache)
        with pytest.raises(UnsupportedModelError, match="cannot rewind"):
            cache.truncate([1])


def test_errors_of_llama_cpp_and_too_large_a_context(library: Library) -> None:
    with pytest.raises(ModelLoadError, match=r"broken\.gguf.*a tensor is missing"):
        weights("broken.gguf")
    one = model()
    cache = admitted(one, 1)
    library.most_cells = 1024
    with pytest.raises(OutOfMemoryError, match="cache of 8 rows with 2048 tokens"):
        one.forward(ModelInput(torch.zeros(1, 1500, dtype=torch.long), [1500]), cache)


def test_what_a_column_costs_is_known_on_processors_alone(library: Library) -> None:
    for library.offloads, layers, known in (
        (False, None, True),
        (True, None, False),
        (True, 0, True),
        (True, 9, False),
    ):
        found = LlamaCppModel(binding.Weights("a.gguf", gpu_layers=layers, main_gpu=None))
        assert (found.capabilities.column_cost is not None) == known


def test_without_the_package_the_error_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    binding.library.cache_clear()
    with pytest.raises(ConfigError, match=r"foresay\[llamacpp\]"):
        foresay.load("smollm2-135m", backend="llama.cpp")
    monkeypatch.setitem(sys.modules, "llama_cpp", ModuleType("llama_cpp"))
    monkeypatch.setitem(sys.modules, "llama_cpp.llama_cpp", ModuleType("llama_cpp.llama_cpp"))
    monkeypatch.setattr(sys.modules["llama_cpp"], "llama_cpp", sys.modules["llama_cpp.llama_cpp"], raising=False)
    with pytest.raises(ConfigError, match="too old"):
        binding.library()
    binding.library.cache_clear()
