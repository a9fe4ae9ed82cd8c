"""OpenAI's responses: those that a server keeps, choices of tools, and fields of sampling."""

from __future__ import annotations

from clients.cases.bodies import WEATHER_OF_RESPONSES, post
from clients.cases.case import NO_ROUTE, Request, cases, refused
from clients.cases.expect import equals, error, text, that
from clients.cases.vllm.responses_route import DONE, respond

STATE = cases({
    "a stored response": (respond("Hello!", store=True), DONE, "answers"),
    "a response that is not stored": (respond("Hello!", store=False), DONE, "answers"),
    "a stored response comes back": (Request(method="GET", path="/v1/responses/resp_1"), NO_ROUTE),
    "a response in the background": (respond("Hello!", background=True), refused("background")),
    "a response in the background that is not stored": (respond(background=True, store=False), error(400),
        refused("background")),
    "a cancelled response": (post("/v1/responses/resp_1/cancel", {}), NO_ROUTE),
    "the response before": (respond("My name?", previous_response_id="resp_1"), refused("previous_response_id")),
})  # fmt: skip
UNKNOWN = cases({
    "an unknown response comes back": (Request(method="GET", path="/v1/responses/resp_ghost"), NO_ROUTE),
    "an unknown response is cancelled": (post("/v1/responses/resp_ghost/cancel", {}), NO_ROUTE),
})  # fmt: skip
TOOLS = [WEATHER_OF_RESPONSES]
WEATHER = {"type": "function", "name": "get_current_weather"}
SHORT = {"max_output_tokens": 16}
CALL = {"temperature": 0, "max_output_tokens": 200}
CALLED = that("a call", lambda bodies: bodies[-1]["output"][-1]["type"] == "function_call")
CHOICES = cases({
    "no tools": (respond(**SHORT), text("output.0.content.0.text"), "tools"),
    "an empty list of tools": (respond(tools=[], **SHORT), text("output.0.content.0.text"), "tools"),
    **{f"a choice of {one} without tools": (respond(tool_choice=one, **SHORT), text("output.0.content.0.text"),
        "tools") for one in ("none", "auto")},
    **{f"a choice of {one} with an empty list of tools": (respond(tools=[], tool_choice=one, **SHORT),
        text("output.0.content.0.text"), "tools") for one in ("none", "auto")},
    "a required call without tools": (respond(tool_choice="required"), error(400), "tools"),
    "a required call with an empty list of tools": (respond(tool_choice="required", tools=[]), error(400), "tools"),
    "a named call without tools": (respond(tool_choice=WEATHER), error(400), "tools"),
    "a named call with an empty list of tools": (respond(tool_choice=WEATHER, tools=[]), error(400), "tools"),
    "a tool with a choice of none": (respond(tools=TOOLS, tool_choice="none", **SHORT),
        text("output.0.content.0.text"), "tools"),
    "a named call": (respond(tools=TOOLS, tool_choice=WEATHER, **CALL), CALLED, "tools"),
    "a named call of another tool": (respond(tools=TOOLS, tool_choice={"type": "function", "name": "nothing"}),
        error(400), "tools"),
    "a required call": (respond(tools=TOOLS, tool_choice="required", **CALL), CALLED, "tools"),
    "a named call without a name": (respond(tools=TOOLS, tool_choice={"type": "function"}), error(400), "tools"),
    "a named call with an empty name": (respond(tools=TOOLS, tool_choice={"type": "function", "name": ""}),
        error(400), "tools"),
    **{f"parallel_tool_calls {given} in the response": (respond(parallel_tool_calls=given, **SHORT),
        equals("parallel_tool_calls", shown), "tools") for given, shown
        in ((True, True), (False, False), (None, True))},
    "an image": (respond([{"role": "user", "content": [{"type": "input_image", "image_url":
        "https://a.example/b.png"}]}]), refused("input.content.type")),
})  # fmt: skip
SAMPLING = cases({
    "temperature and top_p": (respond(temperature=0.8, top_p=0.95, **SHORT), equals("temperature", 0.8),
        equals("top_p", 0.95)),
    **{f"the field {name}": (respond(**{name: value}, **SHORT), text("output.0.content.0.text"), refused(name))
        for name, value in (("top_k", 50), ("repetition_penalty", 1.2), ("seed", 42), ("stop", ["END"]),
        ("vllm_xargs", {"a": "b"}))},
    "the field structured_outputs": (respond(structured_outputs={"grammar": 'root ::= "a"'}, **SHORT),
        equals("output.0.content.0.text", "a")),
    "the field ignore_eos": (respond(ignore_eos=True, temperature=0, **SHORT),
        equals("usage.output_tokens", 16), "answers"),
    "a seed of more than 64 bits": (respond(seed=2**63), error(400), refused("seed")),
})  # fmt: skip
COUNT = cases({
    "tokens of an input": (post("/v1/responses/input_tokens", {"input": "Hello world!"}), NO_ROUTE),
})  # fmt: skip
SUITES = {
    "openai/responses/test_stateful.py": STATE,
    "openai/responses/test_store.py": UNKNOWN,
    "openai/responses/test_sampling_params.py": SAMPLING,
    "openai/responses/test_count_tokens.py": COUNT,
    "tool_use/test_responses_request_validations.py": CHOICES,
}
