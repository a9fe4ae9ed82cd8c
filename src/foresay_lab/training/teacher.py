"""The target's hidden states and distributions for a text, computed or read from a folder.

Owns the forward passes over whole texts and their cache files. A distribution is stored as the last hidden state and the
logarithm of the sum of exponentiated scores, from which any part of it can be recomputed exactly, in a fraction of the space of
its probabilities. Knows no draft.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foresay.decoding.protocols import Logits, ModelInput
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.files import atomic_write
from foresay.models.drafts.base import target_rows
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.model import MAX_TOKENS
from foresay_lab.training.outputs import Text


@dataclass(frozen=True, slots=True)
class TargetOutputs:
    """A target's outputs for one text of S tokens.

    states: [S, n * H], the requested hidden states, concatenated. last: [S, H], the input of the output layer. log_sum: [S]
    float32, logsumexp of the scores.
    """

    states: torch.Tensor
    last: torch.Tensor
    log_sum: torch.Tensor


class TargetPasses:
    """Forward passes of the target over whole texts."""

    def __init__(self, target: CausalModel, hidden_layers: Sequence[int]) -> None:
        self.target, self.hidden_layers = target, tuple(hidden_layers)

    def __call__(self, text: Text) -> TargetOutputs:
        """Compute the target's outputs for a text."""
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
        return TargetOutputs(*(torch.cat(tensors).cpu() for tensors in zip(*parts, strict=True)))


class CachedPasses:
    """A cache of the target's outputs in a folder with a file per text. Missing outputs are computed and added.

    The cache key is the target's weights, not its name: the exact outputs for a fixed text.
    """

    def __init__(self, folder: str | os.PathLike[str], passes: TargetPasses) -> None:
        """Raises ConfigError if the folder cannot be created."""
        self._passes = passes
        self._names = [*(str(layer) for layer in passes.hidden_layers), "last", "log_sum"]
        # the target's configuration, and its outputs for a text that spans its vocabulary
        tokens = np.linspace(0, passes.target.vocab_size - 1, 64).astype(np.int64)
        outputs = TargetPasses(passes.target, ())(Text(tokens, 0))
        config = passes.target.model.config.to_json_string(use_diff=False).encode()
        key = sha256(config + outputs.last.float().numpy().tobytes() + outputs.log_sum.numpy().tobytes())
        self._folder = Path(folder) / key.hexdigest()[:16]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot be created: {error.strerror}", param="folder", value=self._folder) from None

    def prepare(self, text: Text) -> None:
        """Make a text's file, unless it exists and has all requested hidden states."""
        with self._opened(text) as file:
            missing = file is None or not set(self._names) <= set(file.keys())
        if missing:
            self(text)

    def __call__(self, text: Text) -> TargetOutputs:
        """Return the target's outputs for a text."""
        with self._opened(text) as file:  # all its tensors, if a requested one is missing
            stored = set[str]() if file is None else set(file.keys())
            names = self._names if stored.issuperset(self._names) else sorted(stored)
            cached = {name: file.get_tensor(name) for name in names}
        if not stored.issuperset(self._names):
            outputs = self._passes(text)
            width = outputs.last.shape[-1]
            new = dict(zip(self._names, torch.split(outputs.states, width, -1), strict=False)) if width else {}
            cached |= new | {"last": outputs.last, "log_sum": outputs.log_sum}
            with atomic_write(self._path(text), parents=True) as temporary:
                save_file({name: one.contiguous() for name, one in cached.items()}, temporary)
        layers = [cached[name] for name in self._names[:-2]]
        states = torch.cat(layers, -1) if layers else cached["last"][:, :0]
        return TargetOutputs(states, cached["last"], cached["log_sum"])

    @contextmanager
    def _opened(self, text: Text) -> Iterator[Any]:
        """Open a text's file; yield None without one."""
        path = self._path(text)
        try:
            with safe_open(path, "pt") if path.is_file() else nullcontext() as file:
                yield file
        except (OSError, SafetensorError) as error:
            problem = f"cannot be read: {error}; remove it to compute it again"
            raise ConfigError(problem, param="path", value=path) from None

    def _path(self, text: Text) -> Path:
        name = sha256(text.tokens.tobytes()).hexdigest()[:32]
        return self._folder / name[:2] / f"{name[2:]}.safetensors"


class TeacherHead:
    """The target's scores of some tokens, computed from its last hidden state."""

    def __init__(self, target: CausalModel, token_ids: torch.Tensor | None) -> None:
        """token_ids: [m]; None: all. Raises UnsupportedModelError for a target whose output layer's rows are not available."""
        self._config = target.model.config.get_text_config(decoder=True)
        self.weight = target_rows(target, token_ids).detach().float().clone()
        """[m, H]"""

    def probs(self, last: torch.Tensor, log_sum: torch.Tensor) -> torch.Tensor:
        """Return the tokens' probabilities [N, m] from `last` [N, H] and `log_sum` [N]. The rest belongs to other tokens."""
        with torch.autocast(last.device.type, enabled=False):  # in float32, whatever the draft's precision
            scores = finished(last.float() @ self.weight.to(last.device).T, self._config)
            return (scores - log_sum[:, None]).exp()

    def check(self, outputs: TargetOutputs) -> None:
        """Compare the scores of all tokens with the target's outputs. Raises UnsupportedModelError if they differ."""
        scores = finished(outputs.last[:16].float().to(self.weight.device) @ self.weight.T, self._config)
        if not torch.allclose(scores.logsumexp(-1).cpu(), outputs.log_sum[:16], atol=0.05, rtol=0.02):
            text = "the target's scores are not its output layer's rows times its last hidden state"
            raise UnsupportedModelError(text)


def finished(scores: torch.Tensor, config: Any) -> torch.Tensor:
    """Scale and cap an output layer's scores [..., V] as a model's configuration states."""
    scale = float(getattr(config, "logits_scaling", None) or 1.0)
    softcap = getattr(config, "final_logit_softcapping", None)
    scores = scores / scale
    return scores if softcap is None else torch.tanh(scores / softcap) * softcap
