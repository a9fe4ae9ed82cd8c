"""Tools over HTTP: calls that a model writes, calls that it must write, and the messages that follow them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from transformers import AutoTokenizer

import foresay
from helpers import chains
from helpers.serving import Running, assert_refused, choice_of, events_of
from helpers.tool_chats import PIECES, TALK, TEMPLATE, TIME, WEATHER

MARKS = ("<think>", "</think>", "<tool_call>")
BOTH = [("weather", {"city": "Rome"}), ("time", {})]
"""Calls in the output of the model `chain`."""
Message = tuple[str, str, str, list[tuple[str, Any]]]


def messages_of(running: Running, **body: Any) -> list[Message]:
    """Finish reason, reasoning, text and calls of a chat, whole and as OpenAI's client puts a stream together."""
    body = {"model": "tiny", "messages": TALK, "temperature": 0, **body}
    client: Any = running.client.chat.completions
    with client.stream(**body) as stream:
        choices = [one.choices[0] for one in (client.create(**body), stream.get_final_completion())]
    found = list[Message]()
    for one in choices:
        reasoning, sent = getattr(one.message, "reasoning_content", None) or "", one.message.tool_calls or ()
        assert len({call.id for call in sent}) == len(sent)
        assert all(call.type == "function" and call.id.startswith("call_") for call in sent)
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in sent]
        found.append((one.finish_reason, reasoning.strip(), (one.message.content or "").strip(), calls))
    return found


def stream_of(running: Running, **body: Any) -> list[dict[str, Any]]:
    """The choices of a chat's events."""
    return [one["choices"][0] for one in events_of(running.chat(temperature=0, stream=True, **body))]


@pytest.fixture
def writer(serve: Any, tmp_path: Path) -> Callable[..., Running]:
    """Servers of models that write these pieces; see `chains.save`."""

    def start(pieces: Sequence[str], template: str, *others: Sequence[str], response_template: Any = None) -> Running:
        every = (*pieces, *(piece for other in others for piece in other))
        special = [one for one in every if one in MARKS or re.fullmatch(r"<\|\w+\|>", one)]
        folder = chains.save(tmp_path, pieces, template, special=special, others=others)
        if response_template:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder)
            tokenizer.response_template = response_template
            tokenizer.save_pretrained(folder)
        return cast(Running, serve(foresay.load(str(folder), num_draft_tokens=3)))

    return start


def test_calls_of_a_whole_answer_and_of_a_stream(chain: Running) -> None:
    """The role alone, pieces of arguments, and the finish reason alone; the client puts them together."""
    message = ("tool_calls", "What is asked?", "Let me look.", BOTH)
    assert messages_of(chain, tools=[WEATHER, TIME]) == [message] * 2
    choices = stream_of(chain, tools=[WEATHER, TIME])
    assert choices[0]["delta"] == {"role": "assistant", "content": ""} and choices[0]["finish_reason"] is None
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "tool_calls"
    assert all(one["delta"] and one["finish_reason"] is None for one in choices[1:-1])
    sent = [[call["index"] for call in choice["delta"].get("tool_calls", [])] for choice in choices]
    assert all(len(set(one)) == len(one) for one in sent), "some clients read only the first piece of an event"
    assert sum(one.count(0) for one in sent) > 1, "arguments arrive in pieces"


def test_the_page_of_the_docs(chain: Running, capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "tools.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    [served] = re.findall(r"^foresay serve (\S+)$", page, re.MULTILINE)
    assert f'model = "{served}"' in block, "the server knows the model by the name of the command"
    block = block.replace("http://127.0.0.1:8000", chain.url).replace(served, "tiny")
    exec(compile(block, "docs/how-to/tools.md", "exec"), {})
    assert capsys.readouterr().out.startswith('weather {"city": "Rome"}\n')


def test_log_probabilities_end_with_the_text(chain: Running) -> None:
    """Before a stop string, though special tokens are part of the text."""
    body = {"temperature": 0, "logprobs": True, "stop": "look", "tools": [WEATHER]}
    choice = choice_of(chain.chat(**body))
    assert choice["message"]["content"] == "Let me "
    tokens = [one["token"] for one in choice["logprobs"]["content"]]
    assert tokens[-1] == "Let me look" and "".join(tokens).startswith("<think>\nWhat is asked?</think>")
    whole = choice_of(chain.chat(temperature=0, logprobs=True, tools=[WEATHER]))["logprobs"]["content"]
    assert "".join(one["token"] for one in whole).startswith("".join(PIECES))


def test_fields_of_tools(chain: Running) -> None:
    """No tools: the text is content. One call at most, one that is cut, and calls of several outputs."""

    def choices(**body: Any) -> list[dict[str, Any]]:
        return list(chain.chat(**{"temperature": 0, "tools": [WEATHER, TIME], **body}).json()["choices"])

    for more in ({"tools": None}, {"tool_choice": "none"}):
        (choice,) = choices(**more)
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        assert '{"name": "weather", "arguments"' in choice["message"]["content"]
    for several, names in ((False, ["weather"]), (True, ["weather", "time"])):
        (choice,) = choices(parallel_tool_calls=several)
        assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == names
        assert choice["finish_reason"] == "tool_calls"
    (choice,) = choices(max_tokens=11)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}
    ids = [call["id"] for choice in choices(n=2) for call in choice["message"]["tool_calls"]]
    assert len(ids) == len(set(ids)) == 4


@pytest.mark.parametrize(
    ("tool_format", "temperature"),
    [("auto", 0), ("mistral", 0), *((one, 1.5) for one in ("mistral_named", "llama3_json", "pythonic", "qwen3_coder"))],
)
def test_calls_of_a_model_that_writes_noise(
    tool_format: str, temperature: float, server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Required ones follow their schemas, with drafts; next to a schema an output is a call or an answer."""
    monkeypatch.setattr(server.model, "settings", replace(server.model.settings, tool_format=tool_format))
    tools = [TIME] if tool_format == "qwen3_coder" else [WEATHER, TIME]
    body = {"tools": tools, "temperature": temperature, "seed": 0, "max_tokens": 150}
    named = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
    for choice, single in (("required", True), (named, False)):
        done = choice_of(server.chat(tool_choice=choice, parallel_tool_calls=not single, **body))
        if done["finish_reason"] == "length":  # noise may go on calling
            assert not single
            continue
        calls = [one["function"] for one in done["message"]["tool_calls"]]
        assert done["finish_reason"] == "tool_calls" and done["message"]["content"] is None
        assert len(calls) == 1 or not single
        for call in calls:
            arguments = json.loads(call["arguments"])
            assert single or call["name"] == named["function"]["name"]  # type: ignore[index]
            if call["name"] == "weather":
                assert set(arguments) == {"city", "days"} and arguments["days"] in (1, 2, 3)
                assert 1 <= len(arguments["city"]) <= 8 and arguments["city"].isalpha()
    assert not choice_of(server.chat(**body))["message"].get("tool_calls"), "control: noise is no call"
    form = {"type": "json_schema", "json_schema": {"schema": ANSWER}}
    done = choice_of(server.chat(response_format=form, parallel_tool_calls=False, **body))
    message, is_answer = done["message"], not done["message"].get("tool_calls")
    if done["finish_reason"] != "length":
        assert done["finish_reason"] == ("stop" if is_answer else "tool_calls")
        assert set(json.loads(message["content"])) == {"a"} if is_answer else not message["content"]


def test_a_stop_string_does_not_cut_a_required_call(server: Running) -> None:
    body = {"tools": [WEATHER], "tool_choice": "required", "temperature": 0, "max_tokens": 200}
    whole = choice_of(server.chat(**body))
    for stop in ("city", '"', ["e", "}"]):
        choice = choice_of(server.chat(stop=stop, **body))
        assert choice == whole | {"message": choice["message"]}, "the stop string changes nothing"
        (call,) = choice["message"]["tool_calls"]
        assert set(json.loads(call["function"]["arguments"])) == {"city", "days"}
        assert choice["finish_reason"] == "tool_calls"


def test_a_call_that_a_stop_string_cuts_is_no_whole_one(chain: Running) -> None:
    choice = choice_of(chain.chat(temperature=0, tools=[WEATHER, TIME], stop="Rome"))
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "Rome")
    assert [json.loads(one["function"]["arguments"]) for one in choice["message"]["tool_calls"]] == [{"city": ""}]
    assert stream_of(chain, tools=[WEATHER], stop="Rome")[-1]["finish_reason"] == "stop"
    after = choice_of(chain.chat(temperature=0, tools=[WEATHER, TIME], stop="\n </tool"))
    assert after["finish_reason"] == "tool_calls" and after["stop_reason"] == "\n </tool", "both calls are whole"


ANSWER: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False,
}  # fmt: skip
ANSWERS = ('{"a": ', "1", "}")
REASONS, OPENS = TEMPLATE + "{# </think> #}", TEMPLATE.replace("<assistant>", "<assistant><think>") + "{# </think> #}"
CALL = ('\n{"name": "weather", "arguments": ', '{"city": "rome", "days": ', "2", "}}", "\n</tool_call>")
AFTER: dict[str, tuple[str, list[tuple[str, ...]], list[Any], tuple[str, str, list[tuple[str, Any]]]]] = {
    "open": (OPENS, [("x",), ("<think>", "hm", "</think>", *ANSWERS)], [], ("hm", '{"a": 1}', [])),
    "opens itself": (REASONS, [("<think>", "hm", "</think>", *ANSWERS)], [], ("hm", '{"a": 1}', [])),
    "no reasoning": (REASONS, [ANSWERS], [], ("", '{"a": 1}', [])),
    "an answer with tools": (TEMPLATE, [ANSWERS], [WEATHER], ("", '{"a": 1}', [])),
    "a call with a schema": (
        TEMPLATE, [("<tool_call>", *CALL)], [WEATHER], ("", "", [("weather", {"city": "rome", "days": 2})]),
    ),
}  # fmt: skip
"""Case -> template, texts of the model, tools, and reasoning, text and calls of an output that follows the schema."""


@pytest.mark.parametrize("case", AFTER)
def test_an_answer_by_a_schema_after_reasoning_or_a_call(case: str, writer: Callable[..., Running]) -> None:
    """In chat, whole and as a stream, in Responses and in Messages."""
    template, texts, tools, wanted = AFTER[case]
    running, schema = writer(texts[0], template, *texts[1:]), {"name": "answer", "schema": ANSWER}
    chat = {"tools": tools, "response_format": {"type": "json_schema", "json_schema": schema}}
    assert [one[1:] for one in messages_of(running, **chat, max_tokens=60)] == [wanted] * 2
    flat = [{"type": "function", **one["function"]} for one in tools]
    body: dict[str, Any] = {"input": TALK, "tools": flat, "text": {"format": {"type": "json_schema", **schema}}}
    output = running.answer("/v1/responses", temperature=0, max_output_tokens=60, **body)["output"]
    found = {one["type"]: one["content"][0]["text"] for one in output if "content" in one}
    calls = [(one["name"], json.loads(one["arguments"])) for one in output if one["type"] == "function_call"]
    assert (found.get("reasoning", ""), found.get("message", ""), calls) == wanted
    named = [{"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in tools]
    config = {"format": {"type": "json_schema", "schema": ANSWER}}
    body = {"messages": TALK, "tools": named, "output_config": config}
    blocks = running.answer("/v1/messages", temperature=0, max_tokens=60, **body)["content"]
    thoughts, text = ("".join(one.get(key, "") for one in blocks) for key in ("thinking", "text"))
    assert (thoughts, text, [(one["name"], one["input"]) for one in blocks if one["type"] == "tool_use"]) == wanted


def test_reasoning_whose_beginning_is_missing(writer: Callable[..., Running]) -> None:
    """A stream has sent it as content before its end is known."""
    running = writer(["so", " it", " is", "</think>", "\n\n", "Yes", "."], REASONS)
    (_, *whole, _), (_, reasoning, content, _) = messages_of(running)
    assert whole == ["so it is", "Yes."]
    assert content.endswith("Yes.") and sorted((reasoning + content).replace(" ", "")) == sorted("soitisYes.")


def test_a_talk_goes_on_after_calls(server: Running) -> None:
    """Messages as a client sends them back: without content, with results; their order and ids reach the template."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    sent = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "reasoning_content": "hm"}
    talk = [*TALK, sent, {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]
    text = server.answer("/detokenize", tokens=server.answer("/tokenize", messages=talk)["tokens"])["prompt"]
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert text.endswith("<user>sunnycall_1<assistant>")
    asked: dict[str, Any] = {"model": "tiny", "tools": [WEATHER], "max_tokens": 300}
    client = server.client.chat.completions
    done = client.create(messages=TALK, tool_choice="required", parallel_tool_calls=False, **asked).choices[0].message
    result = {"role": "tool", "tool_call_id": done.tool_calls[0].id, "content": "sunny"}
    again = client.create(messages=[*TALK, done, result], **asked | {"max_tokens": 4})
    assert again.choices[0].finish_reason == "length"


@pytest.mark.parametrize("arguments", ["[" * 50_000, '{"a": 1', "", '{"a": "\\ud83d"}'], ids=lambda one: one[:8])
def test_arguments_that_a_model_wrote_badly_come_back(arguments: str, server: Running) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = server.chat(messages=[*TALK, {"role": "assistant", "tool_calls": [call]}], max_tokens=2)
    assert answer.status_code in (200, 400) and "traceback" not in answer.text.lower(), answer.text
    assert answer.status_code == 200 or answer.json()["error"]["param"] == "messages"


NEEDS_NONE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}NONE{% else %}{{ m.content }}{% endif %}"
    "{% for t in m.tool_calls or [] %}{% for k, v in t.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}"
    "{% endfor %}<assistant>"
)


def test_a_history_of_calls_without_content(writer: Callable[..., Running]) -> None:
    """The template finds None in all three APIs, and the object of arguments that were cut off; other arguments are named."""
    running, prompts = writer(["ok"], NEEDS_NONE), list[str]()
    encode, decode = running.model._encoded, running.model.tokenizer.decode
    running.model._encoded = lambda *given: [prompts.append(decode(ids := encode(*given))), ids][1]  # type: ignore[method-assign]
    cut = {"name": "f", "arguments": '{"city": "Rome'}
    call = {"id": "c", "type": "function", "function": cut}
    talk: list[Any] = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "c", "content": "sunny"}
    running.answer("/v1/chat/completions", messages=[*talk, result])
    output = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
    running.answer("/v1/responses", input=[*TALK, {"type": "function_call", "call_id": "c", **cut}, output])
    used = [{"type": "tool_use", "id": "c", "name": "f", "input": {"city": "Rome"}}]
    answer = [{"type": "tool_result", "tool_use_id": "c", "content": "sunny"}]
    turns = [{"role": "assistant", "content": used}, {"role": "user", "content": answer}]
    running.answer("/v1/messages", max_tokens=4, messages=[*TALK, *turns])
    assert len(prompts) == 3 and len(set(prompts)) == 1
    assert "<assistant>NONEcity=Rome;<tool>sunny<assistant>" in prompts[0]
    cut["arguments"] = "Rome"
    assert_refused(running.chat(messages=[*talk, result]), "messages", "messages[1].tool_calls[0].function.arguments")


@pytest.mark.parametrize("drafter", ["suffix", "none"])
def test_a_prediction(drafter: str, chain: Running) -> None:
    """One that comes true, whatever the drafting method: one without lookups is replaced; and one that does not."""
    length = {"length": 8} if drafter == "suffix" else {}
    body: dict[str, Any] = {"temperature": 0, "foresay": {"drafter": drafter, "stats": True, **length}}

    def predicted(content: Any) -> Any:
        return chain.chat(prediction={"type": "content", "content": content}, **body).json()

    plain, done = chain.chat(**body).json(), predicted("".join(PIECES))
    other = predicted([{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}])
    assert all(one["choices"][0]["message"] == plain["choices"][0]["message"] for one in (done, other))
    passes = [one["choices"][0]["foresay"]["passes"] for one in (done, plain)]
    assert passes[0] < passes[1] / (4 if length else 1.2)
    details = done["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == done["usage"]["completion_tokens"] - passes[0]
    assert details["rejected_prediction_tokens"] == 0
    assert other["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0
    assert set(plain["usage"]["completion_tokens_details"]) == {"reasoning_tokens"}


def test_a_required_call_is_drafted_and_has_no_content_if_it_is_cut(server: Running) -> None:
    """Most of it is fixed by its grammar, and takes few passes."""
    body = {"tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    forced, plain = (
        choice_of(server.chat(foresay={"stats": True, **one}, max_tokens=200, **body))
        for one in ({"drafter": "suffix", "length": 16}, {"drafter": "none"})
    )
    functions = [one["message"]["tool_calls"][0]["function"] for one in (forced, plain)]
    assert functions[0] == functions[1] and forced["foresay"]["passes"] < plain["foresay"]["passes"] / 3
    for most in (1, 2, 5):
        choice = choice_of(server.chat(max_tokens=most, **body))
        assert choice["finish_reason"] == "length" and not choice["message"]["content"]


def test_a_refusal_names_the_function_whose_schema_it_is_about(server: Running) -> None:
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "("}}}}}
    message = server.chat(tools=[WEATHER, wrong], tool_choice="required").json()["error"]["message"]
    assert message.startswith("schema of 'f' is not supported") and "call" not in message


def test_a_chat_with_tools_is_counted(server: Running) -> None:
    """By /tokenize, with the fields that its template reads."""
    body = {"messages": TALK, "tools": [WEATHER], "add_generation_prompt": True, "add_special_tokens": True}
    done = server.chat(tools=[WEATHER], max_tokens=1).json()
    assert done["usage"]["prompt_tokens"] == server.answer("/tokenize", **body)["count"] > 50


HARMONY_PIECES = (
    *("<|channel|>", "analysis", "<|message|>", "They", " want", " rain.", "<|end|>", "<|start|>", "assistant"),
    *("<|channel|>commentary to=functions.weather <|constrain|>json<|message|>", '{"city": "', 'Rome"}', "<|call|>"),
)


def test_messages_in_the_harmony_format(writer: Callable[..., Running]) -> None:
    """Channels are split with tools and without; marks never reach the content."""
    running = writer(HARMONY_PIECES, TEMPLATE + "{# <|channel|> #}")
    message = ("tool_calls", "They want rain.", "", BOTH[:1])
    assert messages_of(running, tools=[WEATHER]) == [message] * 2
    deltas = [one["delta"] for one in stream_of(running)]
    assert "".join(one.get("reasoning_content", "") for one in deltas) == "They want rain."
    assert not any("<|" in one.get("content", "") for one in deltas)


FIELDS = {
    "reasoning_content": {"open": "<think>", "close": "</think>"},
    "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
    "content": {},
}


def test_a_response_template_of_the_tokenizer(writer: Callable[..., Running]) -> None:
    """It describes messages that no format of ours does; another chat template without a known format has tools then."""
    response_template = {"start_anchor": "<assistant>", "fields": FIELDS}
    running = writer(PIECES, TEMPLATE.replace("<tool_call>", "CALL"), response_template=response_template)
    message = ("tool_calls", "What is asked?", "Let me look.", BOTH)
    assert messages_of(running, tools=[WEATHER, TIME]) == [message] * 2
    one = choice_of(running.chat(tools=[WEATHER, TIME], temperature=0, parallel_tool_calls=False))["message"]
    assert len(one["tool_calls"]) == 1 and messages_of(running)[0][1] == "What is asked?"
    assert_refused(running.chat(tools=[WEATHER], tool_choice="required"), "tool_choice")
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"properties": {"a": deep}}
    nested = {"type": "function", "function": {"name": "f", "parameters": deep}}
    assert_refused(running.chat(tools=[nested]), "tools")
    running.model.generator.tokenizer.response_template = {"version": 7}  # type: ignore[union-attr]
    assert_refused(running.chat(temperature=0), "messages", "Unsupported response_template version")
