"""A self-check: does a model, cached in ragged rows and rewound, score what it scores without a cache?

Families that the tests cover are trusted; any other is checked once when it is loaded, and refused when it fails, so that
an unknown attention implementation gives an error instead of a wrong output. Owns the list of covered families.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.decoding.sampling_params import SamplingParams
from foresay.errors import ModelLoadError, UnsupportedModelError
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.config_sizes import check_sizes
from foresay.models.huggingface.fused import NotFusedError
from foresay.models.huggingface.seq2seq import Seq2SeqModel

VERIFIED = frozenset(
    {
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen3",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "phi",
        "phi3",
        "gpt_neox",
        "gpt2",
        "opt",
        "falcon",
        "olmo2",
        "granite",
        "starcoder2",
        "gpt_oss",
        "deepseek_v3",
        "bloom",
    }
)
"""model_type of the decoder-only families whose greedy output the tests compare with transformers."""

VERIFIED_SEQ2SEQ = frozenset({"t5", "bart", "marian", "mbart", "m2m_100"})
"""model_type of the encoder-decoder families. Some have decoder-only variants, which the tests do not cover."""

_LENGTHS = (3, 9)
_SOURCES = (7, 4)
_DRAFT = 3


def verified(model: CausalModel | Seq2SeqModel) -> bool:
    """Whether the tests cover the model's family."""
    return model.model.config.model_type in (VERIFIED_SEQ2SEQ if model.reads_source else VERIFIED)


@torch.inference_mode()
def probe(model: CausalModel | Seq2SeqModel) -> float:
    """Largest difference between cached and uncached logits, as a share of the uncached logits' spread.

    Two ragged rows are filled, fed tokens that are then rejected, rewound, and fed again.
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
    fed = torch.stack([row[start : start + _DRAFT] for row, start in zip(tokens, starts, strict=True)])
    cached = model.forward(ModelInput(fed, (_DRAFT,) * len(_LENGTHS)), cache).scores().float()
    worst = 0.0
    for i, start in enumerate(starts):
        plain = model.uncached(tokens[i : i + 1, : start + _DRAFT], sources[i])[0, -_DRAFT:].float()
        difference = _difference(plain, cached[i])
        if not difference <= worst:  # NaN too
            worst = difference
    return worst


def _difference(wanted: torch.Tensor, found: torch.Tensor) -> float:
    """The largest difference as a share of the spread of what is wanted; NaN where one of them is not a number."""
    finite = wanted[wanted.isfinite()]
    spread = float(finite.max() - finite.min()) if len(finite) else 0.0
    apart = torch.where(wanted == found, 0.0, (wanted - found).abs())  # equal infinities do not differ
    return float(apart.amax()) / max(spread, 1e-6)


@torch.inference_mode()
def fused_difference(model: CausalModel) -> float:
    """Largest difference between the logits of lean passes and of the family's own, as a share of the latter's spread.

    Two ragged rows over one cache each; both passes use the same weights, whatever their format.
    """
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, max(3, min(model.vocab_size, 30000)), (2, max(_LENGTHS) + _DRAFT), generator=generator)
    tokens = tokens.to(model.device)
    lean, scores = model.lean, []
    try:
        for made_by in (None, lean):
            model.lean = made_by
            cache = model.new_cache()
            cache.add_rows(2)
            model.forward(ModelInput(tokens[:, : max(_LENGTHS)], _LENGTHS, logits=Logits.NONE), cache)
            fed = tokens[:, -_DRAFT:]
            scores.append(model.forward(ModelInput(fed, (_DRAFT,) * 2), cache).scores().float())
    finally:
        model.lean = lean
    return _difference(scores[0], scores[1])


@dataclass(frozen=True, slots=True)
class OwnCode:
    """Why a model's passes are made by its family's own code. expected: it is one that nobody promised lean passes for."""

    reason: str
    expected: bool

    def __str__(self) -> str:
        return self.reason


def use_fused_layers(model: CausalModel, *, compiled: bool = False) -> OwnCode | None:
    """Make a model's passes lean where that computes what its own code does; else say why not, and leave it.

    compiled: on a CPU, only where that is by kernels compiled for it.
    """
    try:
        model.use_fused()
        if compiled and model.device.type == "cpu" and not model.one_row_at_a_time:
            raise NotFusedError("there are no kernels for it as it is")
        difference = fused_difference(model)
    except NotFusedError as error:
        model.lean = None
        return OwnCode(str(error), expected=True)
    except Exception as error:  # whatever a family's modules lack: its own code runs
        model.lean = None
        return OwnCode(f"{type(error).__name__}: {error}", expected=False)
    allowed = _allowed(model)
    if not difference <= allowed:  # NaN is refused
        model.lean = None
        differ = f"its scores differ from its own code's by {difference:.1e} of their spread, {allowed:.0e} allowed"
        return OwnCode(differ, expected=False)
    return None


def _allowed(model: CausalModel | Seq2SeqModel) -> float:
    return 1e-3 if model.model.dtype == torch.float32 else 5e-2


def _row(index: int, source: torch.Tensor | None) -> Row:
    """A row to be admitted; its tokens are fed by the probe itself. source: [1, S]."""
    return Row(index, [0], SamplingParams(), limit=1, source=None if source is None else source[0].tolist())


def check(model: CausalModel | Seq2SeqModel) -> None:
    """Check the sizes of a model's configuration, and probe a model of a family the tests do not cover.

    Raises UnsupportedModelError for sizes that cannot be, and when cached and uncached scores differ.
    """
    check_sizes(model.model.config)
    if not verified(model):
        confirm(model)


def confirm(model: CausalModel | Seq2SeqModel, doubt: str = "") -> None:
    """Probe a model, of whatever family; raises UnsupportedModelError when cached and uncached differ.

    doubt: why a covered family is probed, for the error.
    """
    allowed, kind = _allowed(model), str(model.model.config.model_type)
    name = f"{type(model.model).__name__} (model_type {kind!r})"
    because = f" ({doubt})" if doubt else ""
    try:
        difference = probe(model)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise UnsupportedModelError(
            f"{name} does not run over a cache of ragged rows: {why}{'' if doubt == why else because}"
        ) from error
    if math.isnan(difference):
        raise ModelLoadError(f"{name} gives scores that are not finite; get its files again")
    if not difference <= allowed:
        raise UnsupportedModelError(
            f"{name} scores differently over ragged rows than without a cache (difference {difference:.1e} of the logits' "
            f"spread, {allowed:.0e} allowed), so it would not be exact{because}"
        )
