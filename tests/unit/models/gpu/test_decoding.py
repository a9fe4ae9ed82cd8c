"""Decoding over pages: greedy outputs are those of transformers, with drafts, joining rows and shared prefixes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from threading import Barrier, BrokenBarrierError
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from triton.runtime.errors import InterpreterError

import foresay
from foresay.cli import info
from foresay.decoding.capabilities import STEP_CHUNK
from foresay.decoding.protocols import Logits, ModelInput
from foresay.drafters import SelfDrafter
from foresay.engine.prefixes import PrefixStore
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.models.cache.slot_cache import SlotCache
from foresay.models.gpu import capture, flat, layers, passes
from foresay.models.gpu.flat import Buffers
from foresay.models.gpu.pages import PagedCache, PagePool
from foresay.models.hardware import Hardware
from foresay.models.huggingface import fused, linears
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.early_exit import first_layers
from foresay.models.huggingface.family_layers import NotFusedError
from foresay.models.huggingface.frozen import FrozenLinear
from foresay.models.huggingface.joined import Joined
from foresay.models.sources import wrapping
from foresay.models.sources.load_options import LoadOptions
from foresay.server.metrics import Metrics
from helpers.families import make, whole_product
from helpers.paged import PAGE, few_programs
from helpers.passes import scores, started
from helpers.refusals import refused
from helpers.support import Sometimes, run

VOCAB, NEW = 61, 5


def small(layers: int) -> CausalModel:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "head_dim": 16,
        "max_position_embeddings": 3 * PAGE,
    }
    config = LlamaConfig(
        vocab_size=VOCAB, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1, **sizes
    )
    found = CausalModel(LlamaForCausalLM(config).eval())
    found.use_fused()
    return found


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> CausalModel:
    few_programs(monkeypatch)
    monkeypatch.setattr(Hardware, "gpu_kernels", True)
    found = small(1)
    assert found.paged is not None and isinstance(found.new_cache(), PagedCache)
    return found


ONE = foresay.SamplingParams(max_new_tokens=NEW, ignore_eos=True)


def greedy(model: CausalModel, prompts: list[list[int]]) -> list[list[int]]:
    """Outputs by the family's own code."""
    texts = [list(prompt) for prompt in prompts]
    for ids in texts * NEW:
        ids.append(int(model.uncached(torch.tensor([ids]))[0, -1].argmax()))
    return [ids[-NEW:] for ids in texts]


@torch.inference_mode()
def test_drafts_and_joining_rows_change_no_token(model: CausalModel) -> None:
    """Three prompts, of which two begin alike and one passes the border of a page, over two rows; some drafts are right."""
    long = [i * 7 % VOCAB for i in range(PAGE - 2)]
    prompts = [long, [*long[:8], 3, 4], [5, 6, 7]]
    wanted, prefixes = greedy(model, prompts), PrefixStore(1 << 20)
    drafter = Sometimes(wanted, VOCAB)
    found, steps, _ = run(model, prompts, ONE, drafter=drafter, gamma=2, max_batch_size=2, prefixes=prefixes)
    assert found == wanted and sum(step.num_accepted for step in steps) > 0 and len(prefixes) > 0
    prefixes.clear()
    assert model.paged is not None and model.paged.pool.num_free == len(model.paged.pool._users), "every page came back"


@torch.inference_mode()
def test_fewer_passes_are_captured_than_made(model: CausalModel) -> None:
    assert model.paged is not None
    for prompt in ([1, 2], [3] * (PAGE - 1)):
        run(model, [prompt], ONE)
    assert model.paged.captures == 1 and model.paged.replays == 2 * (NEW - 1), (
        "the first tokens come of the prompts' passes"
    )


@torch.inference_mode()
def test_mixtures_are_decoded_over_pages(monkeypatch: pytest.MonkeyPatch, model: CausalModel) -> None:
    """They have no other fused layers on a GPU: without pages they keep their family's own code."""
    mixture = CausalModel(make("qwen3_moe", 1, vocab_size=VOCAB, hidden_size=32))
    mixture.use_fused()
    assert mixture.paged is not None and not mixture.batch_invariant
    prompts = [[5, 6, 7], [8]]
    wanted = greedy(mixture, prompts)
    assert run(mixture, prompts, ONE, drafter=Sometimes(wanted, VOCAB), gamma=2)[0] == wanted

    def refused(self: fused.FusedDecoder, max_length: int, **options: Any) -> None:
        raise LookupError("no such kernel")

    monkeypatch.setattr(fused.FusedDecoder, "on_pages", refused)
    with pytest.raises(NotFusedError, match="fused by kernels only"):
        mixture.use_fused()
    assert mixture.fused is None


@torch.inference_mode()
def test_the_first_layers_draft_in_the_target_s_pages(monkeypatch: pytest.MonkeyPatch, model: CausalModel) -> None:
    """They need no pages and no prefill of their own. Control: with a cache of their own they need both."""
    target = small(2)
    short = first_layers(target, 1)
    assert target.paged is not None and short.paged is not None
    pool = target.paged.pool
    assert short.paged.pool is pool
    prompts = [[5, 6, 7, *range(PAGE - 4)], [8]]
    wanted = greedy(target, prompts)

    def most_pages() -> tuple[int, int]:
        """The most pages in use, and the tokens that the draft's passes read."""
        fed, least, known = 0, pool.num_free, short.paged.flat if short.paged else None

        def flat(model_input: ModelInput, *given: Any, **options: Any) -> Any:
            nonlocal fed, least
            fed += sum(model_input.num_tokens)
            assert known is not None
            out = known(model_input, *given, **options)
            least = min(least, pool.num_free)
            return out

        monkeypatch.setattr(short.paged, "flat", flat)
        drafter = SelfDrafter(short, VOCAB)
        outputs, _, engine = run(target, prompts, ONE, drafter=drafter, gamma=2, max_batch_size=2)
        monkeypatch.setattr(short.paged, "flat", known)
        assert outputs == wanted and engine.draft_failures == 0
        return pool.num_pages - least, fed

    shared = most_pages()
    monkeypatch.setattr(short, "borrowed", lambda owner: None)
    apart = most_pages()
    assert shared[0] == 3 and apart[0] == 6
    assert shared[1] < apart[1] - len(prompts[0]) + 4


@torch.inference_mode()
def test_a_library_may_multiply(model: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With reproducible=False, in every pass."""
    known, counted = layers.product, []
    monkeypatch.setattr(layers, "product", lambda *given: counted.append(1) or known(*given))
    prompts = [[5, 6, 7], [8]]
    wanted = greedy(model, prompts)
    for reproducible in (None, False):
        counted.clear()
        model.reproducible = reproducible
        model.use_fused()
        assert run(model, prompts, ONE, max_batch_size=2)[0] == wanted
        assert bool(counted) == (reproducible is None)
        assert info._same_bits(model).startswith("no: reproducible=False" if counted == [] else "in passes of")


@torch.inference_mode()
def test_prompts_have_the_bits_of_steps_on_request(model: CausalModel) -> None:
    """Read at once, in pieces, token by token and next to others. Control: without the request they have not."""
    assert flat.SIZES[-1] - 1 == STEP_CHUNK
    ids = torch.randint(0, VOCAB, (2, PAGE + 9), generator=torch.Generator().manual_seed(0))

    def read(pieces: list[int], rows: int) -> torch.Tensor:
        cache, at = started(model, 2), 0
        for count in pieces:
            logits = Logits.LAST if at + count == ids.shape[1] else Logits.NONE
            one = ModelInput(ids[:rows, at : at + count], [count] * rows, logits=logits, is_prompt=True)
            output, at = model.forward(one, cache), at + count
        return output.scores()[0, -1]

    def differ() -> bool:
        wanted = read([1] * ids.shape[1], 1)
        return not all(torch.equal(wanted, read(*how)) for how in (([PAGE + 9], 1), ([7, PAGE + 2], 1), ([PAGE, 9], 2)))

    model.reproducible = True
    model.use_fused()
    assert not differ() and model.capabilities.prefill_chunk == STEP_CHUNK and not model.capabilities.prefill_together
    assert info._same_bits(model).startswith("yes")
    prompts = [ids[0].tolist(), [8]]
    assert run(model, prompts, ONE, max_batch_size=2)[0] == greedy(model, prompts)
    model.reproducible = None
    model.use_fused()
    assert differ()


def test_a_library_multiplies_no_quantized_weights(model: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are multiplied by our kernels in any case, so the option is refused."""
    monkeypatch.setattr(linears, "freeze_model", lambda *_: None)  # it packs the weights for a CPU
    few_programs(monkeypatch, lambda *of: of[0].product if isinstance(of[0], FrozenLinear) else whole_product(*of))
    options = LoadOptions(reproducible=False)
    found = wrapping.wrap("tiny", model.model, None, optimise=True, options=options).model
    assert isinstance(found, CausalModel) and found.paged is not None and found.reproducible is False
    model.model.lm_head = FrozenLinear(linears._on_gpu(8, model.model.lm_head.weight.detach(), None))
    with pytest.raises(ConfigError, match="reproducible=False has no effect on quantized weights"):
        wrapping.wrap("tiny", model.model, None, optimise=True, options=options)


def test_passes_keep_no_gradients(model: CausalModel) -> None:
    """The target's states are inputs of a draft that is trained, and the next pass overwrites what they were computed from."""
    out = model.forward(ModelInput(torch.tensor([[1, 2]]), [2], hidden_layers=(0, 1)), started(model))
    assert not any(one.requires_grad for one in (out.scores(), *out.hidden.values()))


@pytest.mark.parametrize("locks", [True, False])
def test_passes_of_several_threads_follow_each_other(
    model: CausalModel, locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that has written the inputs of its pass waits a moment for another one. Control: without the lock both run one."""
    assert model.paged is not None
    tokens, barrier, fill = [[3], [9]], Barrier(2), Buffers.fill
    wanted = [model.uncached(torch.tensor([one]))[0, -1] for one in tokens]

    def wait(self: Buffers, *given: Any) -> None:
        fill(self, *given)
        with suppress(BrokenBarrierError):
            barrier.wait(timeout=1)

    def scored(ids: list[int]) -> torch.Tensor:
        return scores(model, torch.tensor([ids]))[0, 0]

    scored([1])  # captured
    monkeypatch.setattr(Buffers, "fill", wait)
    if not locks:
        monkeypatch.setattr(model.paged.pool, "lock", nullcontext())
    try:
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(scored, tokens))
    except InterpreterError:  # it is not for two threads
        found = [torch.zeros(VOCAB)] * 2
    same = [torch.allclose(one, other, atol=1e-4) for one, other in zip(found, wanted, strict=True)]
    assert all(same) == locks


def test_estimates_of_memory_count_pages(model: CausalModel) -> None:
    assert model.paged is not None
    pool = model.paged.pool
    assert model.cache_bytes([1, PAGE, PAGE + 1]) == 4 * pool.page_bytes and model.free_bytes() == pool.free_bytes
    assert model.capabilities.ragged and not model.capabilities.prefill_in_any_pieces


def test_the_memory_of_pages_is_limited(model: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """By FORESAY_PAGES_GB, and reported; one in which no row of some length fits is refused."""
    assert model.paged is not None and model.fused is not None
    decoder, page = model.paged.decoder, model.paged.pool.page_bytes

    def pool(gigabytes: str, free: int = 100) -> PagePool:
        monkeypatch.setenv(passes.LIMIT, gigabytes)
        rest = {"max_length": 3 * PAGE, "free_bytes": free * page, "capture": lambda run: run}
        return passes.passes_on(model.device, decoder, torch.float32, **rest).pool

    assert [pool(f"{count * page / 1e9:.9f}").num_pages for count in (5, 3)] == [5, 3]
    with pytest.raises(LookupError, match=r"0\.00 GB that they may take hold 2 pages of 16 tokens"):
        pool(f"{2 * page / 1e9:.9f}")
    assert [pool("", free=free).num_pages for free in (400, 100, 14)] == [32 * 3, 50, 7]
    with refused("FORESAY_PAGES_GB", "many"):
        pool("many")
    found = info.passes(model)
    assert found == f"fused layers, keys and values in pages of {96 * PAGE} tokens ({96 * page / 1e9:.1f} GB)"
    assert info._same_bits(model).startswith("in passes of up to 512 tokens")
    sessions: list[Any] = [SimpleNamespace(engine=run(model, [[1]], ONE)[2]) for _ in range(2)]
    text = Metrics().text(sessions, (), {}).decode()
    assert f"foresay_kv_cache_capacity_bytes {96.0 * page}" in text, "both engines use one pool, which counts once"


def test_a_changed_model_goes_on_with_its_family_s_own_code(model: CausalModel) -> None:
    """And frees the pool; a session over pages ends by name."""
    model.watch_for_changes()
    cache = started(model)
    one = ModelInput(torch.tensor([[1]]), [1])
    model.forward(one, cache)
    model.model.model.norm.register_forward_hook(lambda *_: None)
    other = model.new_cache()
    assert isinstance(other, SlotCache) and model.paged is None
    with pytest.raises(UnsupportedModelError, match="begin another session"):
        model.forward(one, cache)


def test_weights_that_the_kernels_do_not_read_are_refused(model: CausalModel) -> None:
    assert model.fused is not None
    model.fused._head = Joined(model.model.lm_head.weight.detach().T.contiguous().T, None)
    with pytest.raises(LookupError, match=r"do not read weights of torch\.float32 with strides \(1, 61\)"):
        model.fused.on_pages(64)


def test_a_pass_that_is_not_captured_is_repeated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Because its capture failed, or because FORESAY_GRAPHS=0 turns captures off."""

    def refusing(run: passes.Replay) -> passes.Replay:
        raise RuntimeError("operation not permitted when stream is capturing")

    def run() -> passes.Outputs:
        return None, {}

    monkeypatch.setattr(capture, "CudaGraphs", lambda device: refusing)
    gpu = torch.device("cuda")
    assert capture.capture_on(gpu)(run) is run and "not permitted" in caplog.text
    caplog.clear()
    monkeypatch.setenv("FORESAY_GRAPHS", "0")
    assert capture.capture_on(gpu)(run) is run and not caplog.text
