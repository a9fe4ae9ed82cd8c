"""A head on hidden states, and what an independent reading of its layout computes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from foresay.decoding.protocols import Logits, ModelInput
from foresay.models.drafts.base import NEXT, StoredDraft
from foresay.models.drafts.config import HeadConfig
from foresay.models.drafts.head import HeadModel
from foresay.models.drafts.kinds import new_module
from foresay.models.huggingface.causal import CausalModel
from helpers.passes import started


def random_head(
    target: CausalModel,
    *,
    layers: tuple[int, ...] | None = None,
    ids: Sequence[int] | None = None,
    before: bool = False,
    seed: int = 0,
    gain: float = 3.0,
    parts: Mapping[str, Any] | None = None,
    kind: type[HeadConfig] = HeadConfig,
    **changes: Any,
) -> StoredDraft:
    """Random weights, large enough that draft tokens differ. parts: other fields of the configuration."""
    config = target.model.config
    layers = tuple(range(target.num_layers)) if layers is None else layers
    layer = {
        "hidden_size": config.hidden_size,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        **changes,
    }
    size = target.vocab_size if ids is None else len(ids)
    made = kind(
        layer=layer,
        vocab_size=target.vocab_size,
        draft_vocab_size=size,
        target_hidden_size=config.hidden_size,
        hidden_layers=layers,
        norm_before_residual=before,
        target="tiny",
        **(parts or {}),
    )
    torch.manual_seed(seed)
    module = new_module(made, len(layers))
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "norm" in name:
                weight += 0.3 * torch.randn_like(weight)
            else:
                weight *= gain
    return StoredDraft(made, module, None if ids is None else torch.tensor(sorted(ids)))


class Layout:
    """A layout of drafts on hidden states read once more, in float64. weights: its tensors. config: its config.json."""

    def __init__(self, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        self.weights, self.config = {name: value.double() for name, value in weights.items()}, config

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean = x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return x / mean.sqrt() * self.weights[f"{name}.weight"]

    def product(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[f"{name}.weight"].T

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """[n, L * H], the target's hidden states, -> [n, D]."""
        states = states.double()
        if "input_norm.weight" in self.weights:
            states = self.norm(states, "input_norm")
        if "fc_norm.0.weight" in self.weights:
            parts = states.chunk(sum("fc_norm" in name for name in self.weights), -1)
            states = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in enumerate(parts)], -1)
        return self.product(states, "fc")

    def heads(self, x: torch.Tensor, name: str, count: int, at: torch.Tensor | None = None) -> torch.Tensor:
        """[n, inputs] -> [n, count, dim], normalized if the layout does so, and rotated to positions [n], if given."""
        dim = self.config["head_dim"]
        x = self.product(x, f"{name}_proj").view(len(x), count, dim)
        x = self.norm(x, f"{name}_norm") if f"{name}_norm.weight" in self.weights else x
        if at is None:
            return x
        angles = at[:, None, None] / self.config["rope_theta"] ** (torch.arange(0, dim, 2).double() / dim)
        apart = self.config.get("rope_is_neox_style", True)  # pairs of the two halves; otherwise of neighbours
        low, high = x.chunk(2, -1) if apart else (x[..., ::2], x[..., 1::2])
        pairs = low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()
        return torch.cat(pairs, -1) if apart else torch.stack(pairs, -1).flatten(-2)

    def attended(self, read: torch.Tensor, inputs: torch.Tensor, name: str, seen: torch.Tensor) -> torch.Tensor:
        """[n, D] for the last n of m inputs. seen: [n, m], True for what each of them sees."""
        count, shared = (self.config[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
        at = torch.arange(len(inputs))
        query, key = self.heads(read, f"{name}.q", count, at[-len(read) :]), self.heads(inputs, f"{name}.k", shared, at)
        key, value = (x.repeat_interleave(count // shared, 1) for x in (key, self.heads(inputs, f"{name}.v", shared)))
        scores = torch.einsum("qhd,khd->hqk", query, key) / self.config["head_dim"] ** 0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        return self.product(torch.einsum("hqk,khd->qhd", weights, value).flatten(1), f"{name}.o_proj")

    def gated(self, y: torch.Tensor, name: str) -> torch.Tensor:
        gate, up = (self.product(y, f"{name}.{part}_proj") for part in ("gate", "up"))
        return self.product(torch.nn.functional.silu(gate) * up, f"{name}.down_proj")

    def outputs(self, features: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """[n, D] each -> [n, D], before the last norm."""
        x, at = features, torch.arange(len(features))
        seen = (at <= at[:, None]) & (at > at[:, None] - (self.config.get("sliding_window") or 1 << 30))
        for i in range(self.config["num_hidden_layers"]):
            name = f"layers.{i}"
            read = self.norm(x, f"{name}.input_layernorm" if i else f"{name}.hidden_norm")
            residual = read if not i and self.config["norm_before_residual"] else x
            if not i:
                read = torch.cat([self.norm(embedded.double(), "layers.0.input_layernorm"), read], -1)
            x = residual + self.attended(read, read, f"{name}.self_attn", seen)
            x = x + self.gated(self.norm(x, f"{name}.post_attention_layernorm"), f"{name}.mlp")
        return x

    def chain(self, states: torch.Tensor, embedded: torch.Tensor, head: torch.Tensor) -> list[torch.Tensor]:
        """The scores [K] after a text's first n positions [n, 3 H] and after each draft token; embedded: [n + k, D]."""
        features, found = self.features(states), []
        while len(features) <= len(embedded):
            x = self.outputs(features, embedded[: len(features)])[-1:]
            normed = self.norm(x, "norm")
            found.append((head.double() @ normed.T)[:, 0])
            features = torch.cat([features, normed if self.config.get("norm_output") else x])
        return found


def fed(head: HeadModel, cache: Any, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A pass over pairs, tokens [n] and features [n, D]: the scores [V] after them, and the next feature [1, D]."""
    given = ModelInput(tokens[None], [len(tokens)], logits=Logits.LAST, features=features[None])
    out = head.forward(given, cache)
    return out.scores()[0, -1], out.hidden[NEXT][0, -1:]


def chain(
    head: HeadModel, tokens: torch.Tensor, features: torch.Tensor, drafts: Iterable[int] | int
) -> list[torch.Tensor]:
    """Scores after pairs and after each draft token, [V] each, by single passes. drafts: tokens, or a number of the likeliest."""
    cache = started(head)
    scores, after = fed(head, cache, tokens, features)
    found = [scores]
    for token in [None] * drafts if isinstance(drafts, int) else drafts:
        scores, after = fed(head, cache, torch.tensor([int(scores.argmax()) if token is None else token]), after)
        found.append(scores)
    return found
