"""Allowed imports: DESIGN.md's order, read off the sources."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Collection, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import foresay
from helpers.sources import imports

SOURCE = Path(foresay.__file__).parent
ORDER = {
    "": (
        "errors < checks files json_files tensor_files threads distributed version < decoding < lengths text engine < "
        "models < drafters < spec < generation < records < integrations server < cli < __main__ < foresay_lab"
    ),
    "decoding": (
        "sampling_params devices outcome sums state capabilities clock < randomness proposal residuals "
        "sampling_kernels < sampling_rows rows proposal_checks kernels < penalties truncation < processors < distributions < "
        "stopping passes < draws protocols chains < trees ahead < prefill < acceptance < step"
    ),
    "engine": "row_moves prefixes request_keys stats guard admission < chunked_prefill < loop",
    "models": (
        "vocabulary table recording cache layer levels < cpu families < hardware < gpu < huggingface < gguf drafts llama_cpp "
        "< sources"
    ),
    "models/cache": "memory snapshots < stores < slot_cache < recurrent_cache state_cache",
    "models/cpu": (
        "structs library_files rounding levels low_bits < build flat_tokens < product __main__ < mixers < layers < chain"
    ),
    "models/families": (
        "stated orders < family < positions < llama qwen gemma olmo < experts granite lfm2 delta < table"
    ),
    "models/gpu": (
        "overlap registers capture growth < attention product < pages rows blocks < flat experts"
        " < layers < passes < chains < trees"
    ),
    "models/llama_cpp": "binding < cache < model",
    "models/drafts": (
        "fields layers < config < block_config parallel_config < base path < block_module blocks < "
        "head block mtp assistant < parallel_head < kinds < files"
    ),
    "models/huggingface": (
        "config_sizes left_out paged_chains < attention < operations < frozen < experts < joined < linears < "
        "layer_inputs updates < family_layers < model fused < causal selective_scan < seq2seq states < recurrent < early_exit "
        "self_check"
    ),
    "models/gguf": (
        "header pre_tokenizers < values names < keys vocabulary < tokenizer types positions < configs < packed < "
        "shapes < blocks < mtp"
    ),
    "models/sources": (
        "load_options transformers_errors generation_settings gguf_drafts published quantized_facts < kept_weights "
        "quantization base_models < quantized_forms < packaged config_checks llama_cpp hub mxfp4 multimodal < "
        "quantized_layers < lora wrapping describing < source by_transformers < folder gguf_file < location < "
        "loading assistants < drafts < catalogue"
    ),
    "foresay_lab/training": (
        "corpus importance losses outputs checkpoints accepted optimisers processes < ngrams prune teacher acceptance "
        "< batches < students < evaluation new_drafts < fitting < curves distil"
    ),
    "text": (
        "tokenizer text_files formatting grammar_library template_trial reasoning < gbnf_terminals < client_grammars "
        "excess stream cross_tokenizer grammar tool_calls < chat_messages control_tokens thinking_budget "
        "grammar_process < prompts < schema_compiler"
    ),
    "spec": "expressions settings_file < recipe < third_party ngram_recipes < recipes < remembering",
    "generation": "result scoring kept_prompts < session < session_thread < generator < load < method",
    "server": (
        "hints chat_page residency < errors acceptance settings < metrics queues < fields logprobs guards connections "
        "< option_fields output_fields < requests < events drafting_choice < formats shared < served < service < "
        "message_kind < generating < embedding < adapters < app < running"
    ),
    "foresay_lab/workers": "pool < jobs work < processes ray",
    "foresay_lab": "data training < measure < replay check < bench < report candidates < tune workers < worth < commands",
}
"""The packages, and the modules of a package, the lowest first; those between two `<` do not import each other.

Packages that are not listed only have to be free of cycles.
"""
LAB = "foresay_lab/"
FILES = dict.fromkeys(
    path.relative_to(base).as_posix()
    for base, folder in ((SOURCE, SOURCE), (SOURCE.parent, SOURCE.parent / LAB))
    for path in sorted(folder.rglob("*.py"))
)
"""Paths inside `foresay`, and those of `foresay_lab` with its name."""

PUBLIC = (
    "Capabilities Chunk ConfigError ConstantLength ContextLengthError Distributions Drafter Engine FinishReason "
    "ForesayError Generation Generator KVCache LanguageModel LengthPolicy Logits ModelInput ModelLoadError "
    "ModelNotFoundError ModelOutput NgramDrafter OutOfMemoryError Proposal ProposalBuilder QueueFullError RequestError "
    "Row Rows Rule RuleNeeds SamplingParams Session SessionThread Speculative Stateless Stats Step Stopping "
    "StoppingRule TableModel UnsupportedModelError Verification VocabularyMismatchError __version__ change generate "
    "load"
)


@cache
def ranks(room: str) -> dict[str, int]:
    layers = [layer.split() for layer in ORDER[room].split("<")]
    found = {name: rank for rank, names in enumerate(layers) for name in names}
    assert len(found) == sum(map(len, layers)), f"{room} has a name twice"
    return found


def part(file: str, room: str) -> str | None:
    """The module or package of a room that a file is in; None for a file elsewhere, and for the room's own `__init__`."""
    prefix = f"{room}/" if room else ""
    if not file.startswith(prefix) or file == f"{prefix}__init__.py":
        return None
    return file.removeprefix(prefix).split("/", 1)[0].removesuffix(".py")


def text_of(file: str) -> str:
    return ((SOURCE.parent if file.startswith(LAB) else SOURCE) / file).read_text()


def imported(file: str) -> set[str]:
    package = ".".join([*([] if file.startswith(LAB) else ["foresay"]), *file.split("/")[:-1]])
    return imports(text_of(file), package)


def file_of(name: str, files: Collection[str]) -> str | None:
    """The file that a full name lies in, or None for names from outside and for `from foresay import __version__`."""
    parts = name.split(".")
    if parts[0] not in ("foresay", "foresay_lab"):
        return None
    stems = ["/".join(parts[parts[0] == "foresay" : count]) for count in range(len(parts), 1, -1)]
    return next((file for stem in stems for file in (f"{stem}.py", f"{stem}/__init__.py") if file in files), None)


@cache
def graph() -> dict[str, frozenset[str]]:
    """file -> the files it imports. `foresay/__init__.py` imports lazily and is imported by no file."""
    found = {file: {file_of(name, FILES) for name in imported(file)} for file in FILES if file != "__init__.py"}
    return {file: frozenset(f for f in used if f and f != file) for file, used in found.items()}


def circle(edges: Mapping[str, Collection[str]]) -> list[str]:
    """Some circle of a graph, or an empty list."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def upward(file: str, used: Collection[str]) -> list[str]:
    """Each import of a file that leads to the same layer or a higher one, between packages or inside one."""
    found = set()
    for room in ORDER:
        mine = part(file, room)
        for other in used if mine else ():
            theirs = part(other, room)
            if mine and theirs and theirs != mine and ranks(room)[theirs] >= ranks(room)[mine]:
                found.add(f"{file} imports {other}")
    return sorted(found)


def test_every_file_has_a_place() -> None:
    places = [(file, room, part(file, room)) for file in FILES for room in ORDER]
    lost = [(file, room) for file, room, name in places if name and name not in ranks(room)]
    assert not lost, f"{lost} are in no layer; DESIGN.md has the parts"


def test_imports_go_down() -> None:
    assert [one for file, used in graph().items() for one in upward(file, used)] == []


@pytest.mark.parametrize(
    ("file", "used", "wrong"),
    [
        ("decoding/step.py", "engine/loop.py cli/app.py decoding/acceptance.py", "cli/app.py engine/loop.py"),
        ("decoding/acceptance.py", "decoding/step.py", "decoding/step.py"),
        ("server/app.py", "server/running.py cli/app.py", "cli/app.py server/running.py"),
        ("cli/demo.py", "foresay_lab/report/table.py", "foresay_lab/report/table.py"),
        ("foresay_lab/data/items.py", "foresay_lab/commands/tune.py cli/tables.py", "foresay_lab/commands/tune.py"),
    ],
)
def test_an_upward_import_is_seen(file: str, used: str, wrong: str) -> None:
    """Negative control."""
    assert upward(file, used.split()) == [f"{file} imports {one}" for one in wrong.split()]


def test_foresay_does_not_name_its_lab() -> None:
    """Entry points alone lead to it, so that no module is imported by a name in a text either."""
    assert [file for file in FILES if not file.startswith(LAB) and "foresay_lab" in text_of(file)] == []
    assert file_of("foresay_lab.data.items.PromptItem", FILES) == "foresay_lab/data/items.py", "negative control"


def test_there_is_no_circle() -> None:
    """Control: after TYPE_CHECKING, or inside a function, an import counts like any other."""
    assert circle(graph()) == []
    hidden = {
        "a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from foresay.b import f\n",
        "b.py": "def f():\n    import foresay.c\n",
        "c.py": "from foresay.a import x\n",
    }
    edges = {
        file: {found for name in imports(text, "foresay") if (found := file_of(name, hidden))}
        for file, text in hidden.items()
    }
    assert sorted(set(circle(edges))) == ["a.py", "b.py", "c.py"]
    assert circle({**edges, "c.py": set()}) == []


LOW = [file for file in FILES if ranks("").get(part(file, "") or "", 0) <= ranks("")["engine"]]


def prints(source: str) -> bool:
    calls = [node for node in ast.walk(ast.parse(source if "print(" in source else "")) if isinstance(node, ast.Call)]
    return any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls)


def test_up_to_the_engine_nothing_imports_transformers_or_prints() -> None:
    def uses(file: str) -> bool:
        return any(name.split(".")[0] == "transformers" for name in imported(file))

    assert [file for file in LOW if uses(file) or prints(text_of(file))] == []
    assert uses("models/huggingface/causal.py"), "control"
    assert prints("def f():\n    print(1)") and not prints("console.print(1)\nprint"), "control"


def test_the_reader_sees_every_import() -> None:
    source = (
        "import a\nfrom b.c import d\nfrom . import e\nfrom ..f import g\nif TYPE_CHECKING:\n    import h\n"
        "else:\n    import i\ntry:\n    import j\nexcept ImportError:\n    pass\ndef k():\n    import l\n"
        "class M:\n    import n\n"
    )
    wanted = {"a", "b.c.d", "foresay.models.e", "foresay.f.g", "i", "j", "n", "h", "l"}
    assert imports(source, "foresay.models") == wanted
    assert graph()["decoding/step.py"] >= {"decoding/distributions.py", "decoding/protocols.py"}


FIRST = "import foresay; foresay.__all__; dir(foresay); foresay.__version__"
ENGINE = "from foresay import Engine, NgramDrafter, Speculative, TableModel, SamplingParams; import foresay.drafters"


@pytest.mark.parametrize(
    ("statement", "there", "absent"),
    [
        (FIRST, "foresay", {"torch", "transformers", "fastapi", "numpy", "typer", "rich"}),
        (ENGINE, "torch", {"transformers", "tokenizers", "fastapi", "typer"}),
    ],
    ids=["foresay", "its engine"],
)
def test_an_import_loads_nothing_heavy(statement: str, there: str, absent: set[str]) -> None:
    """In a fresh interpreter."""
    code = f"import sys\n{statement}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(out.stdout.split())
    assert there in loaded and not loaded & absent


def test_public_names_are_pinned_and_resolve() -> None:
    assert foresay.__all__ == dir(foresay) == PUBLIC.split() and foresay.__version__
    for name in set(foresay.__all__) - {"__version__"}:
        value = getattr(foresay, name)
        assert value.__name__ == name and value.__module__.startswith("foresay."), name
    with pytest.raises(AttributeError, match="module 'foresay' has no attribute 'nonsense'"):
        foresay.nonsense  # noqa: B018
