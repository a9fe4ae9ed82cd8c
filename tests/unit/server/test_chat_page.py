"""The files of the chat page: all are served and packaged, none names another site, and files of others are unchanged."""

from __future__ import annotations

import hashlib
import re
import tomllib
from itertools import product
from pathlib import Path

import foresay
from foresay.server.chat_page import PAGE_FILES
from foresay.text.formatting import is_noise
from foresay_lab.worth import PAYS

PACKAGE = Path(foresay.__file__).parent
FOLDER = PACKAGE / "server" / "page"
FILES = {path.relative_to(FOLDER).as_posix(): path for path in FOLDER.rglob("*") if path.is_file()}
VENDORED = {name for name in FILES if name.startswith("vendor/")}
OURS = {name: path.read_text(encoding="utf-8") for name, path in FILES.items() if name not in VENDORED}
ELSEWHERE = re.compile(r"https?://|[\"'`(=]//|@import|url\(")
AS_HTML = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|Function\(|srcdoc|\.style\b"
)


def changed(hashes: dict[str, str], contents: dict[str, bytes]) -> set[str]:
    """Files whose content has another hash, and files that one of the two lacks."""
    found = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
    return {name for name in hashes | found if hashes.get(name) != found.get(name)}


def test_files_of_others_are_as_they_were_published() -> None:
    """By the hashes of their list."""
    readme, script = FILES["vendor/README.md"].read_text(encoding="utf-8"), "vendor/marked.umd.js"
    rows = re.findall(r"^\| `(\S+)` \|.*`(\w{64})` \|$", readme, re.MULTILINE)
    hashes = {f"vendor/{name}": digest for name, digest in rows}
    contents = {name: FILES[name].read_bytes() for name in VENDORED - {"vendor/README.md"}}
    assert len(hashes) == 2 and changed(hashes, contents) == set()
    for name, wrong in ((script, contents[script] + b" "), ("vendor/more.js", b"")):
        assert changed(hashes, contents | {name: wrong}) == {name}
    assert b"Permission is hereby granted" in contents["vendor/marked.LICENSE"]


def test_every_file_is_served_and_packaged() -> None:
    served = {name for name, _ in PAGE_FILES.values()}
    assert served == set(FILES) - {"vendor/README.md", "vendor/marked.LICENSE"}
    settings = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["foresay"]
    packaged = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    assert set(FILES.values()) <= packaged
    licences = {path for pattern in settings["project"]["license-files"] for path in PACKAGE.parents[1].glob(pattern)}
    assert FILES["vendor/marked.LICENSE"] in licences


def test_our_files_name_no_other_site_and_parse_no_text_as_html() -> None:
    for name, text in OURS.items():
        assert not ELSEWHERE.search(text) and not AS_HTML.search(text), name
    assert ELSEWHERE.search('<script src="//a.example/b.js">') and ELSEWHERE.search("fetch('https://a.example')")
    assert AS_HTML.search("box.innerHTML = text") and not AS_HTML.search("box.textContent = text")


def test_what_the_scripts_look_for_is_on_the_page() -> None:
    ids = set(re.findall(r'id="(\w+)"', OURS["index.html"]))
    scripts = "".join(text for name, text in OURS.items() if name.endswith(".js"))
    used = set(re.findall(r'\bat\("(\w+)"\)', scripts))
    lists = re.findall(r"^const (?:SWITCHES|FIELDS|SAMPLING) = \[(.*)\];$", scripts, re.MULTILINE)
    used |= {name for one in lists for name in re.findall(r'"(\w+)"', one)}
    assert len(lists) == 3 and len(used) > 15 and used <= ids


IN_PYTHON = {
    "Math.": "", "||": "or", "&&": "and", "!== null": "is not None", "speedUp": "speed_up", "perPass": "per_pass",
}  # fmt: skip
"""Spellings of an expression in the page's language, and in ours."""


def differing(script: str) -> list[tuple[float, float, float | None]]:
    """Speed-ups, spreads and tokens per pass for which the page's rule is another than the command line's."""
    [rule] = re.findall(r"function isNoise\(speedUp, spread, perPass\) \{\s*//[^\n]*\s*return ([^;]*);", script)
    for theirs, ours in IN_PYTHON.items():
        rule = rule.replace(theirs, ours)
    page = eval(f"lambda speed_up, spread, per_pass: {rule}", {"abs": abs, "max": max})  # noqa: S307
    cases = product((0.4, 0.95, 1.0, 1.05, 2.49, 2.5, 2.85), (0.0, 0.1), (None, 0.9, 1.0, 2.5))
    return [one for one in cases if page(*one) != is_noise(*one)]


def test_a_speed_up_is_noise_on_the_page_where_it_is_on_the_command_line() -> None:
    script = OURS["chat.js"]
    assert differing(script) == [] and is_noise(2.85, 0.0, 2.5) and not is_noise(2.5, 0.0, 2.5)
    for right, wrong in (("speedUp > Math", "speedUp < Math"), ("<= spread", "< spread"), (" - 1)", ")")):
        assert differing(script.replace(right, wrong)), "a rule that is another"
    assert "isNoise(ratio, plain.spread, passes)" in script, "and it decides about the message"


def test_the_scripts_are_short_and_call_a_gain_what_the_command_line_calls_one() -> None:
    scripts = {name: text for name, text in OURS.items() if name.endswith(".js")}
    assert sum(text.count("\n") for text in scripts.values()) <= 900
    assert f"const PAYS = {PAYS};" in scripts["chat.js"]
