"""Who may import whom: DESIGN.md's order, read off the sources."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import foresay

SOURCE = Path(foresay.__file__).parent
LAYERS = [
    {"errors"},
    {"checks", "files", "json_files", "tensor_files", "threads", "ranks", "children"},
    {"decoding"},
    {"lengths", "text", "engine"},
    {"models"},
    {"drafters"},
    {"methods"},
    {"generation"},
    {"records"},
    {"training"},
    {"integrations", "server", "lab"},
    {"workers"},
    {"cli"},
    {"__main__"},
]
"""The rooms of the house, from the ground up; rooms of one floor do not know each other."""
INSIDE = {
    "decoding": [
        {"sampling_params", "randomness", "outcome", "proposal", "residuals"},
        {"rows", "proposal_checks"},
        {"processors", "truncation"},
        {"laws"},
        {"draws", "protocols"},
        {"trees", "prefill"},
        {"acceptance"},
        {"step"},
    ],
    "engine": [{"row_moves", "prefixes", "stats", "guard"}, {"filling"}, {"loop"}],
    "models": [{"vocabulary", "table", "recording"}, {"huggingface"}, {"heads", "llama_cpp"}, {"sources"}],
    "models/llama_cpp": [{"binding", "probe"}, {"context"}, {"cache"}, {"model"}],
    "models/heads": [{"config"}, {"module"}, {"files"}, {"model"}],
    "models/huggingface": [
        {"config_sizes", "gated_layer", "memory", "rounding"},
        {"stores"},
        {"slot_cache"},
        {"attention"},
        {"operations"},
        {"native"},
        {"products"},
        {"linears"},
        {"model", "lean", "graphs"},
        {"causal"},
        {"seq2seq"},
        {"early_exit", "self_check"},
    ],
    "models/huggingface/native": [
        {"structs", "trust", "levels"},
        {"build"},
        {"product", "__main__"},
        {"in_place"},
        {"layers"},
    ],
    "models/sources": [
        {"load_options", "transformers_errors", "gguf_head"},
        {"gguf_values", "config_checks"},
        {"gguf_texts", "gguf_types", "gguf_positions", "packaged", "llama_cpp"},
        {"gguf_shapes"},
        {"gguf_blocks"},
        {"catalog"},
        {"resolve"},
        {"heads"},
    ],
    "training": [
        {"corpus", "importance", "losses", "outputs", "checkpoints", "accepted", "optimisers", "processes"},
        {"ngrams", "prune", "teacher", "acceptance"},
        {"batches"},
        {"students"},
        {"evaluation"},
        {"fitting"},
        {"curves", "distil"},
    ],
    "text": [
        {"tokenizer", "text_files", "wording", "grammar_library"},
        {"prompts", "stream", "cross_tokenizer", "grammar", "grammar_child"},
        {"grammar_trials"},
    ],
    "methods": [{"expressions", "settings_file"}, {"recipe"}, {"recipes"}],
    "generation": [{"result", "scoring"}, {"session"}, {"session_thread"}, {"generator"}, {"load"}, {"method"}],
    "server": [
        {"errors", "metrics", "settings"},
        {"fields", "logprobs", "guards", "connections"},
        {"requests"},
        {"answers", "ways"},
        {"service"},
        {"writing"},
        {"app"},
        {"running"},
    ],
    "workers": [{"messages"}, {"jobs", "pool"}, {"child", "local", "recording", "benching", "ray"}],
    "lab": [{"data"}, {"measure"}, {"replay"}, {"bench"}, {"report"}, {"tune"}],
}
"""The order of files inside a room; rooms that are not named here have no circle, and no more is asked of them."""
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
MAY_IMPORT_TRANSFORMERS = {
    *(f"models/huggingface/{name}.py" for name in ("causal", "seq2seq", "attention")),
    *(
        f"models/sources/{name}.py"
        for name in ("catalog", "packaged", "transformers_errors", "gguf_blocks", "gguf_texts")
    ),
    "training/prune.py",
    "models/heads/module.py",
}
FILES = sorted(path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py"))
FILE = pytest.mark.parametrize("file", FILES)

PUBLIC = [
    "Begun",
    "Block",
    "Capabilities",
    "Cascade",
    "Chunk",
    "ConfidenceLength",
    "ConfigError",
    "ConstantLength",
    "ContextLengthError",
    "Coupled",
    "DraftStep",
    "Drafter",
    "Engine",
    "EntropyLength",
    "Feed",
    "FinishReason",
    "ForesayError",
    "Generation",
    "Generator",
    "HeuristicLength",
    "KVCache",
    "LanguageModel",
    "Laws",
    "LengthPolicy",
    "Lenience",
    "Logits",
    "LookupDrafter",
    "Match",
    "MaxGram",
    "ModelDrafter",
    "ModelLoadError",
    "ModelNotFoundError",
    "ModelOutput",
    "ModelTreeDrafter",
    "NgramStore",
    "NgramStoreDrafter",
    "NgramTable",
    "Observer",
    "Origin",
    "OutOfMemoryError",
    "PastRequests",
    "PromptError",
    "PromptLookup",
    "Proposal",
    "ProposalBuilder",
    "QueueFullError",
    "RequestError",
    "Row",
    "Rows",
    "Rule",
    "RuleNeeds",
    "SamplingParams",
    "SelfDrafter",
    "Session",
    "SessionThread",
    "Speculative",
    "Stateless",
    "Stats",
    "Step",
    "Streams",
    "SuffixDrafter",
    "SuffixTreeDrafter",
    "TableModel",
    "ThroughputLength",
    "Tokenizer",
    "Typical",
    "UnknownNameError",
    "UnsupportedModelError",
    "Verdict",
    "VocabularyMismatchError",
    "__version__",
    "build_laws",
    "change",
    "generate",
    "load",
]


def home(file: str) -> str:
    """The room a file belongs to: `models/table.py` -> models, `errors.py` -> errors."""
    return file.split("/", 1)[0].removesuffix(".py")


def imports(tree: ast.AST, package: str) -> set[str]:
    """Full names of all that a module imports, inside functions and under TYPE_CHECKING too."""
    out: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            out |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = package.rsplit(".", node.level - 1)[0] if node.level else ""
            base = ".".join(part for part in (parent, node.module) if part)
            out |= {f"{base}.{alias.name}" for alias in node.names}
    return out


def imported(file: str) -> set[str]:
    package = ".".join(["foresay", *file.split("/")[:-1]])
    return imports(ast.parse((SOURCE / file).read_text()), package)


def file_of(name: str, files: Collection[str]) -> str | None:
    """The file that a full name lies in, or None for names from outside and for `from foresay import __version__`."""
    parts = name.split(".")
    if parts[0] != "foresay":
        return None
    for count in range(len(parts), 1, -1):
        stem = "/".join(parts[1:count])
        for file in (f"{stem}.py", f"{stem}/__init__.py"):
            if file in files:
                return file
    return None


@cache
def graph() -> dict[str, frozenset[str]]:
    """file -> the files it imports. `foresay/__init__.py` imports lazily and is imported by nobody."""
    found = {file: {file_of(name, FILES) for name in imported(file)} for file in FILES if file != "__init__.py"}
    return {file: frozenset(f for f in used if f and f != file) for file, used in found.items()}


def circle(edges: Mapping[str, Collection[str]]) -> list[str]:
    """Some circle of a graph, or an empty list."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def place(file: str, room: str) -> int | None:
    """Where a file stands inside a room; None for a file elsewhere, and for the room's own `__init__`."""
    if not file.startswith(f"{room}/") or file == f"{room}/__init__.py":
        return None
    name = file.removeprefix(f"{room}/").split("/", 1)[0].removesuffix(".py")
    ranks = [rank for rank, names in enumerate(INSIDE[room]) if name in names]
    assert len(ranks) == 1, f"{file} has no place inside {room}; see INSIDE"
    return ranks[0]


@FILE
def test_every_file_has_a_place(file: str) -> None:
    assert file == "__init__.py" or home(file) in RANK, f"{file} is in no layer; DESIGN.md says where parts belong"


@pytest.mark.parametrize("file", [file for file in FILES if file != "__init__.py"])
def test_imports_go_down(file: str) -> None:
    """Rooms import lower rooms, and a room's files the files before them."""
    own = home(file)
    higher = {f for f in graph()[file] if home(f) != own and RANK[home(f)] >= RANK[own]}
    assert not higher, f"{file} imports {sorted(higher)}, which DESIGN.md puts beside or above {own}"
    for room in INSIDE:
        mine = place(file, room)
        if mine is None:
            continue
        for other in graph()[file]:
            theirs = place(other, room)
            beside = INSIDE[room][mine] if theirs == mine else set()
            inside_one = (
                len(beside) > 0 and other.split("/")[room.count("/") + 1] == file.split("/")[room.count("/") + 1]
            )
            assert theirs is None or theirs < mine or inside_one, (
                f"{file} imports {other}, which stands beside or above it"
            )


def test_there_is_no_circle() -> None:
    assert circle(graph()) == []
    rooms: dict[str, set[str]] = {}
    for file, used in graph().items():
        rooms.setdefault(home(file), set()).update(home(f) for f in used if home(f) != home(file))
    assert circle(rooms) == []


def test_a_circle_is_seen(tmp_path: Path) -> None:
    """Negative control: behind TYPE_CHECKING, or inside a function, an import counts like any other."""
    hidden = {
        "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from foresay.b import f\n",
        "b.py": "def f():\n    import foresay.c\n",
        "c.py": "from foresay.a import x\n",
    }
    edges = {
        file: {found for name in imports(ast.parse(text), "foresay") if (found := file_of(name, hidden))}
        for file, text in hidden.items()
    }
    assert sorted(set(circle(edges))) == ["a.py", "b.py", "c.py"]
    assert circle({**edges, "c.py": set()}) == []


@FILE
def test_up_to_the_engine_nothing_imports_transformers(file: str) -> None:
    if file != "__init__.py" and RANK[home(file)] > RANK["engine"]:
        return
    used = {name.split(".")[0] for name in imported(file)}
    assert "transformers" not in used or file in MAY_IMPORT_TRANSFORMERS


@FILE
def test_up_to_the_engine_nothing_prints(file: str) -> None:
    if file != "__init__.py" and RANK[home(file)] > RANK["engine"]:
        return
    calls = [node for node in ast.walk(ast.parse((SOURCE / file).read_text())) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]


def test_the_reader_sees_every_import() -> None:
    source = (
        "import a\nfrom b.c import d\nfrom . import e\nfrom ..f import g\nif TYPE_CHECKING:\n    import h\n"
        "else:\n    import i\ntry:\n    import j\nexcept ImportError:\n    pass\ndef k():\n    import l\n"
        "class M:\n    import n\n"
    )
    tree = ast.parse(source)
    assert imports(tree, "foresay.models") == {
        *("a", "b.c.d", "foresay.models.e", "foresay.f.g", "i", "j", "n", "h", "l")
    }


def test_the_search_finds_the_sources() -> None:
    assert {"decoding/step.py", "models/huggingface/causal.py", "engine/loop.py", "cli/app.py"} <= set(FILES)
    assert "transformers" in {name.split(".")[0] for name in imported("models/huggingface/causal.py")}
    assert graph()["decoding/step.py"] >= {"decoding/laws.py", "decoding/protocols.py"}


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after a statement."""
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted({{name.split('.')[0] for name in sys.modules}})))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(out.stdout))


def test_importing_foresay_loads_nothing_heavy() -> None:
    loaded = loaded_by("import foresay; foresay.__all__; dir(foresay); foresay.__version__")
    assert "foresay" in loaded
    assert not loaded & {"torch", "transformers", "fastapi", "numpy", "typer", "rich"}


def test_the_engine_loads_no_transformers() -> None:
    loaded = loaded_by("from foresay import Engine, ModelDrafter, PromptLookup, TableModel, SamplingParams")
    assert "torch" in loaded
    assert not loaded & {"transformers", "tokenizers", "fastapi", "typer"}


def test_public_names_are_pinned() -> None:
    assert foresay.__all__ == PUBLIC
    assert dir(foresay) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_resolves(name: str) -> None:
    value = getattr(foresay, name)
    assert value is not None
    if name != "__version__":
        assert value.__name__ == name
        assert value.__module__.startswith("foresay.")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'foresay' has no attribute 'nonsense'"):
        foresay.nonsense  # noqa: B018
