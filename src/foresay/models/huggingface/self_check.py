"""A self-check that a model gives the same scores over a rewound cache of ragged rows as without a cache.

Families covered by the tests are trusted. Any other is checked once when it is loaded and rejected if it fails, so that an
unknown attention implementation causes an error instead of wrong output. Owns the list of covered families.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ModelLoadError, UnsupportedModelError
from foresay.models.families.table import VERIFIED
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.config_sizes import check_sizes
from foresay.models.huggingface.experts import is_experts
from foresay.models.huggingface.family_layers import NotFusedError
from foresay.models.huggingface.linears import activations_of
from foresay.models.huggingface.seq2seq import Seq2SeqModel

VERIFIED_SEQ2SEQ = frozenset({"t5", "bart", "marian", "mbart", "m2m_100"})
"""model_type of the covered encoder-decoder families. Some have decoder-only variants, which the tests do not cover."""

_LENGTHS = (3, 9)
_SOURCES = (7, 4)
_PROMPT, _DRAFT = 9, 3
_LONG_PROMPT = 1100
"""Tokens of a prompt over pages: more than the programs of attention read at once."""
_ROUNDED = 1e-1
"""Allowed difference of fused passes with inputs rounded to 8 bits. A 4-bit model of 135M parameters differs by 0.04 to 0.06,
which depends on the instruction set."""


def verified(model: CausalModel | Seq2SeqModel) -> bool:
    """True if the tests cover the model's family."""
    return model.model.config.model_type in (VERIFIED_SEQ2SEQ if model.reads_source else VERIFIED)


@torch.inference_mode()
def probe(model: CausalModel | Seq2SeqModel) -> float:
    """Return the largest difference between cached and uncached logits, as a share of the range of the uncached logits.

    Two ragged rows are prefilled, fed draft tokens, rewound as if these were rejected, and fed again.
    """
    generator = torch.Generator().manual_seed(0)
    total = max(_LENGTHS) + _DRAFT
    high = max(3, min(model.vocab_size, 30000))
    tokens = torch.randint(2, high, (2, total), generator=generator).to(model.device)
    sources = [
        torch.randint(2, high, (1, n), generator=generator).to(model.device) if model.reads_source else None
        for n in _SOURCES
    ]
    cache = model.new_cache()
    model.admit(Rows([_row(i, source) for i, source in enumerate(sources)]), 0, cache)
    model.forward(ModelInput(tokens[:, : max(_LENGTHS)], _LENGTHS, logits=Logits.NONE), cache)
    model.forward(ModelInput(tokens[:, :_DRAFT].flip(1), (_DRAFT, 1)), cache)
    starts = [length - 1 for length in _LENGTHS]
    cache.truncate(starts)
    counts = [start + _DRAFT - length for start, length in zip(starts, cache.lengths, strict=True)]
    parts = [row[start + _DRAFT - n : start + _DRAFT] for row, start, n in zip(tokens, starts, counts, strict=True)]
    fed = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
    cached = model.forward(ModelInput(fed, counts), cache).scores().float()
    worst = 0.0
    for i, (start, count) in enumerate(zip(starts, counts, strict=True)):
        plain = model.uncached(tokens[i : i + 1, : start + _DRAFT], sources[i])[0, -_DRAFT:].float()
        difference = _difference(plain, cached[i, count - _DRAFT : count])
        if not difference <= worst:  # NaN too
            worst = difference
    return worst


def _difference(expected: torch.Tensor, actual: torch.Tensor) -> float:
    """Return the largest difference as a share of the expected values' range; NaN if any value is NaN."""
    finite = expected[expected.isfinite()]
    spread = float(finite.max() - finite.min()) if len(finite) else 0.0
    differences = torch.where(expected == actual, 0.0, (expected - actual).abs())  # equal infinities do not differ
    return float(differences.amax()) / max(spread, 1e-6)


@torch.inference_mode()
def fused_difference(model: CausalModel) -> float:
    """Return the largest difference between fused logits and those of the family's code, as a share of the latter's range.

    For mixtures of experts in fewer bits than float32 it is the median over tokens of their largest difference. The family's
    code runs one pass, the fused layers a prefill and a pass over its cache; both use the same weights, in any format.
    """
    generator = torch.Generator().manual_seed(1)
    prompt = _PROMPT
    if model.paged is not None and not model.hardware.on_cpu:
        prompt = min(_LONG_PROMPT, model.max_length - _DRAFT, model.paged.pool.num_tokens - _DRAFT)
    tokens = torch.randint(2, max(3, min(model.vocab_size, 30000)), (1, prompt + _DRAFT), generator=generator)
    tokens = tokens.to(model.device)
    fused, scores = model.fused, []
    try:
        for decoder, prefilled in ((None, 0), (fused, prompt)):
            model.fused = decoder
            cache = model.new_cache()
            cache.add_rows(1)
            if prefilled:
                model.forward(ModelInput(tokens[:, :prefilled], (prefilled,), logits=Logits.NONE), cache)
            fed = tokens[:, prefilled:]
            scores.append(model.forward(ModelInput(fed, (fed.shape[1],)), cache).scores()[:, -_DRAFT:].float())
    finally:
        model.fused = fused
    if _is_precise(model) or not any(map(is_experts, model.model.modules())):
        return _difference(scores[0], scores[1])
    # rounded otherwise, a near tie between experts may be decided otherwise, which shows in single tokens
    spread = float(scores[0].max() - scores[0].min())
    return float((scores[0] - scores[1]).abs().amax(-1).median()) / max(spread, 1e-6)


@dataclass(frozen=True, slots=True)
class UnfusedReason:
    """The reason why a model runs its family's own code. expected: True if fused layers do not support such a model."""

    reason: str
    expected: bool

    def __str__(self) -> str:
        return self.reason


def use_fused_layers(model: CausalModel, *, compiled: bool = False) -> UnfusedReason | None:
    """Use fused layers if they compute the same scores as the model's own code; otherwise leave the model and return the reason.

    compiled: on a CPU, use them only with kernels compiled for this machine.
    """
    try:
        model.use_fused()
        if compiled and model.hardware.on_cpu and not model.batch_invariant:
            raise NotFusedError("the compiled kernels do not support it in its current format")
        difference = fused_difference(model)
    except NotFusedError as error:
        model.fused = None
        return UnfusedReason(str(error), expected=True)
    except Exception as error:  # modules may lack anything: the family's own code runs then
        model.fused = None
        return UnfusedReason(f"{type(error).__name__}: {error}", expected=False)
    allowed = _allowed_on_kernels(model)
    if not difference <= allowed:  # rejects NaN, too
        model.fused = None
        reason = f"its scores differ from its own code's by {difference:.1e} of their range, {allowed:.0e} allowed"
        return UnfusedReason(reason, expected=False)
    return None


def judged(model: CausalModel | Seq2SeqModel) -> str:
    """Describe the difference that `probe` finds, and whether it is one of rounding."""
    difference, allowed = probe(model), _allowed_on_kernels(model)
    found = "good" if difference <= allowed else "NOT GOOD"
    return f"{found}: cached and uncached scores differ by {difference:.1e} of their range, {allowed:.0e} allowed"


def _allowed_on_kernels(model: CausalModel | Seq2SeqModel) -> float:
    if "int8" not in activations_of(model.model):
        return _allowed(model)
    return 2 * _ROUNDED if getattr(model, "rewinds_states", False) else _ROUNDED  # states carry that of all tokens


def _allowed(model: CausalModel | Seq2SeqModel) -> float:
    return 1e-3 if _is_precise(model) else 5e-2


def _is_precise(model: CausalModel | Seq2SeqModel) -> bool:
    """True if numbers are float32 throughout; rounded to 8 bits, the last digits of inputs decide between two levels."""
    return model.model.dtype == torch.float32 and "int8" not in activations_of(model.model)


def _row(index: int, source: torch.Tensor | None) -> Row:
    """Return a row to admit; `probe` feeds its tokens itself. source: [1, S]."""
    return Row(index, [0], SamplingParams(), limit=1, source=None if source is None else source[0].tolist())


def check(model: CausalModel | Seq2SeqModel) -> None:
    """Check the sizes in a model's configuration, and probe the model if the tests do not cover its family.

    Raises UnsupportedModelError for sizes out of range, and if cached and uncached scores differ.
    """
    check_sizes(model.model.config)
    if not verified(model):
        confirm(model)


def confirm(model: CausalModel | Seq2SeqModel, doubt: str = "") -> None:
    """Probe a model of any family.

    doubt: the reason for probing a covered family, for the error message. Raises UnsupportedModelError if the model does not run
    over a cache of ragged rows or scores differently there, and ModelLoadError if its scores are not finite.
    """
    allowed, kind = _allowed(model), str(model.model.config.model_type)
    name = f"{type(model.model).__name__} (model_type {kind!r})"
    suffix = f" ({doubt})" if doubt else ""
    try:
        difference = probe(model)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UnsupportedModelError(
            f"{name} does not run over a cache of ragged rows: {why}{'' if doubt == why else suffix}"
        ) from error
    if math.isnan(difference):
        raise ModelLoadError(f"{name} gives scores that are not finite; download its files again")
    if not difference <= allowed:
        raise UnsupportedModelError(
            f"{name} scores differently over ragged rows than without a cache (difference {difference:.1e} of the logits' "
            f"range, {allowed:.0e} allowed), so it would not be exact{suffix}"
        )
