"""Decoding steps on a GPU, over a model of real shapes with random weights, as ratios to a plain step and to their floors.

    python benchmarks/gpu.py [--only PART ...] [--small] [--device cuda|cpu] [--steps N] [--write]

The target has the shapes of Llama-3.1-8B in bf16, with joined layers as loaded checkpoints have them; drafts have one layer of
its shape and 32,000 tokens. Random models agree by chance alone, so that a step with drafts is one draft, one pass of the target
and one token; `known` drafts the target's own text instead. FORESAY_PAGES=0 runs passes as PyTorch operations.
`--small` uses shapes that fit anywhere; it is the default without a GPU.
"""

from __future__ import annotations

import os
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from time import perf_counter
from typing import Any

import numpy as np
import torch
from common import Figures, arguments, filled, measured, parsed, pass_seconds, publish, random_prompt
from transformers import LlamaConfig, LlamaForCausalLM

import foresay
from foresay.decoding.acceptance import make_rule
from foresay.decoding.outcome import Step
from foresay.decoding.proposal import Proposal
from foresay.decoding.protocols import LengthPolicy, Logits, ModelInput
from foresay.decoding.rows import Rows
from foresay.drafters.hidden_states import BlockDrafter, HeadDrafter
from foresay.drafters.stateless import Stateless
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

Timed = tuple[float, list[Step]]
"""Seconds of a step, and what each row got."""
SKIPPED = 4
"""First steps of a run that are not measured."""
ROWS = (1, 8, 32)
SAMPLED = {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "seed": 1}
LEGEND = {
    "weights_gb": ("weights, GB", ""),
    "bandwidth_gb_per_s": ("memory bandwidth, GB/s", ""),
    "plain_step_ms_1": ("plain step, 1 row, ms", ""),
    "plain_step_over_floor_1": ("the same over weight bytes / memory bandwidth", "<= 1.2"),
    "plain_step_over_floor_32": ("plain step of 32 rows, the same", "<= 1.35"),
    "long_step_over_floor": ("plain step after 15,000 tokens, the same", "<= 1.3"),
    "captures_after_warm_up": ("passes captured in the second identical call", "0"),
    "tokens8_over_1": ("pass over 8 tokens / over 1", "<= 1.15"),
    "same_bits_share": ("rows whose scores have the same bits alone and in passes over 16 to 512 tokens", "1"),
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

    def run(self, rows: int, drafter: Any = None, gamma: int = 0, context: int = 512, **params: Any) -> list[Timed]:
        """The steps of a batch whose prompts were read before; without the first ones. Each takes from read to read."""
        size = context if self.shape is LARGE else min(context, self.shape.long)
        engine = Engine(self.model, drafter, make_rule("speculative"), ConstantLength(gamma), max_batch_size=rows)
        given = foresay.SamplingParams(max_new_tokens=1000, **params)  # rows begin one after the other
        for prompt in random_prompt(rows, torch.device("cpu"), self.shape.vocabulary)[:, :1].tolist():
            engine.submit([(prompt[0] + i) % self.shape.vocabulary for i in range(size)], given)
        out: list[Timed] = []
        before = perf_counter()
        while len(out) < self.steps + SKIPPED and engine.has_work:
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

    def with_plain(
        self, rows: int, make: Callable[[], Any] = lambda: None, gamma: int = 0, **more: Any
    ) -> tuple[float, float, float]:
        """Milliseconds of a plain step, of a step and of its drafting, in turns: means over three runs each."""
        self.step_ms(rows), self.step_ms(rows, make, gamma, **more)
        each = [(self.run(rows), self.run(rows, make(), gamma, **more)) for _ in range(3)]
        plain, own = ([one for pair in each for one in pair[i]] for i in (0, 1))
        return self._ms(plain), self._ms(own), 1e3 * statistics.fmean(one[0].draft_s for _, one in own)

    @cache  # noqa: B019
    def plain_ms(self, rows: int) -> float:
        return self.step_ms(rows)[0]

    def vocabulary(self) -> int:
        return int(self.model.vocab_size)

    def head_drafter(self, nodes: int = 0) -> HeadDrafter:
        return HeadDrafter(self.head(), self.vocabulary(), nodes=nodes)

    def plain_steps(self) -> Figures:
        one, many, long = self.plain_ms(1), self.plain_ms(32), self.step_ms(1, context=self.shape.long)[0]
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
        same = [self.same_bits(rows, width) for rows, width in ((8, 2), (32, 2), (32, 6), (32, 16))]
        return {"tokens8_over_1": eight / one, "same_bits_share": statistics.fmean(same)}

    def same_bits(self, rows: int, width: int) -> float:
        """Share of rows whose first token has the same scores alone as in a pass of all rows, after prompts read alone."""
        prompt = random_prompt(rows, self.device, 1000)
        whole = self.model.new_cache()
        whole.add_rows(rows)
        for i in range(rows):
            one = ModelInput(prompt[i : i + 1], [prompt.shape[1]], first_row=i, logits=Logits.NONE)
            self.model.forward(one, whole)
        ids, same = prompt[:, :width].contiguous(), 0
        together = self.model.forward(ModelInput(ids, [width] * rows), whole).scores()
        for i in range(rows):
            cache = filled(self.model, prompt[i : i + 1])
            alone = self.model.forward(ModelInput(ids[i : i + 1, :1], [1]), cache).scores()
            same += torch.equal(alone[0, 0], together[i, 0])
        return same / rows

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
                engine = Engine(self.model, None, make_rule("speculative"), ConstantLength(0), max_batch_size=1)
                prompt = [(run + 7 * i) % self.shape.vocabulary for i in range(size)]
                engine.submit(prompt, foresay.SamplingParams(max_new_tokens=2))
                began = perf_counter()
                while not engine.step():
                    pass
                took.append(1e3 * (perf_counter() - began))
            out[name] = statistics.median(took)
        return out

    def sampling(self) -> Figures:
        each = {rows: self.with_plain(rows, **SAMPLED) for rows in (1, 32)}  # type: ignore[arg-type]
        return {f"sampling_added_ms_{rows}": sampled - plain for rows, (plain, sampled, _) in each.items()}

    def heads(self) -> Figures:
        out: Figures = {}
        for rows in ROWS:
            plain, step, draft = self.with_plain(rows, self.head_drafter, 5)
            out[f"head5_draft_ms_{rows}"], out[f"head5_step_over_plain_{rows}"] = draft, step / plain
        out["head5_sampled_draft_ms_1"] = self.step_ms(1, self.head_drafter, 5, **SAMPLED)[1]
        return out

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
        out: Figures = {}
        for rows in (1, 32):
            other = change(self.plain, drafter="suffix", length=None, max_batch_size=rows)
            took = []
            for generator in (self.plain, other) * 2:
                params = foresay.SamplingParams(max_new_tokens=2 * self.steps)
                prompts = random_prompt(rows, torch.device("cpu"), self.shape.vocabulary).tolist()
                found = generator.generate(prompts, params)[0].steps[SKIPPED:]
                took.append(statistics.median(step.total_s / max(1, len(step.token_ids)) for step in found))
            out[f"never_right_vs_plain_{rows}"] = took[2] / took[3]
        return out

    def known(self) -> Figures:
        out: Figures = {}
        for rows in (1, 8):
            plain = self.run(rows, gamma=0)
            texts: list[list[int]] = [[] for _ in range(rows)]
            engine = Engine(self.model, None, make_rule("speculative"), ConstantLength(0), max_batch_size=rows)
            given = foresay.SamplingParams(max_new_tokens=8 * (len(plain) + SKIPPED))
            size = min(512, self.shape.long)
            for prompt in random_prompt(rows, torch.device("cpu"), self.shape.vocabulary)[:, :1].tolist():
                engine.submit([(prompt[0] + i) % self.shape.vocabulary for i in range(size)], given)
            while engine.has_work:
                for step in engine.step():
                    texts[step.request_id] += step.token_ids
            plain_ms, step_ms, _ = self.with_plain(rows, partial(Known, texts), 7)
            out[f"known_text_speedup_{rows}"] = 8 * plain_ms / step_ms
        return out

    def int4(self) -> Figures:
        """Weights in blocks, which are multiplied over pages only."""
        if self.model.paged is None or self.device.type != "cuda":
            return {}
        plain = self.plain_ms(1)
        for module in self.model.model.modules():
            for names in JOINT_LAYERS:
                layers = [one for name in names if type(one := getattr(module, name, None)) is torch.nn.Linear]
                if len(layers) == len(names):
                    size = sum(layer.out_features for layer in layers)
                    replace_jointly(module, names, random_blocks(size, layers[0].in_features, self.device))
            for name, child in list(module.named_children()):
                if type(child) is torch.nn.Linear:
                    setattr(
                        module, name, FrozenLinear(random_blocks(child.out_features, child.in_features, self.device))
                    )
        self.model.use_fused()
        return {"int4_step_over_bf16": self.step_ms(1)[0] / plain}


def random_blocks(rows: int, depth: int, device: torch.device) -> Any:
    """A product over random blocks of Q4_0; a few rows are repeated, since all would take minutes to draw."""
    from foresay.models.gpu import blocks, levels

    data = np.random.default_rng(0).integers(0, 256, (64, depth // 32, 18), dtype=np.uint8)
    data[..., :2] = np.array([0.01], dtype=np.float16).view(np.uint8)
    data = np.tile(data.reshape(64, -1), (-(-rows // 64), 1))[:rows]
    return blocks.BlockProduct(levels.Levels.of_file("Q4_0", data), torch.bfloat16, device, None)


def main() -> int:
    names = (
        "plain_steps",
        "passes",
        "library_products",
        "first_tokens",
        "sampling",
        "heads",
        "trees",
        "blocks",
        "waits",
        "never_right",
        "known",
        "int4",
    )
    parser = arguments(__doc__, parts=names, quick=False)
    parser.add_argument("--small", action="store_true", help="shapes that fit anywhere")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=24, help="timed steps of each figure (default: 24)")
    args = parsed(parser)
    if args.device == "cpu":
        os.environ["FORESAY_NATIVE"] = "0"  # PyTorch operations, as on a GPU
    shape = SMALL if args.small or args.device == "cpu" else LARGE
    torch.set_grad_enabled(False)
    one = Measure(shape, torch.device(args.device), args.steps)
    size = "small shapes" if shape is SMALL else "the shapes of Llama-3.1-8B"
    over = "operations" if one.model.paged is None else "pages"
    model = f"random Llama of {size} in bf16, on {args.device}, passes over {over}"
    return measured(
        {name: getattr(one, name) for name in names},
        args.only,
        lambda figures: publish("gpu", figures, args, legend=LEGEND, model=model),
    )


if __name__ == "__main__":
    sys.exit(main())
