"""Models for tests of clients, as folders: `python -m helpers.client_models FOLDER`.

`writer` answers with a text, a call of the first tool, an answer to a tool's result, or JSON, as its template chooses by the last
message. `random` has scores that depend on the whole text.
"""

from __future__ import annotations

import sys
from pathlib import Path

from helpers import chains, tiny

TEXT = ("The sea", " is wide", " and", " blue", ".")
STARTS = ("<weather>", "<City>", "<result>", "<json>")
"""Tokens with which the template ends, each followed by a text."""
OTHERS = (
    ("<weather>", '<tool_call>\n{"name": "weather", ', '"arguments": {"city": ', '"Rome"', "}}", "\n</tool_call>"),
    ("<City>", '<tool_call>\n{"name": "City", "arguments": {"na', 'me": "Lima", ', '"inhabitants": 10092000', "}}\n</tool_call>"),
    ("<result>", "It is ", "sunny", " in Rome."),
    ("<json>", '{"name": "Lima", ', '"inhabitants": 100920', "00}"),
    # under a grammar, after the parts of which a schema leaves no choice
    ("{", '"city": "Rome', '"', "}"),
    ("{", '"name": "Lima", "inhab'),
    ('"', ": 10092000", "}"),
)  # fmt: skip
TEMPLATE = """\
<bos>{% if tools %}{{ tools | tojson }}{# <tool_call> #}{% endif %}
{%- for message in messages %}<user>{{ message.role }}: {{ message.content or '' }}
{%- for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}
{%- if messages[-1].role == 'tool' %}<result>
{%- elif tools and tools[0].function.name == 'weather' %}<weather>
{%- elif tools and tools[0].function.name == 'City' %}<City>
{%- elif 'inhabitants' in messages[-1].content %}<json>
{%- else %}<assistant>
{%- endif %}
{%- endif %}"""


def main(folder: Path) -> None:
    chains.save(folder / "writer", TEXT, TEMPLATE, special=STARTS, others=OTHERS)
    tiny.save(folder / "random", chat=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
