"""Decoding steps on a GPU, over a model of real shapes with random weights, as ratios to a plain step and to their floors.

    python benchmarks/gpu.py [--only PART ...] [--small] [--device cuda|cpu] [--steps N] [--seconds N] [--out FILE] [--write]

The target has the shapes of Llama-3.1-8B in bf16, with joined layers as loaded checkpoints have them; drafts have one layer of
its shape and 32,000 tokens. Random models agree by chance alone, so that a step with drafts is one draft, one pass of the target
and one token; `known` drafts the target's own text instead. FORESAY_PAGES=0 runs passes as PyTorch operations. A step takes
from read to read by the host's clock, ratios are those of sums over runs in turns, and figures are written after each part.
`--small` uses shapes that fit anywhere; it is the default without a GPU.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from common import Figures, arguments, filled, measured, parsed, pass_seconds, publish, random_prompt
from gpu_baselines import baselines
from gpu_bits import same_bits, same_drafts
from transformers import LlamaConfig, LlamaForCausalLM

import foresay
from foresay.decoding.acceptance import make_rule
from foresay.decoding.outcome import Step
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy, ModelInput
from foresay.decoding.rows import Row, Rows
from foresay.drafters.hidden_states import BlockDrafter, HeadDrafter
from foresay.drafters.stateless import Stateless
from foresay.drafters.suffix import SuffixDrafter, SuffixState
from foresay.engine import Engine
from foresay.generation.load import change
from foresay.lengths import ConstantLength
from foresay.models.drafts.block import BlockModel
from foresay.models.drafts.head import HeadModel
from foresay.models.huggingface.frozen import FrozenLinear
from foresay.models.huggingface.linears import JOINT_LAYERS, join_layers, replace_jointly
from foresay_lab.measure.roofline import floor
from foresay_lab.training.new_drafts import DraftShape, new_draft
from foresay_lab.training.outputs import Text

BEGAN = perf_counter()
Timed = tuple[float, list[Step]]
"""Seconds of a step, and what each row got."""
SKIPPED = 4
"""First steps of a run that are not measured."""
ROWS = (1, 8, 32)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 1}
LEGEND = {
    "weights_gb": ("weights, GB", ""),
    "bandwidth_gb_per_s": ("memory bandwidth, GB/s", ""),
    "plain_step_ms_1": ("plain step, 1 row, ms", ""),
    "plain_step_over_floor_1": ("the same over weight bytes / memory bandwidth", "<= 1.2"),
    "plain_step_over_floor_32": ("plain step of 32 rows, the same", "<= 1.35"),
    "long_step_over_floor": ("plain step after 15,000 tokens, the same", "<= 1.3"),
    "captures_after_warm_up": ("passes captured in the second identical call", "0"),
    "tokens8_over_1": ("pass over 8 tokens / over 1", "<= 1.15"),
    "same_bits_share": (
        "tokens whose scores have the same bits alone and in chains, passes over 16 to 512 tokens",
        "1",
    ),
    "same_bits_tree_share": ("the same, first tokens of trees", "1"),
    "same_bits_nodes_share": ("the same, nodes of trees on the path to the last one", ""),
    "same_drafts_head_share": ("sampled drafts of a head with the same bits alone and among up to 31 rows", "1"),
    "same_drafts_tree_share": ("trees of a head, greedy, the same", "1"),
    "compiled_ms_1": ("plain step by torch.compile over a static cache, whose bits are not fixed, 1 row, ms", ""),
    "plain_over_compiled_1": ("plain step / the same", "<= 1.1"),
    "products_ms_1": ("matrix products of a pass by cuBLAS alone, 1 row, ms", ""),
    "plain_over_products_1": ("plain step / the same", ""),
    "products_ms_32": ("matrix products of a pass by cuBLAS alone, 32 rows, ms", ""),
    "plain_over_products_32": ("plain step / the same", ""),
    "same_bits_cost_1": ("plain step / the same with cuBLAS's products, 1 row", "<= 1.1"),
    "same_bits_cost_32": ("the same, 32 rows", "<= 1.1"),
    "ttft_512_ms": ("first token of a prompt of 512 tokens, ms", "<= 15"),
    "ttft_15000_ms": ("first token of a prompt of 15,000 tokens, ms", "<= 560"),
    "sampling_added_ms_1": ("top-k 50, top-p 0.9 over greedy, 1 row, ms", "<= 0.15"),
    "sampling_added_ms_32": ("the same, 32 rows", "<= 0.4"),
    "head5_draft_ms_1": ("5 draft tokens of a head, 1 row, ms", "<= 1.6"),
    "head5_draft_ms_8": ("the same, 8 rows", "<= 2"),
    "head5_draft_ms_32": ("the same, 32 rows", "<= 3"),
    "head5_sampled_draft_ms_1": ("the same, sampled, 1 row", "<= 1.6"),
    "head5_sampled_step_over_plain_1": ("step with 5 sampled tokens of a head / greedy plain step, 1 row", ""),
    "head5_step_over_plain_1": ("step with 5 tokens of a head / plain step, 1 row", "<= 1.35"),
    "head5_step_over_plain_8": ("the same, 8 rows", "<= 1.45"),
    "head5_step_over_plain_32": ("the same, 32 rows", "<= 1.7"),
    "tree15_step_over_plain": ("step with a tree of 15 nodes / plain step", "<= 1.45"),
    "block7_step_over_plain": ("step with a block of 7 tokens / plain step", "<= 1.2"),
    "waits_plain": ("host waits per plain step", "1"),
    "waits_head": ("host waits per step with a head, greedy", "1"),
    "waits_head_sampled": ("the same, sampled", "1"),
    "waits_tree": ("the same, with a tree", "1"),
    "waits_block": ("the same, with a block", "1"),
    "never_right_vs_plain_1": ("plain step / step of the default drafter where no draft is right, 1 row", ">= 0.98"),
    "never_right_vs_plain_32": ("the same, 32 rows", ">= 0.98"),
    "int4_step_over_bf16": ("plain step over 4-bit blocks (Q4_0) / over bf16, 1 row", "<= 0.45"),
    "known_text_speedup_1": ("text that is known, 8 tokens a pass, 1 row", ">= 7"),
    "known_text_speedup_8": ("the same, 8 rows", ">= 5"),
}


@dataclass(frozen=True)
class Shapes:
    """Sizes of the target, the tokens of a draft, and the lengths of long prompts."""

    layers: int
    hidden: int
    inner: int
    heads: tuple[int, int]
    vocabulary: int
    drafted: int
    long: int


LARGE = Shapes(32, 4096, 14336, (32, 8), 128256, 32000, 15000)
SMALL = Shapes(2, 128, 256, (4, 2), 1024, 512, 300)


def model_of(shape: Shapes, device: torch.device) -> LlamaForCausalLM:
    """A random Llama in bf16, created on the device."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads[0],
        num_key_value_heads=shape.heads[1],
        max_position_embeddings=16384,
        dtype=torch.bfloat16,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.generation_config.eos_token_id = None
    join_layers(model)
    return model.eval()


class Known(Stateless):
    """Drafts what it is given the text will be."""

    def __init__(self, texts: Sequence[Sequence[int]]) -> None:
        self._texts = texts

    def propose(self, rows: Rows, budget: Sequence[int], policy: LengthPolicy) -> Proposal:
        each = zip(rows, budget, strict=True)
        drafts = [self._texts[row.request_id][row.num_new : row.num_new + n] for row, n in each]
        return Proposal.of_lists(drafts, torch.device("cpu"))


class NeverRight(SuffixDrafter):
    """Drafts other tokens than those after a match, since random models repeat themselves."""

    def draft_tokens(self, row: Row, state: SuffixState, count: int) -> list[int]:
        return [token ^ 1 for token in super().draft_tokens(row, state, count)]


class Measure:
    """Steps of one target with several drafters."""

    def __init__(self, shape: Shapes, device: torch.device, steps: int) -> None:
        self.shape, self.steps, self.device = shape, steps, device
        self.plain = foresay.load(model_of(shape, device), drafter="none")
        self.model: Any = self.plain.target.model
        bound = floor(self.model)
        assert bound is not None
        self.bound = bound

    @cache  # noqa: B019
    def head(self) -> HeadModel:
        draft = new_draft("head", self.plain.target, self._texts, self._draft, 0)
        return HeadModel(draft, self.model)

    @cache  # noqa: B019
    def block(self) -> BlockModel:
        draft = new_draft("block", self.plain.target, self._texts, self._draft, 0)
        return BlockModel(draft, self.model)

    @property
    def _texts(self) -> list[Text]:
        return [Text(np.arange(self.shape.drafted), 0)]

    @property
    def _draft(self) -> DraftShape:
        return DraftShape(vocabulary_size=self.shape.drafted, block_size=8)

    def engine(self, rows: int, drafter: Any = None, gamma: int = 0, **more: Any) -> Engine:
        return Engine(self.model, drafter, make_rule("speculative"), ConstantLength(gamma), max_batch_size=rows, **more)

    def submit(self, engine: Engine, rows: int, context: int = 512, new: int = 1000, **params: Any) -> None:
        """Submit requests with prompts of `context` tokens, which are read one after the other."""
        size = context if self.shape is LARGE else min(context, self.shape.long)
        given = foresay.SamplingParams(max_new_tokens=new, **params)
        for first in random_prompt(rows, torch.device("cpu"), self.shape.vocabulary)[:, 0].tolist():
            engine.submit([(first + i) % self.shape.vocabulary for i in range(size)], given)

    def run(self, rows: int, drafter: Any = None, gamma: int = 0, context: int = 512, **params: Any) -> list[Timed]:
        """The steps of a batch whose prompts were read before; without the first ones. Each takes from read to read."""
        return self.timed(self.engine(rows, drafter, gamma), rows, context, **params)

    def timed(self, engine: Engine, rows: int, context: int = 512, longer: int = 1, **params: Any) -> list[Timed]:
        """See `run`. longer: times as many steps."""
        self.submit(engine, rows, context, **params)
        out: list[Timed] = []
        before = perf_counter()
        while len(out) < longer * self.steps + SKIPPED and engine.has_work:
            found = engine.step()
            before, began = perf_counter(), before
            if len(found) == rows:
                out.append((before - began, found))
        return out[SKIPPED:]

    def step_ms(
        self, rows: int, make: Callable[[], Any] = lambda: None, gamma: int = 0, **more: Any
    ) -> tuple[float, float]:
        """Milliseconds of a step and of its drafting, over all steps of the second of two runs."""
        for _ in range(2):
            steps = self.run(rows, make(), gamma, **more)
        return self._ms(steps), 1e3 * statistics.fmean(one[0].draft_s for _, one in steps)

    def _ms(self, steps: Sequence[Timed]) -> float:
        return 1e3 * statistics.fmean(seconds for seconds, _ in steps)

    def in_turns(self, rows: int, other: Callable[[], list[Timed]]) -> tuple[list[Timed], list[Timed]]:
        """Plain steps and others: three runs of each in turns, after one of each in which passes are captured."""
        self.run(rows), other()
        each = [(self.run(rows), other()) for _ in range(3)]
        return [one for plain, _ in each for one in plain], [one for _, own in each for one in own]

    def with_plain(
        self, rows: int, make: Callable[[], Any] = lambda: None, gamma: int = 0, **more: Any
    ) -> tuple[float, float, float]:
        """Milliseconds of a plain step, of a step and of its drafting: means over all steps of runs in turns."""
        plain, own = self.in_turns(rows, lambda: self.run(rows, make(), gamma, **more))
        return self._ms(plain), self._ms(own), 1e3 * statistics.fmean(one[0].draft_s for _, one in own)

    def vocabulary(self) -> int:
        return int(self.model.vocab_size)

    def head_drafter(self, nodes: int = 0) -> HeadDrafter:
        return HeadDrafter(self.head(), self.vocabulary(), nodes=nodes)

    def plain_steps(self) -> Figures:
        one, many, long = self.step_ms(1)[0], self.step_ms(32)[0], self.step_ms(1, context=self.shape.long)[0]
        captures = getattr(self.model.paged, "captures", 0)
        self.run(32)
        more = getattr(self.model.paged, "captures", 0) - captures
        return {
            "weights_gb": self.bound.weight_bytes / 1e9,
            "bandwidth_gb_per_s": self.bound.bytes_per_s / 1e9,
            "plain_step_ms_1": one,
            "plain_step_over_floor_1": one / 1e3 / self.bound.seconds(1, 512),
            "plain_step_over_floor_32": many / 1e3 / self.bound.seconds(32, 512),
            "long_step_over_floor": long / 1e3 / self.bound.seconds(1, self.shape.long),
            "captures_after_warm_up": more,
        }

    def passes(self) -> Figures:
        given = []
        for tokens in (1, 8):
            prompt = random_prompt(1, self.device, 1000)
            given.append(
                (self.model, filled(self.model, prompt), ModelInput(prompt[:, :tokens].contiguous(), [tokens]))
            )

        def wait() -> None:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        pass_seconds(given, 16, wait)
        one, eight = pass_seconds(given, self.steps, wait)
        return {"tokens8_over_1": eight / one}

    def bits(self) -> Figures:
        """Prompts are read one by one, as in the engine: those that are read together have another order of sums."""
        out = same_bits(self.model, self.device)
        for kind, gamma, nodes, params in (("head", 5, 0, SAMPLED), ("tree", 15, 15, {})):
            engines = {rows: partial(self.engine, rows, self.head_drafter(nodes), gamma) for rows in (1, 32)}
            submit = partial(self.submit, new=32, **params)
            out[f"same_drafts_{kind}_share"] = same_drafts(engines, submit)
        return out

    def baselines(self) -> Figures:
        context = min(512, self.shape.long)
        return baselines(
            self.model.model.config, self.device, context, self.steps, lambda rows: self._ms(self.run(rows))
        )

    def library_products(self) -> Figures:
        """Products of small passes by cuBLAS, in which a token's bits depend on the others."""
        if self.model.paged is None:
            return {}
        out: Figures = {}
        for rows in (1, 32):
            took = []
            for self.model.reproducible in (True, False, True, False):
                self.model.use_fused()
                took.append(self.step_ms(rows)[0])
            out[f"same_bits_cost_{rows}"] = sum(took[::2]) / sum(took[1::2])
        self.model.reproducible = True
        self.model.use_fused()
        return out

    def first_tokens(self) -> Figures:
        out: Figures = {}
        for name, size in (("ttft_512_ms", 512), ("ttft_15000_ms", self.shape.long)):
            took = []
            for run in range(3):
                engine = self.engine(1)
                prompt = [(run + 7 * i) % self.shape.vocabulary for i in range(size)]
                engine.submit(prompt, foresay.SamplingParams(max_new_tokens=2))
                began = perf_counter()
                while not engine.step():
                    pass
                took.append(1e3 * (perf_counter() - began))
            out[name] = statistics.median(took)
        return out

    def sampling(self) -> Figures:
        each = {rows: self.with_plain(rows, **SAMPLED) for rows in (1, 32)}
        return {f"sampling_added_ms_{rows}": sampled - plain for rows, (plain, sampled, _) in each.items()}

    def heads(self) -> Figures:
        out: Figures = {}
        for rows in ROWS:
            plain, step, draft = self.with_plain(rows, self.head_drafter, 5)
            out[f"head5_draft_ms_{rows}"], out[f"head5_step_over_plain_{rows}"] = draft, step / plain
        plain, step, draft = self.with_plain(1, self.head_drafter, 5, **SAMPLED)
        return out | {"head5_sampled_draft_ms_1": draft, "head5_sampled_step_over_plain_1": step / plain}

    def trees(self) -> Figures:
        plain, step, _ = self.with_plain(1, lambda: self.head_drafter(15), 15)
        return {"tree15_step_over_plain": step / plain}

    def blocks(self) -> Figures:
        plain, step, _ = self.with_plain(1, lambda: BlockDrafter(self.block(), self.vocabulary()), 7)
        return {"block7_step_over_plain": step / plain}

    def waits(self) -> Figures:
        """Operations that wait for the device, as PyTorch counts them, in all steps of a run over their number."""
        if self.device.type != "cuda":
            return {}
        kinds: dict[str, tuple[Callable[[], Any], int, dict[str, Any]]] = {
            "plain": (lambda: None, 0, {}),
            "head": (self.head_drafter, 5, {}),
            "head_sampled": (self.head_drafter, 5, SAMPLED),
            "tree": (lambda: self.head_drafter(15), 15, {}),
            "block": (lambda: BlockDrafter(self.block(), self.vocabulary()), 7, {}),
        }
        out: Figures = {}
        for name, (make, gamma, params) in kinds.items():
            self.run(1, make(), gamma, **params)
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                steps = self.run(1, make(), gamma, **params)
                torch.cuda.set_sync_debug_mode("default")
            out[f"waits_{name}"] = sum("synchronizing" in str(one.message) for one in seen) / (len(steps) + SKIPPED)
        return out

    def never_right(self) -> Figures:
        """Over all steps, also those that draft to learn whether it pays."""

        def ratio(rows: int) -> float:
            policy = change(self.plain, drafter="suffix").policy
            other = change(self.plain, drafter=NeverRight, length=policy, max_batch_size=rows)
            plain, own = self.in_turns(rows, lambda: self.timed(other.engine(), rows, longer=4))
            return self._ms(plain) / self._ms(own)

        return {f"never_right_vs_plain_{rows}": ratio(rows) for rows in (1, 32)}

    def known(self) -> Figures:
        """Tokens per second of steps that verify the target's own text, over those of plain steps."""

        def ratio(rows: int) -> float:
            engine, texts = self.engine(rows), [list[int]() for _ in range(rows)]
            self.submit(engine, rows, new=8 * (self.steps + SKIPPED + rows))  # the first row decodes while others begin
            while engine.has_work:
                for step in engine.step():
                    texts[step.request_id] += step.token_ids
            plain, own = map(tokens_per_s, self.in_turns(rows, lambda: self.run(rows, Known(texts), 7)))
            return own / plain

        return {f"known_text_speedup_{rows}": ratio(rows) for rows in (1, 8)}

    def int4(self) -> Figures:
        """Weights in blocks, which are multiplied over pages only."""
        if self.model.paged is None or self.device.type != "cuda":
            return {}
        other = Measure(self.shape, self.device, self.steps)
        in_blocks(other.model, self.device)
        plain, own = self.in_turns(1, lambda: other.run(1))
        return {"int4_step_over_bf16": self._ms(own) / self._ms(plain)}


def tokens_per_s(steps: Sequence[Timed]) -> float:
    return sum(len(row.token_ids) for _, found in steps for row in found) / sum(seconds for seconds, _ in steps)


def in_blocks(model: Any, device: torch.device) -> None:
    """Replace linear layers by products over random blocks."""
    for module in model.model.modules():
        for names in JOINT_LAYERS:
            layers = [one for name in names if type(one := getattr(module, name, None)) is torch.nn.Linear]
            if len(layers) == len(names):
                size = sum(layer.out_features for layer in layers)
                replace_jointly(module, names, random_blocks(size, layers[0].in_features, device))
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(module, name, FrozenLinear(random_blocks(child.out_features, child.in_features, device)))
    model.use_fused()


def random_blocks(rows: int, depth: int, device: torch.device) -> Any:
    """A product over random blocks of Q4_0; a few rows are repeated, since all would take minutes to draw."""
    from foresay.models import levels
    from foresay.models.gpu import blocks

    data = np.random.default_rng(0).integers(0, 256, (64, depth // 32, 18), dtype=np.uint8)
    data[..., :2] = np.array([0.01], dtype=np.float16).view(np.uint8)
    data = np.tile(data.reshape(64, -1), (-(-rows // 64), 1))[:rows]
    return blocks.BlockProduct(levels.Levels.of_file("Q4_0", data), torch.bfloat16, device, None)


def main() -> int:
    names = (
        *("plain_steps", "passes", "baselines", "bits", "library_products", "first_tokens", "sampling"),
        *("heads", "trees", "blocks", "waits", "never_right", "known", "int4"),
    )
    parser = arguments(__doc__, parts=names, quick=False)
    parser.add_argument("--small", action="store_true", help="shapes that fit anywhere")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=24, help="timed steps of each figure (default: 24)")
    parser.add_argument("--seconds", type=float, default=540, help="after which parts are left out (default: 540)")
    parser.add_argument("--out", type=Path, help="file of the figures as JSON, written after each part")
    args = parsed(parser)
    if args.device == "cpu":
        os.environ["FORESAY_NATIVE"] = "0"  # PyTorch operations, as on a GPU
    shape = SMALL if args.small or args.device == "cpu" else LARGE
    torch.set_grad_enabled(False)
    one = Measure(shape, torch.device(args.device), args.steps)
    size = "small shapes" if shape is SMALL else "the shapes of Llama-3.1-8B"
    over = "operations" if one.model.paged is None else "pages"
    model = f"random Llama of {size} in bf16, on {args.device}, passes over {over}"

    def written(figures: Figures, **more: Any) -> int:
        if args.out:
            args.out.write_text(json.dumps(figures), encoding="utf-8")
        return publish("gpu", figures, args, legend=LEGEND, model=model, **more)

    parts = {name: getattr(one, name) for name in names}
    return measured(parts, args.only, written, part=partial(written, last=False), until=BEGAN + args.seconds)


if __name__ == "__main__":
    sys.exit(main())
