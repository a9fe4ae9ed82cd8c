"""Tools over HTTP: calls that a model writes, calls that it must write, and the messages that follow them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import foresay
from helpers import chains
from helpers.serving import Running, choice_of, events_of
from helpers.tool_chats import PIECES, TALK, TEMPLATE, TIME, WEATHER


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or ()]


def stream_of(running: Running, **body: Any) -> list[dict[str, Any]]:
    """The choices of a chat's events."""
    return [one["choices"][0] for one in events_of(running.chat(temperature=0, stream=True, **body))]


def test_calls_of_a_whole_answer_and_of_a_stream(chain: Running) -> None:
    """The role alone, pieces of arguments, and the finish reason alone; the client puts them together."""
    body: dict[str, Any] = {"model": "tiny", "messages": TALK, "tools": [WEATHER, TIME], "temperature": 0}
    done = chain.client().chat.completions.create(**body)
    with chain.client().chat.completions.stream(**body) as stream:
        together = stream.get_final_completion()
    for one in (done, together):
        message: Any = one.choices[0].message
        assert one.choices[0].finish_reason == "tool_calls" and message.content.strip() == "Let me look."
        assert message.reasoning_content == "What is asked?"
        assert calls_of(message) == [("weather", {"city": "Rome"}), ("time", {})]
        assert len({one.id for one in message.tool_calls}) == 2
        assert all(one.type == "function" and one.id.startswith("call_") for one in message.tool_calls)
    choices = stream_of(chain, tools=[WEATHER, TIME])
    assert choices[0]["delta"] == {"role": "assistant", "content": ""} and choices[0]["finish_reason"] is None
    assert choices[-1]["delta"] == {} and choices[-1]["finish_reason"] == "tool_calls"
    assert all(one["delta"] and one["finish_reason"] is None for one in choices[1:-1])
    sent = [choice["delta"].get("tool_calls", []) for choice in choices]
    for pieces in sent:
        assert len({one["index"] for one in pieces}) == len(pieces), (
            "some clients read only the first piece of an event"
        )
    assert len([one for pieces in sent for one in pieces if one["index"] == 0]) > 1, "arguments arrive in pieces"


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


def test_without_tools_the_text_is_content(chain: Running) -> None:
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        choice = choice_of(chain.chat(temperature=0, **more))
        assert choice["finish_reason"] == "stop" and "tool_calls" not in choice["message"]
        assert '{"name": "weather", "arguments"' in choice["message"]["content"]


def test_one_call_at_most(chain: Running) -> None:
    choice = choice_of(chain.chat(temperature=0, tools=[WEATHER, TIME], parallel_tool_calls=False))
    assert [one["function"]["name"] for one in choice["message"]["tool_calls"]] == ["weather"]
    assert choice["finish_reason"] == "tool_calls"
    whole = choice_of(chain.chat(temperature=0, tools=[WEATHER, TIME], parallel_tool_calls=True))
    assert len(whole["message"]["tool_calls"]) == 2, "control"


def test_an_output_that_is_cut_within_a_call(chain: Running) -> None:
    choice = choice_of(chain.chat(temperature=0, tools=[WEATHER], max_tokens=11))
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "weather", "arguments": "{}"}


def test_each_output_has_its_own_calls(chain: Running) -> None:
    choices = chain.chat(temperature=0, tools=[WEATHER], n=2).json()["choices"]
    ids = [call["id"] for choice in choices for call in choice["message"]["tool_calls"]]
    assert len(ids) == len(set(ids)) == 4


@pytest.mark.parametrize(
    ("tool_format", "temperature"),
    [("auto", 0), ("hermes", 1.5), ("mistral", 0), ("mistral_named", 1.5), ("llama3_json", 1.5), ("pythonic", 1.5)],
)
def test_required_calls_follow_their_schemas(tool_format: str, temperature: float, server: Running) -> None:
    """By a model that writes noise, with drafts: without the grammar, no output is a call."""
    with Running(server.model.generator, tool_format=tool_format) as running:
        body = {"tools": [WEATHER, TIME], "temperature": temperature, "seed": 0, "max_tokens": 300}
        named = {"type": "function", "function": {"name": "weather"}}
        for choice, single in (("required", True), (named, False)):
            done = choice_of(running.chat(tool_choice=choice, parallel_tool_calls=not single, **body))
            if done["finish_reason"] == "length":  # noise may go on calling
                assert not single
                continue
            calls = [one["function"] for one in done["message"]["tool_calls"]]
            assert done["finish_reason"] == "tool_calls" and done["message"]["content"] is None
            assert len(calls) == 1 or not single
            for call in calls:
                arguments = json.loads(call["arguments"])
                assert call["name"] in ("weather", "time") if single else call["name"] == "weather"
                if call["name"] == "weather":
                    assert set(arguments) == {"city", "days"} and arguments["days"] in (1, 2, 3)
                    assert 1 <= len(arguments["city"]) <= 8 and arguments["city"].isalpha()
        free = choice_of(running.chat(**body))["message"]
        assert not free.get("tool_calls"), "control"


@pytest.mark.parametrize("stop", ["city", '"', ["e", "}"]])
def test_a_stop_string_does_not_cut_a_required_call(stop: Any, server: Running) -> None:
    body = {"tools": [WEATHER], "tool_choice": "required", "temperature": 0, "max_tokens": 200}
    choice = choice_of(server.chat(stop=stop, **body))
    assert choice == choice_of(server.chat(**body)) | {"message": choice["message"]}, "the stop string changes nothing"
    (call,) = choice["message"]["tool_calls"]
    assert (
        set(json.loads(call["function"]["arguments"])) == {"city", "days"} and choice["finish_reason"] == "tool_calls"
    )


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
OPENS = TEMPLATE.replace("<assistant>", "<assistant><think>")
MARKS = ("<think>", "</think>", "<tool_call>")


def answers_of(running: Running, tools: list[Any]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Reasoning, text and calls of an output by a schema in chat, whole and as a stream, in Responses and in Messages."""
    schema = {"name": "answer", "schema": ANSWER}
    body: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 60}
    chat = {**body, "messages": TALK, "tools": tools, "response_format": {"type": "json_schema", "json_schema": schema}}
    whole: Any = running.client().chat.completions.create(**chat).choices[0].message
    with running.client().chat.completions.stream(**chat) as stream:
        final: Any = stream.get_final_completion().choices[0].message
    found = [
        (getattr(one, "reasoning_content", None) or "", one.content or "", calls)
        for one in (whole, final)
        for calls in [[(call.function.name, call.function.arguments) for call in one.tool_calls or ()]]
    ]
    flat = [{"type": "function", **one["function"]} for one in tools]
    body = {"temperature": 0, "max_output_tokens": 60, "input": TALK, "tools": flat}
    body["text"] = {"format": {"type": "json_schema", **schema}}
    output = running.post("/v1/responses", **body).json()["output"]
    parts = {kind: [one for one in output if one["type"] == kind] for kind in ("reasoning", "message", "function_call")}
    texts = [
        "".join(part["text"] for one in parts[kind] for part in one["content"]) for kind in ("reasoning", "message")
    ]
    found.append((texts[0], texts[1], [(one["name"], one["arguments"]) for one in parts["function_call"]]))
    named = [{"name": one["function"]["name"], "input_schema": one["function"]["parameters"]} for one in tools]
    body = {"temperature": 0, "max_tokens": 60, "messages": TALK, "tools": named}
    body["output_config"] = {"format": {"type": "json_schema", "schema": ANSWER}}
    blocks = running.post("/v1/messages", **body).json()["content"]
    thoughts, texts = ("".join(one.get(key, "") for one in blocks) for key in ("thinking", "text"))  # type: ignore[assignment]
    uses = [(one["name"], json.dumps(one["input"])) for one in blocks if one["type"] == "tool_use"]
    return [*found, (str(thoughts), str(texts), uses)]


@pytest.mark.parametrize(
    ("template", "pieces", "others", "tools", "wanted"),
    [
        (OPENS + "{# </think> #}", ["x"], [("<think>", "hm", "</think>", *ANSWERS)], [], ("hm", '{"a": 1}', [])),
        (TEMPLATE + "{# </think> #}", ["<think>", "hm", "</think>", *ANSWERS], (), [], ("hm", '{"a": 1}', [])),
        (TEMPLATE + "{# </think> #}", ANSWERS, (), [], ("", '{"a": 1}', [])),
        (TEMPLATE, ANSWERS, (), [WEATHER], ("", '{"a": 1}', [])),
        (
            TEMPLATE,
            ["<tool_call>", '\n{"name": "weather", "arguments": ', '{"city": "rome", "days": ', "2", "}}", "\n</tool_call>"],
            (),
            [WEATHER],
            ("", "", [("weather", '{"city": "rome", "days": 2}')]),
        ),
    ],
    ids=["open", "opens itself", "no reasoning", "an answer with tools", "a call with a schema"],
)  # fmt: skip
def test_an_answer_by_a_schema_after_reasoning_or_a_call(
    template: str, pieces: Any, others: Any, tools: list[Any], wanted: Any, tmp_path: Path
) -> None:
    special = [one for one in MARKS if one in (*pieces, *(part for other in others for part in other))]
    folder = chains.save(tmp_path, pieces, template, special=special, others=others)
    with Running(foresay.load(str(folder), num_draft_tokens=3)) as running:
        assert answers_of(running, tools) == [wanted] * 4


def test_reasoning_whose_beginning_is_missing(tmp_path: Path) -> None:
    """A stream has sent it as content before its end is known."""
    pieces = ["so", " it", " is", "</think>", "\n\n", "Yes", "."]
    folder = chains.save(tmp_path, pieces, TEMPLATE + "{# </think> #}", special=["</think>"])
    with Running(foresay.load(str(folder), num_draft_tokens=3)) as running:
        message = choice_of(running.chat(temperature=0))["message"]
        assert (message["reasoning_content"], message["content"]) == ("so it is", "Yes.")
        deltas = [one["delta"] for one in stream_of(running)]
        texts = ["".join(one.get(key, "") for one in deltas) for key in ("reasoning_content", "content")]
        assert "".join(texts).replace(" ", "") in ("soitisYes.", "itissoYes.", "issoitYes.") and texts[1].endswith(
            "Yes."
        )


@pytest.mark.parametrize("tool_format", ["auto", "llama3_json", "mistral", "pythonic", "qwen3_coder"])
def test_noise_is_a_call_or_an_answer(tool_format: str, server: Running) -> None:
    with Running(server.model.generator, tool_format=tool_format) as running:
        form = {"type": "json_schema", "json_schema": {"schema": ANSWER}}
        tools = [TIME] if tool_format == "qwen3_coder" else [WEATHER, TIME]
        body = {"tools": tools, "response_format": form, "max_tokens": 300, "parallel_tool_calls": False}
        for more in ({"temperature": 0}, {"temperature": 1.5, "seed": 1}):
            choice = choice_of(running.chat(**body, **more))
            message = choice["message"]
            if choice["finish_reason"] == "length":
                continue
            is_answer = not message.get("tool_calls")
            assert choice["finish_reason"] == ("stop" if is_answer else "tool_calls")
            assert not is_answer or set(json.loads(message["content"])) == {"a"}
            assert is_answer or not message["content"]


def test_a_talk_goes_on_after_calls(server: Running) -> None:
    """Messages as a client sends them back: without content, with results; their order and ids reach the template."""
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    talk = [
        *TALK,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    ids = server.post("/tokenize", messages=talk).json()["tokens"]
    text = server.post("/detokenize", tokens=ids).json()["prompt"]
    assert '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>' in text
    assert text.endswith("<user>sunnycall_1<assistant>")
    assert server.chat(messages=talk, tools=[WEATHER], max_tokens=4).status_code == 200
    done = server.client().chat.completions.create(
        model="tiny", messages=TALK, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=300
    )
    result = {"role": "tool", "tool_call_id": done.choices[0].message.tool_calls[0].id, "content": "sunny"}  # type: ignore[index]
    again = server.client().chat.completions.create(
        model="tiny",
        messages=[*TALK, done.choices[0].message, result],
        tools=[WEATHER],
        max_tokens=4,  # type: ignore[list-item]
    )
    assert again.choices[0].finish_reason == "length"


@pytest.mark.parametrize("arguments", ["[" * 50_000, '{"a": 1', "", '{"a": "\\ud83d"}'])
def test_arguments_that_a_model_wrote_badly_come_back(arguments: str, server: Running) -> None:
    sent = {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": arguments}}],
    }
    answer = server.chat(messages=[*TALK, sent], max_tokens=2)
    assert answer.status_code in (200, 400) and "traceback" not in answer.text.lower(), answer.text
    assert answer.status_code == 200 or answer.json()["error"]["param"] == "messages"


NEEDS_NONE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}NONE{% else %}{{ m.content }}{% endif %}"
    "{% for t in m.tool_calls or [] %}{% for k, v in t.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}"
    "{% endfor %}<assistant>"
)


def test_a_history_of_calls_without_content(tmp_path: Path) -> None:
    """The template finds None in all three APIs, and the object of arguments that were cut off; other arguments are named."""
    with Running(foresay.load(str(chains.save(tmp_path, ["ok"], NEEDS_NONE)))) as running:
        prompts = list[str]()
        encode = running.model._encoded
        decode = running.model.tokenizer.decode
        running.model._encoded = lambda *given: [prompts.append(decode(ids := encode(*given))), ids][1]  # type: ignore[method-assign]
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Rome'}}
        talk: list[Any] = [*TALK, {"role": "assistant", "content": None, "tool_calls": [call]}]
        result = {"role": "tool", "tool_call_id": "c", "content": "sunny"}
        assert running.chat(messages=[*talk, result]).status_code == 200
        items = [{"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"city": "Rome'}]
        output = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
        body: dict[str, Any] = {"input": [*TALK, *items, output]}
        assert running.post("/v1/responses", **body).status_code == 200
        used = {"type": "tool_use", "id": "c", "name": "f", "input": {"city": "Rome"}}
        answer = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "sunny"}]}
        body = {"max_tokens": 4, "messages": [*TALK, {"role": "assistant", "content": [used]}, answer]}
        assert running.post("/v1/messages", **body).status_code == 200
        assert len(prompts) == 3 and len(set(prompts)) == 1
        assert "<assistant>NONEcity=Rome;<tool>sunny<assistant>" in prompts[0]
        call["function"]["arguments"] = "Rome"  # type: ignore[index]
        error = running.chat(messages=[*talk, result]).json()["error"]
        assert error["param"] == "messages" and "messages[1].tool_calls[0].function.arguments" in error["message"]


class TestPrediction:
    @pytest.mark.parametrize("drafter", ["suffix", "none"])
    def test_a_prediction_that_comes_true(self, drafter: str, chain: Running) -> None:
        """Whatever the drafting method: one without lookups is replaced."""
        length = {"length": 8} if drafter == "suffix" else {}
        body: dict[str, Any] = {"temperature": 0, "foresay": {"drafter": drafter, "stats": True, **length}}
        plain = chain.chat(**body).json()
        done = chain.chat(prediction={"type": "content", "content": "".join(PIECES)}, **body).json()
        assert done["choices"][0]["message"] == plain["choices"][0]["message"]
        passes = [one["choices"][0]["foresay"]["passes"] for one in (done, plain)]
        assert passes[0] < passes[1] / (4 if length else 1.2)
        details = done["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == done["usage"]["completion_tokens"] - passes[0]
        assert details["rejected_prediction_tokens"] == 0

        assert set(plain["usage"]["completion_tokens_details"]) == {"reasoning_tokens"}

    def test_a_prediction_that_does_not(self, chain: Running) -> None:
        plain = chain.chat(temperature=0).json()
        parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
        done = chain.chat(temperature=0, prediction={"type": "content", "content": parts}).json()
        assert done["choices"][0]["message"] == plain["choices"][0]["message"]
        assert done["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] > 0


def test_forced_tokens_are_drafted(server: Running) -> None:
    """Most of a required call is fixed by its grammar, and takes few passes."""
    body = {"tools": [WEATHER], "tool_choice": "required", "temperature": 0, "max_tokens": 200}
    forced, plain = (
        choice_of(server.chat(foresay={"stats": True, **one}, **body))
        for one in ({"drafter": "suffix", "length": 16}, {"drafter": "none"})
    )
    functions = [one["message"]["tool_calls"][0]["function"] for one in (forced, plain)]
    assert functions[0] == functions[1]
    assert forced["foresay"]["passes"] < plain["foresay"]["passes"] / 3


def test_a_refusal_names_the_function_whose_schema_it_is_about(server: Running) -> None:
    wrong = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"pattern": "("}}}}}
    message = server.chat(tools=[WEATHER, wrong], tool_choice="required").json()["error"]["message"]
    assert message.startswith("schema of 'f' is not supported") and "call" not in message


def test_a_required_call_that_is_cut_has_no_content(server: Running) -> None:
    body = {"tools": [WEATHER], "tool_choice": "required", "temperature": 0}
    for most in (1, 2, 5):
        choice = choice_of(server.chat(max_tokens=most, **body))
        assert choice["finish_reason"] == "length" and not choice["message"]["content"]


def test_a_chat_with_tools_is_counted(server: Running) -> None:
    """By /tokenize, with the fields that its template reads."""
    body = {"messages": TALK, "tools": [WEATHER], "add_generation_prompt": True, "add_special_tokens": True}
    count = server.post("/tokenize", **body).json()["count"]
    done = server.chat(tools=[WEATHER], max_tokens=1).json()
    assert done["usage"]["prompt_tokens"] == count > 50


HARMONY_PIECES = (
    *("<|channel|>", "analysis", "<|message|>", "They", " want", " rain.", "<|end|>", "<|start|>", "assistant"),
    *("<|channel|>commentary to=functions.weather <|constrain|>json<|message|>", '{"city": "', 'Rome"}', "<|call|>"),
)


def test_messages_in_the_harmony_format(tmp_path: Path) -> None:
    """Channels are split with tools and without; marks never reach the content."""
    special = [piece for piece in HARMONY_PIECES if re.fullmatch(r"<\|\w+\|>", piece)]
    folder = chains.save(tmp_path, HARMONY_PIECES, TEMPLATE + "{# <|channel|> #}", special=special)
    with Running(foresay.load(str(folder), num_draft_tokens=3)) as running:
        done = running.client().chat.completions.create(model="tiny", messages=TALK, tools=[WEATHER], temperature=0)
        message: Any = done.choices[0].message
        assert message.reasoning_content == "They want rain." and not message.content
        assert calls_of(message) == [("weather", {"city": "Rome"})] and done.choices[0].finish_reason == "tool_calls"
        deltas = [one["delta"] for one in stream_of(running)]
        assert "".join(one.get("reasoning_content", "") for one in deltas) == "They want rain."
        assert not any("<|" in one.get("content", "") for one in deltas)


RESPONSE_TEMPLATE = {
    "start_anchor": "<assistant>",
    "fields": {
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "tool_calls": {"open": "<tool_call>", "close": "</tool_call>", "content": "json", "repeats": True},
        "content": {},
    },
}


def test_a_response_template_of_the_tokenizer(tmp_path: Path) -> None:
    """It describes messages that no format of ours does; another chat template without a known format has tools then."""
    template, special = TEMPLATE.replace("<tool_call>", "CALL"), ["<tool_call>", "<think>", "</think>"]
    folder = chains.save(tmp_path, PIECES, template, special=special)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = RESPONSE_TEMPLATE
    tokenizer.save_pretrained(folder)
    with Running(foresay.load(str(folder), num_draft_tokens=3)) as running:
        body = {"model": "tiny", "messages": TALK, "tools": [WEATHER, TIME], "temperature": 0}
        message: Any = running.client().chat.completions.create(**body).choices[0].message  # type: ignore[call-overload]
        assert message.reasoning_content.strip() == "What is asked?" and message.content.strip() == "Let me look."
        assert calls_of(message) == [("weather", {"city": "Rome"}), ("time", {})]
        with running.client().chat.completions.stream(**body) as stream:  # type: ignore[arg-type]
            assert calls_of(stream.get_final_completion().choices[0].message) == calls_of(message)
        one = choice_of(running.chat(tools=[WEATHER, TIME], temperature=0, parallel_tool_calls=False))["message"]
        assert len(one["tool_calls"]) == 1
        refused = running.chat(tools=[WEATHER], tool_choice="required")
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "tool_choice"
        plain = choice_of(running.chat(temperature=0))["message"]
        assert plain["reasoning_content"].strip() == "What is asked?"
        deep: dict[str, Any] = {}
        for _ in range(40):
            deep = {"properties": {"a": deep}}
        nested = {"type": "function", "function": {"name": "f", "parameters": deep}}
        assert running.chat(tools=[nested]).json()["error"]["param"] == "tools", "the schema is checked here, too"
        running.model.generator.tokenizer.response_template = {"version": 7}  # type: ignore[union-attr]
        wrong = running.chat(temperature=0)
        assert wrong.status_code == 400 and "Unsupported response_template version" in wrong.json()["error"]["message"]
