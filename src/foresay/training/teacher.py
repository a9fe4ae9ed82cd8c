"""What the target has to say of a text: its hidden states and its laws, computed now or read from a folder.

Owns the passes over whole texts and the files they are kept in. A law is kept as the hidden state that its scores are made of
and the logarithm of the scores' sum, so that any part of it can be had again exactly, in a fraction of the room of its
probabilities. Knows no draft.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foresay.decoding.protocols import Logits, ModelInput
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.files import atomic_write
from foresay.models.heads.model import target_rows
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.model import MAX_TOKENS
from foresay.training.outputs import Text

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shown:
    """A target's view of one text of S tokens.

    states: [S, n * H], the hidden states asked for, side by side. last: [S, H], what scores are made of. log_sum: [S] float32,
    the logarithm of the sum of all exponentiated scores.
    """

    states: torch.Tensor
    last: torch.Tensor
    log_sum: torch.Tensor


class TargetPasses:
    """The target, asked about whole texts."""

    def __init__(self, target: CausalModel, hidden_layers: Sequence[int]) -> None:
        self.target, self.hidden_layers = target, tuple(hidden_layers)

    def __call__(self, text: Text) -> Shown:
        """What it shows of a text."""
        target, last = self.target, self.target.num_layers
        cache = target.new_cache()
        cache.add_rows(1)
        parts = []
        for start in range(0, len(text.tokens), MAX_TOKENS):
            ids = torch.from_numpy(text.tokens[start : start + MAX_TOKENS])[None].to(target.device)
            model_input = ModelInput(ids, [ids.shape[1]], logits=Logits.ALL, hidden_layers=(*self.hidden_layers, last))
            output = target.forward(model_input, cache)
            hidden = [output.hidden[layer][0] for layer in self.hidden_layers]
            states = torch.cat(hidden, -1) if hidden else output.hidden[last][0, :, :0]
            parts.append((states, output.hidden[last][0], output.scores()[0].float().logsumexp(-1)))
        return Shown(*(torch.cat(some).cpu() for some in zip(*parts, strict=True)))


class KeptPasses:
    """What the target showed, in a folder, a file for each text; what is missing there is computed and added.

    It belongs to the target's weights, whatever its name: to the bits that it gives for a text that is always the same.
    """

    def __init__(self, folder: str | os.PathLike[str], passes: TargetPasses) -> None:
        """Raises ConfigError for a folder that cannot be made."""
        self._passes = passes
        self._names = [*(str(layer) for layer in passes.hidden_layers), "last", "log_sum"]
        self._folder = Path(folder) / _bits(passes)[:16]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {str(self._folder)!r}: {error.strerror}") from None

    def prepare(self, text: Text) -> None:
        """Make a text's file, unless it is there with all hidden states that are asked for."""
        if not self._names_of(text).issuperset(self._names):
            self(text)

    def __call__(self, text: Text) -> Shown:
        """What the target showed of a text."""
        kept = self._read(text)
        if not all(name in kept for name in self._names):
            shown = self._passes(text)
            width = shown.last.shape[-1]
            new = dict(zip(self._names, torch.split(shown.states, width, -1), strict=False)) if width else {}
            kept |= new | {"last": shown.last, "log_sum": shown.log_sum}
            self._write(text, kept)
        layers = [kept[name] for name in self._names[:-2]]
        return Shown(torch.cat(layers, -1) if layers else kept["last"][:, :0], kept["last"], kept["log_sum"])

    def _read(self, text: Text) -> dict[str, torch.Tensor]:
        """What is there of what is asked for; of a file without some of it, everything."""
        there = self._names_of(text)
        wanted = self._names if there.issuperset(self._names) else sorted(there)
        return self._opened(text, lambda file: {name: file.get_tensor(name) for name in wanted}) if there else {}

    def _names_of(self, text: Text) -> set[str]:
        """What there is of a text."""
        return self._opened(text, lambda file: set(file.keys())) if self._path(text).is_file() else set()

    def _opened(self, text: Text, look: Callable[[Any], T]) -> T:
        path = self._path(text)
        try:
            with safe_open(path, "pt") as file:
                return look(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"cannot read {str(path)!r}: {error}; remove it") from None

    def _write(self, text: Text, tensors: dict[str, torch.Tensor]) -> None:
        with atomic_write(self._path(text), parents=True) as whole:
            save_file({name: one.contiguous() for name, one in tensors.items()}, whole)

    def _path(self, text: Text) -> Path:
        name = sha256(text.tokens.tobytes()).hexdigest()[:32]
        return self._folder / name[:2] / f"{name[2:]}.safetensors"


def _bits(passes: TargetPasses) -> str:
    """A digest of a target's configuration, and of what it says of a text of tokens from all over its vocabulary."""
    tokens = np.linspace(0, passes.target.vocab_size - 1, 64).astype(np.int64)
    shown = TargetPasses(passes.target, ())(Text(tokens, 0))
    config = passes.target.model.config.to_json_string(use_diff=False).encode()
    return sha256(config + shown.last.float().numpy().tobytes() + shown.log_sum.numpy().tobytes()).hexdigest()


class TeacherHead:
    """The target's scores of some tokens, from the hidden state that it makes them of."""

    def __init__(self, target: CausalModel, token_ids: torch.Tensor | None) -> None:
        """token_ids: [m]; None: all. Raises UnsupportedModelError for a target without a head whose rows can be taken."""
        self._config = target.model.config.get_text_config(decoder=True)
        self.weight = target_rows(target, token_ids).detach().float().clone()
        """[m, H]"""

    def probs(self, last: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
        """The tokens' probabilities [N, m] from [N, H] and [N]; what they leave over belongs to the others."""
        with torch.autocast(last.device.type, enabled=False):  # a law is not rounded because a draft's products are
            scores = self.finish(last.float() @ self.weight.to(last.device).T)
            return (scores - log_sum[:, None]).exp()

    def finish(self, scores: torch.Tensor) -> torch.Tensor:
        """What the target makes of its head's output."""
        return finished(scores, self._config)

    def check(self, shown: Shown) -> None:
        """Compare a head of all tokens with what the target says of a text; raises UnsupportedModelError where they differ."""
        again = self.finish(shown.last[:16].float().to(self.weight.device) @ self.weight.T).logsumexp(-1).cpu()
        if not torch.allclose(again, shown.log_sum[:16], atol=0.05, rtol=0.02):
            raise UnsupportedModelError("the target's scores are not its head's rows times its last hidden state")


def finished(scores: torch.Tensor, config: Any) -> torch.Tensor:
    """A head's output [..., V] divided and capped as a model's configuration says."""
    scale = float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    scores = scores / scale
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap
