"""foresay as a model of lm-evaluation-harness: answers come faster, and are those of the target alone.

    python -m foresay.integrations.lm_eval --model foresay --model_args pretrained=smollm2-135m --tasks gsm8k

Texts are cut, ended and taken apart as the harness does for its own transformers model, so that scores may be compared. Owns
the translation of the harness's requests; a generation setting that cannot be honoured is an error that names it. Importing this
registers the model.
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

logger = logging.getLogger("foresay")

_SAMPLING = {"temperature", "top_p", "top_k", "min_p", "repetition_penalty"}
"""Generation settings that SamplingParams has a field for."""
_WITHOUT_MEANING = {"do_sample", "until", "max_gen_toks"}
"""Those that were read before."""


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
        """pretrained: what `foresay.load` takes; options: its options, such as drafter, length, dtype, weights and device.

        batch_size: rows decoded at a time; "auto" leaves that to the memory. max_length: longest context, the model's own where
        None. seed: of requests that are sampled. Raises what `foresay.load` raises.
        """
        super().__init__()
        rows = 32 if str(batch_size).startswith("auto") else _number("batch_size", batch_size)
        self.batch_size = rows if max_batch_size is None else min(rows, _number("max_batch_size", max_batch_size))
        self.generator = load(pretrained, max_batch_size=self.batch_size, **options)
        target = self.generator.target
        if target.model.capabilities.reads_source:
            raise ConfigError("the harness's tasks are asked of decoder-only models, and this one has an encoder")
        if target.tokenizer is None:
            raise ConfigError(f"{target.name} has no tokenizer, which the harness's texts need")
        self.tokenizer: Any = target.tokenizer
        longest = target.model.max_length
        self.max_length = longest if max_length is None else min(longest, _number("max_length", max_length))
        self.max_gen_toks, self._seed = _number("max_gen_toks", max_gen_toks), check_int("seed", int(seed), 0)
        self._specials = {} if add_bos_token is None else {"add_special_tokens": bool(add_bos_token)}
        self._name = str(pretrained)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> ForesayLM:
        """What the command line makes of its options: those of `model_args` win over the harness's own.

        It names the first GPU where no device was given; without one that is left to `foresay.load`.
        """
        usual = {name: value for name, value in (additional_config or {}).items() if value is not None}
        if "device_map" in arg_dict or (str(usual.get("device")).startswith("cuda") and not torch.cuda.is_available()):
            usual.pop("device", None)
        return cls(**{**usual, **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> ForesayLM:
        """The same of `name=value,name=value`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    @property
    def tokenizer_name(self) -> str:
        """What the harness names its caches by."""
        return self._name.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; special ones as the tokenizer has them, unless told otherwise or the text begins with one."""
        specials = self._specials if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            specials = {"add_special_tokens": False}
        return list(self.tokenizer(string, **specials).input_ids)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The text of a chat."""

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
        except TemplateError:  # some templates know no system message
            without = [one for one in chat_history if one["role"] != "system"]
            if len(without) == len(chat_history):
                raise
            logger.warning("the chat template refused the system message; it is left out")
            return templated(without)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts, all requests in one session: rows join as others end, each with its own settings."""
        prompts: list[list[int]] = []
        params: list[SamplingParams] = []
        ends: list[list[str]] = []
        texts: dict[int, str] = {}

        def done(place: int, ids: list[int]) -> None:
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True))
            texts[place] = postprocess_generated_text(text, ends[place], None)
            self.cache_hook.add_partial("generate_until", requests[place].args, texts[place])

        for place, (context, settings) in enumerate(request.args for request in requests):
            kwargs = normalize_gen_kwargs(settings, self.max_gen_toks)
            eos = self.tokenizer.decode([self.eot_token_id])
            until, most = handle_stop_sequences(kwargs.get("until"), eos=eos), int(kwargs["max_gen_toks"])
            room = self.max_length - most
            if room <= 0:
                raise ConfigError(f"max_gen_toks={most} leaves no room in a context of {self.max_length} tokens")
            prompts.append(self.tok_encode(context)[-room:] or [self.prefix_token_id])
            params.append(self._params(kwargs, most, [one for one in until if one and one != eos], place))
            ends.append(until)
        self._write(prompts, params, done, disable=disable_tqdm)
        return [texts[place] for place in range(len(requests))]

    def _params(self, kwargs: Mapping[str, Any], most: int, stop: Sequence[str], place: int) -> SamplingParams:
        unknown = set(kwargs) - _SAMPLING - _WITHOUT_MEANING
        if unknown:
            raise ConfigError(f"generation settings that foresay cannot honour: {', '.join(sorted(unknown))}")
        given = {name: kwargs[name] for name in _SAMPLING & set(kwargs) if kwargs[name] is not None}
        if not kwargs.get("do_sample"):
            given = {name: value for name, value in given.items() if name == "repetition_penalty"} | {
                "temperature": 0.0
            }
        alone = {one: self.tokenizer(one, add_special_tokens=False).input_ids for one in stop}
        special = {
            one: ids[0] for one, ids in alone.items() if len(ids) == 1 and ids[0] in self.tokenizer.all_special_ids
        }
        return SamplingParams(
            max_new_tokens=most,
            stop=tuple(one for one in stop if one not in special),
            stop_token_ids=tuple(special.values()),  # a text does not show them
            seed=self._seed + place,
            **given,
        )

    def _write(
        self,
        prompts: Sequence[list[int]],
        params: Sequence[SamplingParams],
        done: Callable[[int, list[int]], None],
        *,
        disable: bool,
    ) -> None:
        """Tell of each output when it is written."""
        session = self.generator.session(prefill_wait_s=OFFLINE_WAIT_S)
        places = {session.submit(ids, one): i for i, (ids, one) in enumerate(zip(prompts, params, strict=True))}
        with tqdm(total=len(prompts), disable=disable, desc="foresay generates") as bar:
            while session.has_work:
                for chunk in session.step():
                    if chunk.error is not None:
                        raise chunk.error
                    if chunk.generation is not None:
                        done(places[chunk.index], list(chunk.generation.token_ids))
                        bar.update(1)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding writes it) of continuations; those of one context share its pass."""
        order = sorted(range(len(requests)), key=lambda i: (*requests[i][1], *requests[i][2]))
        scorer, out = _Scorer(self.generator.target.model), [(0.0, False)] * len(requests)
        for i in tqdm(order, disable=disable_tqdm, desc="foresay scores"):
            given, context, continuation = requests[i]
            whole = [*context, *continuation][-(self.max_length + 1) :]
            out[i] = scorer.score(whole, min(len(continuation), len(whole) - 1))
            if given is not None:
                self.cache_hook.add_partial("loglikelihood", given, out[i])
        return out

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-probabilities of whole texts, in windows that overlap as the harness has them."""
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
    """Log-probabilities under a target; what texts have in common with the one before is in its cache."""

    def __init__(self, model: Any) -> None:
        self._model, self._cache = model, model.new_cache()
        self._known: IntArray = np.zeros(0, dtype=np.int64)
        self._rows: Rows | None = None

    @torch.inference_mode()
    def score(self, token_ids: list[int], count: int) -> tuple[float, bool]:
        """Of the last `count` tokens behind those before them."""
        if self._rows is None:
            self._rows = Rows([Row(0, token_ids, SamplingParams(), limit=self._model.max_length)])
            self._model.admit(self._rows, 0, self._cache)
        fed = token_ids[:-1]
        first = len(token_ids) - count - 1
        """The place whose scores are of the first of them."""
        known, self._known = self._known, np.array(fed, dtype=np.int64)
        same = min(first, common_prefix(known, self._known))
        self._cache.truncate([same])
        total, greedy = 0.0, True
        for start, scores in self._passes(fed, same, first):
            wanted = torch.tensor(token_ids[start + 1 : start + 1 + len(scores)], device=scores.device)
            distributions = scores.float().log_softmax(-1)
            total += float(distributions.gather(1, wanted[:, None]).sum())
            greedy = greedy and bool((distributions.max(-1).indices == wanted).all())
        return total, greedy

    def _passes(self, fed: list[int], start: int, first: int) -> Iterator[tuple[int, torch.Tensor]]:
        """(place, scores [n, V]) from the place `first` on; tokens before it only fill the cache."""
        most = self._model.capabilities.prefill_chunk
        while start < len(fed):
            silent = start < first
            count = min(most, (first if silent else len(fed)) - start)
            ids = torch.tensor([fed[start : start + count]], device=self._model.device)
            model_input = ModelInput(ids, [count], logits=Logits.NONE if silent else Logits.ALL)
            output = self._model.forward(model_input, self._cache)
            if not silent:
                yield start, output.scores()[0, :count]
            start += count


def _number(name: str, value: Any) -> int:
    """A setting of the command line, which may be a text."""
    try:
        return check_int(name, int(value), 1)
    except ValueError:
        raise ConfigError(f"{name}={value!r} is no number") from None


if __name__ == "__main__":
    cli_evaluate()
