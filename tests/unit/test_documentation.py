"""Documentation is complete and consistent: links, commands, environment variables, public names, fields and settings.

Each check is a function from texts to defects. A test asserts that the repository has none, and another that a planted defect
is found.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shlex
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

import foresay
from foresay.cli.app import app
from foresay.cli.commands import named
from foresay.server import option_fields, output_fields, requests
from foresay.server.adapters import ollama_fields
from foresay.server.adapters.message_fields import MessagesRequest
from foresay.server.adapters.response_fields import ResponsesRequest
from foresay.server.embedding import EmbeddingRequest
from foresay.server.fields import ANYTHING, Fields
from foresay.spec.recipes import DRAFTERS
from foresay.spec.settings_file import Settings

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SOURCES = sorted((ROOT / "src").rglob("*.py"))
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")),
]


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@cache
def texts() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in PAGES}


# Links


def slug(heading: str) -> str:
    """The anchor that MkDocs gives to a heading."""
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower()))


def without_code(text: str) -> str:
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL))


def anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {slug(heading.replace("`", "")) for heading in headings}


def broken_links(path: Path, text: str) -> list[str]:
    """Links of a page to files or headings that do not exist."""
    out = []
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code(text)):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = path if not file else (path.parent / file).resolve()
        if not target.exists() or (anchor and anchor not in anchors(target.read_text("utf-8") if file else text)):
            out.append(link)
    return out


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_resolve(path: Path) -> None:
    assert broken_links(path, texts()[path]) == []


def test_broken_links_are_found() -> None:
    text = "# One\n[a](missing.md) [b](#two) [c](#one) [d](index.md#nowhere) [e](index.md) [f](https://example.org/x)"
    assert broken_links(DOCS / "glossary.md", text) == ["missing.md", "#two", "index.md#nowhere"]


def named_files(text: str) -> list[str]:
    """Documentation files that a text names, as error messages do, and that do not exist."""
    return [name for name in re.findall(r"\bdocs/[\w/-]+\.\w+", text) if not (ROOT / name).exists()]


def test_sources_name_existing_pages() -> None:
    code = [*SOURCES, *sorted((ROOT / "benchmarks").glob("*.py")), *sorted((ROOT / "scripts").iterdir())]
    missing = {path.name: found for path in code if path.is_file() and (found := named_files(path.read_text("utf-8")))}
    assert missing == {}
    assert named_files("see docs/peers.md and docs/index.md") == ["docs/peers.md"], "negative control"


def missing_paths(text: str) -> list[str]:
    """Files of the repository that a text names and that do not exist."""
    names = re.findall(
        r"(?<![\w/.-])(?:src|tests|scripts|docs|packages|examples)/[\w/.-]*\w\.(?:py|md|h|cpp|json)\b", text
    )
    names += re.findall(r"(?<![\w/.-])benchmarks/[a-z_]+\.py\b", text)
    return [name for name in names if not (ROOT / name).exists()]


def test_named_files_exist() -> None:
    documents = [
        *sorted((ROOT / "docs").rglob("*.md")),
        *ROOT.glob("*.md"),
        *sorted((ROOT / "benchmarks").glob("*.md")),
    ]
    found = {str(path.relative_to(ROOT)): missing_paths(path.read_text(encoding="utf-8")) for path in documents}
    assert not {name: missing for name, missing in found.items() if missing}


def test_missing_files_are_found() -> None:
    assert missing_paths(
        "see `tests/distribution/test_loop_law.py`, tests/distribution/test_loop.py and benchmarks/gone.py"
    ) == [
        "tests/distribution/test_loop_law.py",
        "benchmarks/gone.py",
    ]


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    own = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert listed == own | {"changelog.md", "results.md", "log.md"}, "docs/theme/pages.py has the last three"


# Commands


def undocumented_commands(text: str) -> list[str]:
    return [name for name in named() if f"\n## foresay {name}\n" not in text]


def test_every_command_is_in_the_reference() -> None:
    text = page("reference/cli.md")
    assert undocumented_commands(text) == []
    assert undocumented_commands(text.replace("\n## foresay vllm-config\n", "\n")) == ["vllm-config"], (
        "negative control"
    )


def flags(command: str) -> set[str]:
    """Options of a command; of the whole program for ""."""
    found = named()[command] if command else app
    return {flag for option in found.params for flag in (*option.opts, *option.secondary_opts)} | {"-h", "--help"}


def wrong_usage(line: str) -> list[str]:
    """Unknown commands and options in a line that runs foresay."""
    words = shlex.split(line, comments=True)
    if "foresay" not in words:
        return []
    words = words[words.index("foresay") + 1 :]
    words = words[: next((i for i, word in enumerate(words) if word in ("|", "<", ">", "&&")), len(words))]
    if not words or words[0].startswith("-"):
        return [word for word in words if word.startswith("-") and word not in flags("")]
    command = words[0]
    if command not in named():
        return [command]
    options = (word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word))
    return [f"{command} {option}" for option in options if option not in flags(command)]


def shown_commands(text: str) -> list[str]:
    found = re.findall(r"^```(?:bash|console|text)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = "".join(found).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ") for line in lines if re.match(r"(\$ .*)?foresay ", line) and "..." not in line]


def test_shown_commands_exist() -> None:
    lines = [(path, line) for path, text in texts().items() if path.name != "cli.md" for line in shown_commands(text)]
    assert len(lines) > 60
    wrong = {f"{path.name}: {line}": defects for path, line in lines if (defects := wrong_usage(line))}
    assert wrong == {}


def test_wrong_commands_are_found() -> None:
    assert wrong_usage("foresay load answers.jsonl") == ["load"]
    assert wrong_usage("foresay tune -m org/name --latencies 40 --yes") == ["tune --latencies"]
    assert wrong_usage("foresay distill x.safetensors --kind ngram --orders=3") == ["distill --orders"]
    assert shown_commands("```bash\nforesay serve \\\n  --port 1\n```\n") == ["foresay serve    --port 1"]


# Environment variables


def constants(trees: Iterable[ast.Module]) -> dict[str, set[str]]:
    """Module-level constants with a string value, by name."""
    out: dict[str, set[str]] = {}
    for tree in trees:
        for node in tree.body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        out.setdefault(target.id, set()).add(node.value.value)
    return out


def is_environ(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "environ"


def is_read(function: ast.expr) -> bool:
    """True for os.getenv, and for methods of os.environ that take a name."""
    if not isinstance(function, ast.Attribute):
        return False
    methods = ("get", "pop", "setdefault")
    return function.attr == "getenv" or (function.attr in methods and is_environ(function.value))


def read_variables(tree: ast.Module, known: Mapping[str, set[str]]) -> set[str]:
    """Names that a module reads from the environment, and the prefixes of options that are also variables."""
    keys: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and is_environ(node.value):
            keys.append(node.slice)
        elif isinstance(node, ast.Compare) and any(map(is_environ, node.comparators)):
            keys.append(node.left)
        elif isinstance(node, ast.Call) and node.args and is_read(node.func):
            keys.append(node.args[0])
        if isinstance(node, ast.keyword) and node.arg in ("variables", "envvar"):
            keys.append(node.value)
    out: set[str] = set()
    for key in keys:
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            out.add(key.value)
        elif isinstance(key, ast.Name | ast.Attribute):
            out |= known.get(key.id if isinstance(key, ast.Name) else key.attr, set())
    return {name for name in out if re.fullmatch(r"[A-Z][A-Z0-9_]*", name)}


def undocumented_variables(sources: Mapping[str, str], text: str) -> set[str]:
    trees = [ast.parse(source) for source in sources.values()]
    known = constants(trees)
    found = set().union(*(read_variables(tree, known) for tree in trees))
    for source in sources.values():
        found |= set(re.findall(r"['\"](FORESAY_[A-Z_]+[A-Z])['\"]", source))
    return {name for name in found if not re.search(rf"`{name}(?:_|=\d)?`", text)}


def test_every_environment_variable_is_in_the_reference() -> None:
    sources = {path.as_posix(): path.read_text(encoding="utf-8") for path in SOURCES}
    native = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.cpp"))
    assert "getenv" not in native
    assert undocumented_variables(sources, page("reference/environment.md")) == set()
    assert undocumented_variables(sources, "") >= {
        "FORESAY_CACHE",
        "FORESAY_SERVE",
        "FORESAY_KERNELS",
        "CXX",
        "WORLD_SIZE",
    }


def test_undocumented_variables_are_found() -> None:
    source = 'import os\nSWITCH = "NEW_SWITCH"\na = os.environ.get("ONE"), os.environ[SWITCH], "THREE" in os.environ\n'
    assert undocumented_variables({"a": source}, "`ONE`") == {"NEW_SWITCH", "THREE"}


def test_documented_variables_exist() -> None:
    text = page("reference/environment.md")
    code = "".join(path.read_text(encoding="utf-8") for path in [*SOURCES, *(ROOT / "tests").rglob("*.py")])
    assert [name for name in re.findall(r"`(FORESAY_[A-Z]+)`", text) if f'"{name}"' not in code] == []


# Public names


def undocumented_names(text: str) -> list[str]:
    given = set(re.findall(r"^::: foresay\.(\w+)$", text, re.MULTILINE)) | {"__version__"}
    return [name for name in foresay.__all__ if name not in given]


def test_every_public_name_is_in_the_reference() -> None:
    text = page("reference/api.md")
    assert undocumented_names(text) == [] and "foresay.__version__" in text
    assert undocumented_names(text.replace("::: foresay.Step\n", "")) == ["Step"], "negative control"


OURS = ("foresay", "foresay_lab")


def private_names(code: str) -> list[str]:
    """Names in a block of Python that come from foresay and are not public."""
    tree, out = ast.parse(code), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            out += [name for name in names if node.module != "foresay" or name.partition(".")[2] not in foresay.__all__]
        elif isinstance(node, ast.Import):
            out += [alias.name for alias in node.names if alias.name.startswith(("foresay.", "foresay_lab"))]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "foresay":
            out += [f"foresay.{node.attr}"] if node.attr not in foresay.__all__ else []
    return out


def shown_python() -> dict[str, str]:
    """Every block of Python in the pages, and the examples."""
    out = {path.name: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").glob("*.py"))}
    cells = json.loads((ROOT / "examples" / "traces.ipynb").read_text(encoding="utf-8"))["cells"]
    out["traces.ipynb"] = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    for path, text in texts().items():
        for i, block in enumerate(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)):
            out[f"{path.relative_to(ROOT)}, block {i + 1}"] = block
    return out


def test_shown_code_uses_public_names_only() -> None:
    shown = shown_python()
    assert len(shown) > 30
    assert {where: found for where, code in shown.items() if (found := private_names(code))} == {}


def test_private_names_are_found() -> None:
    code = "import foresay_lab\nfrom foresay import Row, Recording\nfrom foresay_lab.tune import x\nforesay.Foo()"
    assert private_names(code) == ["foresay_lab", "foresay.Recording", "foresay_lab.tune.x", "foresay.Foo"]


# Fields, settings, expressions, errors


def model_fields(kind: type[BaseModel]) -> set[str]:
    return {field.alias or name for name, field in kind.model_fields.items()}


OPENAI_KINDS: tuple[type[Fields], ...] = (
    requests.ChatRequest,
    requests.CompletionRequest,
    requests.ChatMessage,
    option_fields.TextPart,
    option_fields.StreamOptions,
    option_fields.Drafting,
    output_fields.NamedSchema,
    output_fields.ResponseFormat,
    output_fields.StructuredOutputs,
    requests.PredictRequest,
    requests.TokenizeRequest,
    requests.DetokenizeRequest,
    ResponsesRequest,
    MessagesRequest,
)
OLLAMA_KINDS: tuple[type[Fields], ...] = (
    ollama_fields.OllamaChatRequest,
    ollama_fields.OllamaGenerateRequest,
    ollama_fields.OllamaEmbedRequest,
    ollama_fields.OllamaMessage,
    ollama_fields.Options,
    ollama_fields.ShowRequest,
)


def undocumented_fields(text: str, kinds: tuple[type[Fields], ...]) -> set[str]:
    """Fields, hints and accepted values of requests that a page does not name in backticks."""
    names = set().union(*(model_fields(kind) for kind in kinds))
    hints = {name.rpartition(".")[2] for kind in kinds for name in kind.hints.values()}
    neutral = [(name, value) for kind in kinds for name, values in kind.neutral.items() for value in values]
    missing = {name for name in names | hints if f"`{name}`" not in text}
    return missing | {
        name
        for name, value in neutral
        if not re.search(
            rf"`{name}`.*" + (r"\| any" if value is ANYTHING else f"`{re.escape(json.dumps(value))}`"), text
        )
    }


def test_every_field_of_requests_is_in_the_reference() -> None:
    text = re.sub(r"(?<!\|)\n(?=\w|`)", " ", page("reference/server.md"))  # a sentence may span lines
    assert undocumented_fields(text, OPENAI_KINDS) == set()
    assert undocumented_fields(text.replace("`min_p`", ""), OPENAI_KINDS) == {"min_p"}, "negative control"
    assert undocumented_fields(re.sub(r"`tfs_z`", "", text), OPENAI_KINDS) == {"tfs_z"}, "negative control"


def test_every_field_of_ollamas_api_is_in_the_reference() -> None:
    text = page("reference/ollama.md")
    assert undocumented_fields(text, OLLAMA_KINDS) == set()
    assert undocumented_fields(text.replace("`num_ctx`", ""), OLLAMA_KINDS) == {"num_ctx"}, "negative control"


def test_every_field_of_embeddings_is_in_the_reference() -> None:
    text = page("reference/embeddings.md")
    assert undocumented_fields(text, (EmbeddingRequest,)) == set()
    assert undocumented_fields(text.replace("`pooling`", ""), (EmbeddingRequest,)) == {"pooling"}, "negative control"


def routes() -> set[str]:
    return set(re.findall(r'@app\.(?:get|post)\("([^"]+)"\)', (ROOT / "src/foresay/server/app.py").read_text("utf-8")))


def test_every_route_is_in_the_reference() -> None:
    text = page("reference/server.md").replace("{name}", "{name:path}")
    assert len(routes()) >= 9
    assert [route for route in routes() if f" {route}`" not in text] == []


def test_every_key_of_the_settings_file_is_in_the_reference() -> None:
    keys = {field.name for field in dataclasses.fields(Settings)} | {"measured"}
    assert set(re.findall(r"^\| `(\w+)` \|", page("reference/settings-file.md"), re.MULTILINE)) == keys


def test_every_method_is_in_the_reference() -> None:
    from foresay.decoding.acceptance import RULES
    from foresay.lengths import LENGTHS

    text = page("reference/expressions.md")
    assert [name for name in (*DRAFTERS, *RULES, *LENGTHS) if not re.search(rf"`{name}[`(]", text)] == []


def test_every_error_is_in_the_reference() -> None:
    tree = ast.parse((ROOT / "src/foresay/errors.py").read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    text = page("reference/errors.md")
    assert names and [name for name in names if f"| `{name}` |" not in text] == []


# Size


def test_pages_are_short() -> None:
    long = {p.name: n for p, text in texts().items() if DOCS in p.parents and (n := text.count("\n")) > 250}
    assert set(long) == {"cli.md"}, "the generated page alone"
