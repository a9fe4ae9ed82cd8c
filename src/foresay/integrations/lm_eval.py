"""foresay as a model of lm-evaluation-harness: faster generation with the outputs of the target alone.

    python -m foresay.integrations.lm_eval --model foresay --model_args pretrained=smollm2-135m --tasks gsm8k

Texts are truncated, stopped and post-processed as by the harness's own transformers model, so that scores are comparable. Owns
the translation of the harness's requests; a generation setting that is not supported is an error that names it. Importing this
module registers the model.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, simple_parse_args_string
from tqdm import tqdm

from foresay.checks import check_int
from foresay.decoding.protocols import Logits, ModelInput
from foresay.decoding.rows import IntArray, Row, Rows, common_prefix
from foresay.decoding.sampling_params import SamplingParams
from foresay.engine.chunked_prefill import OFFLINE_WAIT_S
from foresay.errors import ConfigError
from foresay.generation.load import load
from foresay.generation.scoring import scoring_chunk

logger = logging.getLogger("foresay")

_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
"""Generation settings with a field of the same name in SamplingParams."""
_HANDLED = {"do_sample", "until", "max_gen_toks"}
"""Settings that are handled separately."""


@register_model("foresay")
class ForesayLM(TemplateLM):  # type: ignore[misc]
    """A decoder-only target with its drafter."""

    def __init__(
        self,
        pretrained: str = "smollm2-135m",
        *,
        batch_size: int | str = 8,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        seed: int = 0,
        max_batch_size: int | str | None = None,
        **options: Any,
    ) -> None:
        """pretrained: a model for `foresay.load`; options: its options, such as drafter, length, dtype, weights and device.

        batch_size: rows decoded at once; "auto" selects 32, or fewer if memory is short. max_length: context limit; None: the
        model's. seed: of sampled requests. Raises the errors of `foresay.load`.
        """
        super().__init__()
        rows = 32 if str(batch_size).startswith("auto") else _number("batch_size", batch_size)
        self.batch_size = rows if max_batch_size is None else min(rows, _number("max_batch_size", max_batch_size))
        self.generator = load(pretrained, max_batch_size=self.batch_size, **options)
        target = self.generator.target
        if target.model.capabilities.reads_source:
            text = "has an encoder, which the harness does not take"
            raise ConfigError(text, param="model", value=self.generator.target.name)
        if target.tokenizer is None:
            raise ConfigError("has no tokenizer, which the harness needs", param="model", value=target.name)
        self.tokenizer: Any = target.tokenizer
        context_length = target.model.max_length
        self.max_length = (
            context_length if max_length is None else min(context_length, _number("max_length", max_length))
        )
        self.max_gen_toks, self._seed = _number("max_gen_toks", max_gen_toks), check_int("seed", int(seed), 0)
        self._specials = {} if add_bos_token is None else {"add_special_tokens": bool(add_bos_token)}
        self._name = str(pretrained)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> ForesayLM:
        """Create a model from command-line options; `model_args` take precedence over the harness's own options.

        The harness selects the first GPU by default; without a GPU, `foresay.load` selects the device.
        """
        defaults = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if "device_map" in arg_dict or (
            str(defaults.get("device")).startswith("cuda") and not torch.cuda.is_available()
        ):
            defaults.pop("device", None)
        return cls(**{**defaults, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> ForesayLM:
        """Create a model from options in the form `name=value,name=value`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token placed before a text without context."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        """The name under which the harness stores its caches."""
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return token ids. By default special tokens are added, unless the text starts with one."""
        specials = self._specials if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            specials = {"add_special_tokens": False}
        return list(self.tokenizer(string, **specials).input_ids)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a chat."""

        def templated(messages: list[dict[str, str]]) -> str:
            text = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
            return str(text)

        try:
            return templated(chat_history)
        except TemplateError:  # some templates support no system message
            without = [one for one in chat_history if one["role"] != "system"]
            if len(without) == len(chat_history):
                raise
            logger.warning("the chat template rejected the system message; it is omitted")
            return templated(without)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate all requests in one session, each with its own settings. Waiting requests join as rows finish."""
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        ends: list[list[str]] = []
        texts: dict[int, str] = {}

        def done(index: int, ids: list[int]) -> None:
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            texts[index] = postprocess_generated_text(text, ends[index], None)
            self.cache_hook.add_partial("generate_until", requests[index].args, texts[index])

        for index, (context, settings) in enumerate(request.args for request in requests):
            kwargs = normalize_gen_kwargs(settings, self.max_gen_toks)
            eos = self.tokenizer.decode([self.eot_token_id])
            until, max_new_tokens = handle_stop_sequences(kwargs.get("until"), eos=eos), int(kwargs["max_gen_toks"])
            max_prompt = self.max_length - max_new_tokens
            if max_prompt <= 0:
                problem = f"must be below the context length, {self.max_length}"
                raise ConfigError(problem, param="max_gen_toks", value=max_new_tokens)
            prompts.append(self.tok_encode(context)[-max_prompt:] or [self.prefix_token_id])
            params.append(self._params(kwargs, max_new_tokens, [one for one in until if one and one != eos], index))
            ends.append(until)
        self._generate(prompts, params, done, disable=disable_tqdm)
        return [texts[index] for index in range(len(requests))]

    def _params(
        self, kwargs: Mapping[str, Any], max_new_tokens: int, stop: Sequence[str], index: int
    ) -> SamplingParams:
        unknown = set(kwargs) - _SAMPLING - _HANDLED
        if unknown:
            text = "is not a supported generation setting; remove it from the task"
            raise ConfigError(text, param=min(unknown), value=kwargs[min(unknown)])
        sampling = {name: kwargs[name] for name in _SAMPLING & set(kwargs) if kwargs[name] is not None}
        if not kwargs.get("do_sample"):
            sampling = {name: value for name, value in sampling.items() if name == "repetition_penalty"} | {
                "temperature": 0.0
            }
        ids_of = {one: self.tokenizer(one, add_special_tokens=False).input_ids for one in stop}
        special = {
            one: ids[0] for one, ids in ids_of.items() if len(ids) == 1 and ids[0] in self.tokenizer.all_special_ids
        }
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            stop=tuple(one for one in stop if one not in special),
            stop_token_ids=tuple(special.values()),  # special tokens do not appear in the text
            seed=self._seed + index,
            **sampling,
        )

    def _generate(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        done: Callable[[int, list[int]], None],
        *,
        disable: bool,
    ) -> None:
        """Generate all prompts, and call `done` with the index and token ids of each finished output."""
        session = self.generator.session(prefill_wait_s=OFFLINE_WAIT_S)
        indices = {session.submit(ids, one): i for i, (ids, one) in enumerate(zip(prompts, params, strict=True))}
        with tqdm(total=len(prompts), disable=disable, desc="foresay generates") as bar:
            while session.has_work:
                for chunk in session.step():
                    if chunk.error is not None:
                        raise chunk.error
                    if chunk.generation is not None:
                        done(indices[chunk.index], list(chunk.generation.token_ids))
                        bar.update(1)

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str] | None, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-probability, True if greedy decoding generates it) of continuations. Equal contexts are scored once."""
        order = sorted(range(len(requests)), key=lambda i: (*requests[i][1], *requests[i][2]))
        scorer, out = _Scorer(self.generator.target.model), [(0.0, False)] * len(requests)
        for i in tqdm(order, disable=disable_tqdm, desc="foresay scores"):
            strings, context, continuation = requests[i]
            tokens = [*context, *continuation][-(self.max_length + 1) :]
            out[i] = scorer.score(tokens, min(len(continuation), len(tokens) - 1))
            if strings is not None:
                self.cache_hook.add_partial("loglikelihood", strings, out[i])
        return out

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return log-probabilities of whole texts, in the harness's overlapping windows."""
        sums = []
        for (text,) in tqdm([request.args for request in requests], disable=disable_tqdm):
            windows = [
                (None, *make_disjoint_window(pair))
                for pair in get_rolling_token_windows(
                    token_list=self.tok_encode(text),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            sums.append(sum(found[0] for found in self._loglikelihood_tokens(windows, disable_tqdm=True)))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), sums[-1])
        return sums


class _Scorer:
    """Log-probabilities under a target. The prefix shared with the previous text is read from the cache."""

    def __init__(self, model: Any) -> None:
        self._model, self._cache = model, model.new_cache()
        self._cached_ids: IntArray = np.zeros(0, dtype=np.int64)
        self._rows: Rows | None = None

    @torch.inference_mode()
    def score(self, token_ids: list[int], count: int) -> tuple[float, bool]:
        """Return (log-probability, True if greedy decoding generates them) of the last `count` tokens."""
        if self._rows is None:
            self._rows = Rows([Row(0, token_ids, SamplingParams(), limit=self._model.max_length)])
            self._model.admit(self._rows, 0, self._cache)
        inputs = token_ids[:-1]
        first = len(token_ids) - count - 1
        """Position whose scores predict the first of the last `count` tokens."""
        previous, self._cached_ids = self._cached_ids, np.array(inputs, dtype=np.int64)
        shared = min(first, common_prefix(previous, self._cached_ids))
        self._cache.truncate([shared])
        total, greedy = 0.0, True
        for start, scores in self._passes(inputs, shared, first):
            targets = torch.tensor(token_ids[start + 1 : start + 1 + len(scores)], device=scores.device)
            distributions = scores.float().log_softmax(-1)
            total += float(distributions.gather(1, targets[:, None]).sum())
            greedy = greedy and bool((distributions.max(-1).indices == targets).all())
        return total, greedy

    def _passes(self, inputs: list[int], start: int, first: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (position, scores [n, V]) from position `first` on. Earlier tokens only fill the cache."""
        chunk = scoring_chunk(self._model)
        while start < len(inputs):
            prefix_only = start < first
            count = min(chunk, (first if prefix_only else len(inputs)) - start)
            ids = torch.tensor([inputs[start : start + count]], device=self._model.device)
            model_input = ModelInput(ids, [count], logits=Logits.NONE if prefix_only else Logits.ALL)
            output = self._model.forward(model_input, self._cache)
            if not prefix_only:
                yield start, output.scores()[0, :count]
            start += count


def _number(name: str, value: Any) -> int:
    """Return a command-line setting, possibly a string, as a positive integer."""
    try:
        return check_int(name, int(value), 1)
    except ValueError:
        raise ConfigError("is not an integer", param=name, value=value) from None


if __name__ == "__main__":
    cli_evaluate()
