"""Baselines of a plain step that need no other engine: PyTorch's compiled decoding over a static cache, and products alone.

Owns a Llama of random weights that decodes one row, and the turns in which it is timed with plain steps; knows no pages, rows or
drafts. Its scores have no fixed bits, and it never reads a token on the host, as a plain step must.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from common import Figures, log
from torch.nn import functional

ROUNDS, WARM = 3, 4
"""Timed runs of each baseline; calls before them, in which PyTorch compiles and captures."""


class StaticLlama(torch.nn.Module):
    """A Llama over one token, whose cache has a fixed number of slots: buffers, since a graph may change no other tensors."""

    def __init__(self, config: Any, slots: int, device: torch.device) -> None:
        super().__init__()
        where: Any = {"device": device, "dtype": torch.bfloat16}
        hidden, inner, key_heads = config.hidden_size, config.intermediate_size, config.num_key_value_heads
        self.heads, self.size = [config.num_attention_heads, key_heads, key_heads], config.head_dim
        own = self.heads[0] * self.size
        sizes = ((hidden, sum(self.heads) * self.size), (own, hidden), (hidden, 2 * inner), (inner, hidden))

        def linear(inputs: int, outputs: int) -> torch.nn.Module:
            return torch.nn.Linear(inputs, outputs, bias=False, **where)

        self.layers: Any = torch.nn.ModuleList(
            torch.nn.ModuleList(linear(*size) for size in sizes) for _ in range(config.num_hidden_layers)
        )
        self.embedding, self.head = (
            torch.nn.Embedding(config.vocab_size, hidden, **where),
            linear(hidden, config.vocab_size),
        )
        self.slots = torch.nn.Buffer(torch.arange(slots, device=device))
        angles = self.slots[:, None] * 10000.0 ** (-torch.arange(0, self.size, 2, device=device) / self.size)
        self.turns = torch.nn.Buffer(torch.stack([angles.cos(), angles.sin()], 1).to(torch.bfloat16))
        for i in range(2 * len(self.layers)):
            self.register_buffer(f"cache{i}", torch.zeros(key_heads, slots, self.size, **where))
        self.requires_grad_(False)

    def forward(self, token: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Return the likeliest next token, [1]. token, at: [1] int64, the token and its slot."""
        x, turn = self.embedding(token), self.turns[at][0]
        mask = torch.where(self.slots <= at, 0.0, float("-inf"))
        for i, (qkv, out, gate_up, down) in enumerate(self.layers):
            keys, values = getattr(self, f"cache{2 * i}"), getattr(self, f"cache{2 * i + 1}")
            query, key, value = qkv(normed(x)).view(-1, 1, self.size).split(self.heads)
            keys.index_copy_(1, at, turned(key, turn))
            values.index_copy_(1, at, value)
            query = turned(query, turn).view(len(keys), -1, self.size)
            scores = (query @ keys.transpose(1, 2)).float() * self.size**-0.5 + mask
            x = x + out((scores.softmax(-1).to(x.dtype) @ values).view(1, -1))
            gate, up = gate_up(normed(x)).chunk(2, -1)
            x = x + down(functional.silu(gate) * up)
        chosen: torch.Tensor = self.head(normed(x)).argmax(-1)
        return chosen


def normed(x: torch.Tensor) -> torch.Tensor:
    return functional.rms_norm(x, x.shape[-1:], eps=1e-5)


def turned(x: torch.Tensor, turn: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of x [..., D]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * turn[0] - b * turn[1], b * turn[0] + a * turn[1]), -1)


def products(model: StaticLlama, rows: int) -> Callable[[], Any]:
    """All matrix products of a pass over one token of each row, by cuBLAS in one CUDA graph; on a CPU their calls."""
    weights = [one.weight for one in model.modules() if isinstance(one, torch.nn.Linear)]
    given = {size: torch.randn(rows, size).to(weights[0]) for size in {weight.shape[1] for weight in weights}}

    def run() -> None:
        for weight in weights:
            functional.linear(given[weight.shape[1]], weight)

    if weights[0].device.type != "cuda":
        return run
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def compiled(model: StaticLlama, context: int) -> Callable[[], Any]:
    """A decoding step after `context` tokens, compiled whole. Calls repeat one position, which reads as much as any other."""
    step = torch.compile(model, mode="reduce-overhead", fullgraph=True)
    at, token = model.slots[context : context + 1].clone(), torch.zeros_like(model.slots[:1])
    return lambda: token.copy_(step(token, at))


def baselines(config: Any, device: torch.device, context: int, steps: int, plain_ms: Callable[[int], float]) -> Figures:
    """Milliseconds of each baseline, and those of plain steps over them. plain_ms: of a run of plain steps of some rows."""
    model, out = StaticLlama(config, context + 64, device), Figures()
    wait: Any = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    made: list[tuple[str, int, Callable[[], Any]]] = [("compiled", 1, partial(compiled, model, context))]
    made += [("products", rows, partial(products, model, rows)) for rows in (1, 32)]

    def own_ms(run: Callable[[], Any], count: int) -> float:
        wait()
        began = perf_counter()
        for _ in range(count):
            run()
        wait()
        return 1e3 * (perf_counter() - began) / count

    for kind, rows, make in made:
        try:
            own_ms(run := make(), WARM)
        except Exception as error:  # such as a host without a compiler
            log(f"  {kind}, {rows} rows: left out: {type(error).__name__}: {str(error)[:200]}")
            continue
        plain_ms(rows)
        plain, own = map(sum, zip(*[(plain_ms(rows), own_ms(run, steps)) for _ in range(ROUNDS)], strict=True))
        out |= {f"{kind}_ms_{rows}": own / ROUNDS, f"plain_over_{kind}_{rows}": plain / own}
    return out
