"""`foresay export DRAFT FOLDER`: write a draft head or block drafter in another engine's format, and publish it on the hub."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import click
import torch

from foresay.checks import check_choice
from foresay.cli.command import Given
from foresay.cli.common import load_options, target_name
from foresay.cli.progress import loading
from foresay.errors import ConfigError
from foresay.json_files import parse_object, read_limited
from foresay.models.drafts.base import embeddings_of, target_rows
from foresay.models.drafts.block_config import BlockConfig
from foresay.models.drafts.files import LAYOUTS, WEIGHTS, read_config, write_draft
from foresay.models.drafts.kinds import kind_of
from foresay.models.sources import hub
from foresay.models.sources.drafts import load_draft
from foresay.models.sources.loading import load_model
from foresay.models.sources.location import find
from foresay.models.sources.packaged import packaged_head
from foresay.models.sources.published import LICENSE, REPOSITORY
from foresay.records.results import Results
from foresay_lab.report.card import model_card
from foresay_lab.training.distil import NOTE
from foresay_lab.training.new_drafts import causal

CARD = "README.md"


def run(given: Given) -> int:
    """Run the command."""
    layout, folder = given.layout, given.folder
    check_choice("layout", layout, tuple(LAYOUTS))
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError("exists and is not empty; name another folder", param="folder", value=folder)
    card = _checked_card(given)
    with loading("Loading"):
        target = load_model(target_name(given.model), load_options(given))
        found = load_draft(given.head)
    whole = causal(target)
    width = int(whole.model.config.get_text_config(decoder=True).hidden_size)
    layers = found.config.check_target(whole.vocab_size, width, whole.num_layers, target.name)
    is_block = isinstance(found.config, BlockConfig)
    if is_block and "layout" in given.typed:
        raise ConfigError("is the file format of a head, not of a block drafter; drop it", param="layout", value=layout)
    if given.verifier and (is_block or layout == "plain"):
        raise ConfigError("is for heads in the layout speculators; drop it", param="verifier", value=given.verifier)
    config = dataclasses.replace(
        found.config,
        hidden_layers=layers,
        target=given.verifier or found.config.target or target.name,
        target_architectures=(type(whole.model).__name__,),
    )
    tokens = torch.arange(whole.vocab_size, device=whole.device)
    folder.mkdir(parents=True, exist_ok=True)
    write_draft(
        dataclasses.replace(found, config=config),
        folder,
        layout="plain" if is_block else LAYOUTS[layout],
        lm_head=target_rows(whole, found.token_ids),
        embeddings=embeddings_of(whole, found.config)(tokens) if is_block else None,
    )
    click.echo(folder)
    read = ", ".join(map(str, layers))
    click.echo(f"  reads layers {read} of {config.target}, proposes {config.draft_vocab_size:,} tokens")
    if card is not None:
        text = model_card(
            **card,
            kind=kind_of(read_config(folder)) or config.DRAFTER,
            drafter=f"hybrid(suffix, {config.DRAFTER}({given.push}))",
            layers=layers,
            draft_tokens=config.draft_vocab_size,
            weight_bytes=(folder / WEIGHTS).stat().st_size,
        )
        (folder / CARD).write_text(text, encoding="utf-8")
        click.echo(f"  published for {card['base_model']}: {_pushed(given.push, folder)}")
    return 0


def _checked_card(given: Given) -> dict[str, Any] | None:
    """Return the values of a card that files and options give, before a model is loaded; None without --push.

    Raises ConfigError for a wrong option, a target without a name on the hub, and files that cannot be read.
    """
    if given.push is None:
        if idle := [given.typed[name] for name in ("results", "license") if name in given.typed]:
            raise ConfigError(f"is for the card of --push; add it, or drop {idle[0]}", param=idle[0])
        return None
    for flag, value, pattern, example in (
        ("--push", given.push, REPOSITORY, "org/name"),
        ("--license", given.license, LICENSE, "apache-2.0"),
    ):
        if value is not None and not re.fullmatch(pattern, value):
            raise ConfigError(f"must be a name such as {example}", param=flag, value=value)
    if hub.is_offline():
        raise ConfigError("needs the hub, and HF_HUB_OFFLINE is set; drop one", param="push", value=given.push)
    bases = find(target_name(given.model)).hub_names()
    if not bases:
        raise ConfigError("needs the target's hub id, not {model}", param="push", value=given.push, model=given.model)
    source = packaged_head(given.head) or Path(given.head).expanduser()
    try:
        note = parse_object(read_limited(source / NOTE, 1 << 20), str(source / NOTE))
    except OSError:  # a draft that another program made
        note = {}
    results = None if given.results is None else Results.load(given.results)
    known = {"repo": given.push, "base_model": bases[0], "license": given.license, "note": note, "results": results}
    return {**known, "names": {given.head: given.push}}


def _pushed(repo: str, folder: Path) -> str:
    """Upload the files of a draft and its card, and return their address. Raises ConfigError with the hub's reason."""
    from huggingface_hub import HfApi

    api = HfApi()
    try:
        api.create_repo(repo, exist_ok=True)
        api.upload_folder(
            repo_id=repo,
            folder_path=str(folder),
            allow_patterns=["config.json", WEIGHTS, CARD],
            commit_message="Add a draft made by foresay",
        )
    except Exception as error:  # any exception of the network library
        text = f"failed: the hub did not take it: {error}; the draft is in {str(folder)!r}"
        raise ConfigError(text, param="push", value=repo) from error
    return f"https://huggingface.co/{repo}"
