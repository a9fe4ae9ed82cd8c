"""Documentation is complete and consistent: commands, environment variables, public names, arguments, fields and settings.

Each check is a function from texts to defects. A test asserts that the repository has none, and that a planted defect is
found. Links within docs/ and the navigation are checked by the strict build of the site (tests/integration/test_site_build.py).
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import foresay
from foresay.cli.app import app
from foresay.cli.commands import named
from foresay.decoding.acceptance import RULES
from foresay.lengths import LENGTHS
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
OUTSIDE = [
    ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "examples/README.md")
]
"""Pages that are not in the site, but for the changelog."""


def page(name: str) -> str:
    return (DOCS / name).read_text(encoding="utf-8")


@cache
def texts() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in [*sorted(DOCS.rglob("*.md")), *OUTSIDE]}


# Links and names of files


def broken_links(path: Path, text: str) -> list[str]:
    """Links of a page to files or headings that do not exist."""
    out = []
    for link in re.findall(
        r"\]\((?![a-z]+:)([^)\s]+)\)", re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.M | re.S)
    ):
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        headings = re.findall(r"^#+ (.+)$", (target.read_text("utf-8") if file else text), re.M) if anchor else []
        slugs = [re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", one.strip().lower())) for one in headings]
        if not target.exists() or (anchor and anchor not in slugs):
            out.append(link)
    return out


def test_links_of_pages_outside_of_the_site_resolve() -> None:
    assert [found for path in OUTSIDE if (found := broken_links(path, texts()[path]))] == []
    text = "# One\n[a](missing.md) [b](#two) [c](#one) [d](index.md#nowhere) [e](index.md) [f](https://example.org/x)"
    assert broken_links(DOCS / "glossary.md", text) == ["missing.md", "#two", "index.md#nowhere"], "negative control"


def missing_paths(text: str) -> list[str]:
    """Files of the repository that a text names and that do not exist."""
    sources = r"(?:src|tests|scripts|packages|examples)/[\w/.-]*\w\.(?:py|md|h|cpp|json)\b"
    names = rf"(?<![\w/.-])(?:docs/[\w/-]+\.\w+|benchmarks/[a-z_]+\.py\b|{sources})"
    return [name for name in re.findall(names, text) if not (ROOT / name).exists()]


def test_named_files_exist() -> None:
    """In documents; and documentation files in sources, as error messages name them."""
    benchmarks = [one for one in (ROOT / "benchmarks").iterdir() if one.suffix in (".md", ".py")]
    code = [*SOURCES, *(one for one in (ROOT / "scripts").iterdir() if one.is_file()), *benchmarks]
    found = {path: missing_paths(path.read_text("utf-8")) for path in [*texts(), *code]}
    named_in_code = {
        path: [one for one in found[path] if one.startswith("docs/")] for path in code if path.suffix != ".md"
    }
    assert not {path: missing for path, missing in {**found, **named_in_code}.items() if missing}
    gone = ["tests/distribution/test_loop_law.py", "benchmarks/gone.py", "docs/peers.md"]
    assert missing_paths(f"see `{gone[0]}`, tests/distribution/test_trees.py, {gone[1]} and {gone[2]}") == gone, (
        "control"
    )


# Commands, whose page tests/integration/test_docs.py compares with their help


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
    assert {f"{path.name}: {line}": defects for path, line in lines if (defects := wrong_usage(line))} == {}
    for line, wrong in (
        ("foresay load answers.jsonl", "load"),
        ("foresay tune -m org/name --latencies 40 --force", "tune --latencies"),
        ("foresay distill x.safetensors --kind ngram --orders=3", "distill --orders"),
    ):
        assert wrong_usage(line) == [wrong], "control"
    assert shown_commands("```bash\nforesay serve \\\n  --port 1\n```\n") == ["foresay serve    --port 1"]


# Environment variables

READ = (
    r"""(?:environ(?:\.(?:get|pop|setdefault)\(|\[)|getenv\(|\b(?:variables|envvar)=)\s*["']?([\w.]+)"""
    r"""|["']?([\w.]+)["']? in os\.environ\b"""
)
"""Variables read by name or by a constant, and prefixes of options that are also variables."""


def undocumented_variables(sources: Mapping[str, str], text: str) -> set[str]:
    whole = "\n".join(sources.values())
    constants = dict(re.findall(r"""^(\w+) = ["'](\w+)["']$""", whole, re.MULTILINE))
    found = {name.rpartition(".")[2] for both in re.findall(READ, whole) for name in both}
    found = {constants.get(name, name) for name in found} | set(re.findall(r"['\"](FORESAY_[A-Z_]+[A-Z])['\"]", whole))
    found = {name for name in found if re.fullmatch(r"[A-Z][A-Z0-9_]*", name)}
    return {name for name in found if not re.search(rf"`{name}(?:_|=\d)?`", text)}


def test_every_environment_variable_is_in_the_reference() -> None:
    text, sources = page("reference/environment.md"), {path.name: path.read_text("utf-8") for path in SOURCES}
    native = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.cpp"))
    assert "getenv" not in native and undocumented_variables(sources, text) == set()
    names = {"FORESAY_CACHE", "FORESAY_SERVE", "FORESAY_KERNELS", "CXX", "WORLD_SIZE"}
    assert undocumented_variables(sources, "") >= names, "control"
    source = 'import os\nSWITCH = "NEW_SWITCH"\na = os.environ.get("ONE"), os.environ[SWITCH], "THREE" in os.environ\n'
    assert undocumented_variables({"a": source}, "`ONE`") == {"NEW_SWITCH", "THREE"}, "control"
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


def private_names(code: str) -> list[str]:
    """Names in a block of Python that come from foresay and are not public."""
    tree, out = ast.parse(code), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("foresay", "foresay_lab"):
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
    code = "import foresay_lab\nfrom foresay import Row, Recording\nfrom foresay_lab.tune import x\nforesay.Foo()"
    private = ["foresay_lab", "foresay.Recording", "foresay_lab.tune.x", "foresay.Foo"]
    assert private_names(code) == private, "control"


# Fields, settings, expressions, errors

OPENAI: tuple[type[BaseModel], ...] = (
    *(requests.ChatRequest, requests.CompletionRequest, requests.ChatMessage, requests.PredictRequest),
    *(requests.TokenizeRequest, requests.DetokenizeRequest, ResponsesRequest, MessagesRequest),
    *(option_fields.TextPart, option_fields.StreamOptions, option_fields.Drafting),
    *(output_fields.NamedSchema, output_fields.ResponseFormat, output_fields.StructuredOutputs),
)
OLLAMA: tuple[type[BaseModel], ...] = (
    *(ollama_fields.OllamaChatRequest, ollama_fields.OllamaGenerateRequest, ollama_fields.OllamaEmbedRequest),
    *(ollama_fields.OllamaMessage, ollama_fields.Options, ollama_fields.ShowRequest),
)


def undocumented_fields(text: str, kinds: tuple[type[Fields], ...]) -> set[str]:
    """Fields, hints and accepted values of requests that a page does not name in backticks."""
    names = {field.alias or name for kind in kinds for name, field in kind.model_fields.items()}
    hints = {name.rpartition(".")[2] for kind in kinds for name in kind.hints.values()}
    missing = {name for name in names | hints if f"`{name}`" not in text}
    for kind in kinds:
        for name, values in kind.neutral.items():
            shown = (r"\| any" if value is ANYTHING else f"`{re.escape(json.dumps(value))}`" for value in values)
            missing |= {name} if not all(re.search(f"`{name}`.*{one}", text) for one in shown) else set()
    return missing


@pytest.mark.parametrize(
    ("name", "kinds", "planted"),
    [("server", OPENAI, ["min_p", "tfs_z"]), ("ollama", OLLAMA, ["num_ctx"]), ("embeddings", (EmbeddingRequest,), ["pooling"])],
)  # fmt: skip
def test_every_field_of_requests_is_in_the_reference(
    name: str, kinds: tuple[type[Fields], ...], planted: list[str]
) -> None:
    text = re.sub(r"(?<!\|)\n(?=\w|`)", " ", page(f"reference/{name}.md"))  # a sentence may span lines
    assert undocumented_fields(text, kinds) == set()
    for field in planted:
        assert undocumented_fields(text.replace(f"`{field}`", ""), kinds) == {field}, "negative control"


def test_routes_keys_methods_and_errors_are_in_the_reference() -> None:
    app_source = (ROOT / "src/foresay/server/app.py").read_text("utf-8")
    routes = set(re.findall(r'@app\.(?:get|post)\("([^"]+)"\)', app_source))
    text = page("reference/server.md").replace("{name}", "{name:path}")
    assert len(routes) >= 9 and [route for route in routes if f" {route}`" not in text] == []
    keys = {field.name for field in dataclasses.fields(Settings)} | {"measured"}
    assert set(re.findall(r"^\| `(\w+)` \|", page("reference/settings-file.md"), re.MULTILINE)) == keys
    text = page("reference/expressions.md")
    assert [name for name in (*DRAFTERS, *RULES, *LENGTHS) if not re.search(rf"`{name}[`(]", text)] == []
    names = re.findall(r"^class (\w+)", (ROOT / "src/foresay/errors.py").read_text("utf-8"), re.MULTILINE)
    assert names and [name for name in names if f"| `{name}` |" not in page("reference/errors.md")] == []


# Tables of arguments


@cache
def public_objects() -> dict[str, Any]:
    """Everything that the page shows, by path."""
    paths = re.findall(r"^::: ([\w.]+)\.(\w+)$", page("reference/api.md"), re.MULTILINE)
    return {f"{module}.{name}": getattr(importlib.import_module(module), name) for module, name in paths}


def functions_of(one: Any) -> Iterator[tuple[str, Any]]:
    """The functions of a public object; methods that another public class documents are left out."""
    if not inspect.isclass(one):
        yield one.__name__, one
        return
    bases = [base for base in one.__mro__[1:] if base in public_objects().values()]
    for name, member in vars(one).items():
        function = inspect.unwrap(getattr(member, "__func__", member))
        shown = name == "__init__" or not name.startswith("_")
        written = inspect.isfunction(function) and function.__code__.co_filename == inspect.getsourcefile(one)
        if shown and written and not any(name in vars(base) for base in bases):
            yield f"{one.__name__}.{name}", function


def parameters(function: Any) -> list[str]:
    """Parameters with the stars that a table needs."""
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = inspect.signature(function).parameters.values()
    return [stars.get(one.kind, "") + one.name for one in found if one.name not in ("self", "cls")]


def documented(docstring: str | None) -> list[str]:
    """Names in the table of arguments of a docstring."""
    block = re.search(r"^Args:\n((?:    .*\n|\n)*)", inspect.cleandoc(docstring or "") + "\n", re.MULTILINE)
    return re.findall(r"^    (\*{0,2}\w+): \S", block[1], re.MULTILINE) if block else []


def unexplained_fields(one: type) -> list[str]:
    """Names without underscore that the body of a class sets or annotates without a string after them."""
    [body] = [node.body for node in ast.parse(textwrap.dedent(inspect.getsource(one))).body if hasattr(node, "body")]
    out = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        target = node.target if isinstance(node, ast.AnnAssign) else None
        if isinstance(node, ast.Assign):
            target = node.targets[0]
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(target, ast.Name) and not target.id.startswith("_") and not is_text:
            out.append(target.id)
    return out


def test_every_parameter_and_field_of_public_objects_is_in_a_table() -> None:
    found = [each for one in public_objects().values() for each in functions_of(one)]
    classes = [one for one in public_objects().values() if inspect.isclass(one)]
    assert len(found) > 100 and len(classes) > 40
    wrong = {name: (has, needs) for name, f in found if (has := documented(f.__doc__)) != (needs := parameters(f))}
    assert wrong == {}
    assert {one.__name__: names for one in classes if (names := unexplained_fields(one))} == {}

    @dataclasses.dataclass
    class Broken:
        one: int
        """One."""
        two: int = 2
        three = 3

        def run(self, a: int, *more: int, **rest: int) -> None:
            """Run.

            Args:
                a: The first: a
                    number.
                rest: The others.

            Raises:
                b: Never.
            """

    [(name, run)] = functions_of(Broken)
    assert name == "Broken.run"
    assert parameters(run) == ["a", "*more", "**rest"] and documented(run.__doc__) == ["a", "rest"]
    assert unexplained_fields(Broken) == ["two", "three"]
    assert documented("Run. a: The first.") == [] == documented(None), "control"


def test_pages_are_short() -> None:
    long = {p.name: n for p, text in texts().items() if DOCS in p.parents and (n := text.count("\n")) > 250}
    assert set(long) == {"cli.md"}, "the generated page alone"
