"""What the target has to say of a text: its hidden states and its laws, computed now or read from a folder.

Owns the passes over whole texts and the files they are kept in. A law is kept as the hidden state that its scores are made of
and the logarithm of the scores' sum, so that any part of it can be had again exactly, in a fraction of the room of its
probabilities. Knows no draft.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from foresay.decoding.protocols import Feed, Logits
from foresay.errors import ConfigError, UnsupportedModelError
from foresay.models.heads.model import target_rows
from foresay.models.huggingface.causal import CausalModel
from foresay.models.huggingface.model import MAX_TOKENS
from foresay.training.outputs import Text


@dataclass(frozen=True, slots=True)
class Shown:
    """A target's view of one text of S tokens.

    states: [S, n * H], the hidden states asked for, side by side. last: [S, H], what scores are made of. log_sum: [S] float32,
    the logarithm of the sum of all exponentiated scores.
    """

    states: torch.Tensor
    last: torch.Tensor
    log_sum: torch.Tensor

    def as_tensors(self, number: int) -> dict[str, torch.Tensor]:
        """By name, for a file that holds several."""
        return {f"{number}.{name}": getattr(self, name).contiguous() for name in self.__slots__}


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
            feed = Feed(ids, [ids.shape[1]], logits=Logits.ALL, hidden_layers=(*self.hidden_layers, last))
            output = target.forward(feed, cache)
            hidden = [output.hidden[layer][0] for layer in self.hidden_layers]
            states = torch.cat(hidden, -1) if hidden else output.hidden[last][0, :, :0]
            parts.append((states, output.hidden[last][0], output.scores()[0].float().logsumexp(-1)))
        return Shown(*(torch.cat(some).cpu() for some in zip(*parts, strict=True)))


class KeptPasses:
    """What the target showed, in a folder; what is missing there is computed and added."""

    AT_ONCE = 32
    """Texts in a file."""

    def __init__(self, folder: str | os.PathLike[str], passes: TargetPasses, texts: Sequence[Text], key: str) -> None:
        """key: what the target is. Raises ConfigError for a folder that cannot be made."""
        self._passes, self._texts = passes, list(texts)
        said = sha256(f"{key} {passes.hidden_layers}".encode())
        for text in texts:
            said.update(text.tokens.tobytes())
        self._folder = Path(folder) / said.hexdigest()[:16]
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder {str(self._folder)!r}: {error.strerror}") from None
        self._open: dict[int, Any] = {}
        self._files = ExitStack()

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def num_files(self) -> int:
        """Files of a whole set."""
        return -(-len(self._texts) // self.AT_ONCE)

    def prepare(self, number: int) -> None:
        """Make file `number`, unless it is there."""
        path = self._path(number)
        if path.is_file():
            return
        first = number * self.AT_ONCE
        tensors: dict[str, torch.Tensor] = {}
        for i, text in enumerate(self._texts[first : first + self.AT_ONCE], first):
            tensors |= self._passes(text).as_tensors(i)
        part = path.with_suffix(".part")
        save_file(tensors, part)
        os.replace(part, path)

    def __call__(self, index: int) -> Shown:
        """What the target showed of text `index`."""
        number = index // self.AT_ONCE
        if number not in self._open:
            self.prepare(number)
            try:
                self._open[number] = self._files.enter_context(safe_open(self._path(number), "pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"cannot read {str(self._path(number))!r}: {error}; remove it") from None
        file = self._open[number]
        return Shown(*(file.get_tensor(f"{index}.{name}") for name in Shown.__slots__))

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:06}.safetensors"


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
