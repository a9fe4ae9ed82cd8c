"""Commands that make drafts: their options and help pages."""

from __future__ import annotations

from pathlib import Path

from foresay.cli import options as opt
from foresay.cli.command import Option, argument, group, option
from foresay_lab.commands import command

APPLIES: dict[str, tuple[str, ...]] = {}
"""Kinds to which an option applies, by its name; all without an entry."""


def _of(kinds: str, *options: Option) -> tuple[Option, ...]:
    APPLIES.update({str(one.name): tuple(kinds.split()) for one in options})
    return options


_BLOCKS = "block dflash2"
_TRAINED = f"head {_BLOCKS} model"
DRAFT = group(
    "Draft",
    option(
        "--kind KIND",
        "head (a draft head), block (a block drafter), dflash2 (one with a candidate selector), model (a draft model), pruned "
        "(one cut out of the target), ngram (a table) or acceptance (an acceptance head).  [default: head; with --draft model]",
    ),
    *_of(
        "model",
        option("--draft MODEL", "The draft model to train, of the same vocabulary."),
        option("--vocabulary FILE", "Restrict a draft model to the most frequent tokens of this n-gram table."),
        option("--all-weights", "Also train a draft model's embeddings and output layer."),
    ),
    *_of(
        f"head {_BLOCKS}",
        option("start --from NAME", "Start from this head or block drafter (folder, hub id or alias), anew scheduled."),
        option("--hidden-layers N,N,N", "Layers of the target whose hidden states are read, such as 2,15,27."),
    ),
    *_of("head", option("--own-output-layer", "Train an output layer for a head, not only its decoder layer.")),
    *_of("head acceptance", option("--draft-steps N", "Tokens drafted in a row.  [default: 5; acceptance 8]")),
    *_of(
        _BLOCKS,
        option("--block-size N", "Tokens that a block drafter drafts in one pass.  [default: 7]"),
        option(
            "--rank N", "Rank of its Markov head or candidate selector, 0 for none.  [default: a ninth of the width]"
        ),
    ),
    *_of(_TRAINED, option("--vocabulary-size N", "Number of tokens that the draft can propose.")),
    *_of(
        f"{_BLOCKS} pruned",
        option("--layers N", "Layers of the draft.  [default: of a block one for every 15 of the target, else all]"),
    ),
    *_of(f"head {_BLOCKS} pruned", option("--feed-forward N", "Feed-forward neurons of each layer.")),
    *_of(
        "pruned",
        option("--keep WHICH", "Choice of layers: first, even, important, or their numbers, such as 0,15,29.", "even"),
        option("--hidden N", "Dimensions of the hidden state to keep."),
        option("--attention-heads N", "Query heads to keep in each layer."),
        option("--kv-heads N", "Key-value heads to keep in each layer."),
    ),
    *_of(
        "acceptance",
        option("--drafter EXPRESSION", "The drafter that an acceptance head is for: model(NAME), head(FOLDER), ..."),
        option("--rejection-weight X", "Weight of rejected tokens in the loss.", 6.0),
    ),
)
DATA = group(
    "Data",
    *_of(
        f"{_TRAINED} acceptance",
        option(
            "--outputs FILE...",
            "A recording of the target (foresay record), or the folder of `foresay serve --memory`; may be repeated.",
        ),
        option("--states FOLDER", "Cache the target's hidden states, or a draft's, here; computed once."),
    ),
    *_of(
        f"{_TRAINED} pruned ngram",
        option(
            "--text TEXT...",
            "Text or .jsonl, also .gz, in place of --outputs: to learn distributions on, to count, or to measure importance "
            "on; '-' is standard input; may be repeated.",
            metavar="FILE",
        ),
    ),
    *_of(
        _TRAINED,
        option("--sequence-length N", "Tokens of a text at most; longer ones are split.", 512),
        option("--held-out X", "Fraction of the texts that is held out for evaluation.", 0.03),
    ),
    *_of("pruned", option("--tokens N", "Tokens to measure importance on.", 16384)),
    *_of(
        "ngram",
        option("--order N", "Longest n-gram, 2 to 5: the context's tokens and the one after it.", 2),
        option("--min-count N", "Drop n-grams that occur less often.", 1),
        option("--max-tokens N", "Stop after N tokens."),
        option(
            "--separator WHAT", "End of a document: file (of a file or record only), also line, or blank-line.", "file"
        ),
        option("--field NAME", "Field of JSON records that has the text; '-' is then JSON lines.  [default: text]"),
    ),
)
TRAINING = group(
    "Training",
    *_of(
        f"{_TRAINED} acceptance",
        option("--epochs X", "Passes over the data.  [default: 1; acceptance 3]"),
        option("--learning-rate X", "Learning rate.", 1e-3),
        option(
            "--batch-tokens N", "Tokens of a batch.  [default: at most 4096, 50 steps in --minutes; acceptance 256]"
        ),
        option("--seed N", "Seed of initial weights and order.", 0),
    ),
    *_of(
        _TRAINED,
        option(
            "--loss LOSS",
            "forward_kl, reverse_kl, tv, ce (block drafters), or a mixture such as forward_kl=0.5,tv=0.5.  "
            "[default: forward_kl; for a block drafter ce=0.1,tv=1.8]",
        ),
        option("--minutes X", "End after X minutes, earlier runs included."),
        option("--accumulate N", "Batches whose gradients make one training step.", 1),
        option("--evaluate-minutes X", "Minutes between evaluations.", 5.0),
        option("--precision DTYPE", "Train in fp32 or bf16.", "fp32"),
        option("--tensorboard", "Also log for TensorBoard."),
    ),
)

DISTILL = command(
    "distill",
    """Train or make a draft: a head, a model, an n-gram table, ...

    A draft head reads the target's hidden states and drafts token by token (EAGLE-3), a block drafter reads them and drafts a
    block in one pass (DSpark; DFlash2 adds convolutions and a candidate selector), and a draft model is a smaller model of the
    same vocabulary. The folder always contains the best draft so far. A later run continues where the last one ended.""",
    argument(
        "OUTPUT", "The folder to write, an n-gram table's file; an interrupted training in it is continued.", Path
    ),
    opt.TARGET,
    _of("pruned ngram", opt.FORCE),
    DRAFT,
    DATA,
    TRAINING,
    group(opt.MACHINE, *_of(f"{_TRAINED} pruned acceptance", opt.DTYPE, opt.DEVICE, opt.THREADS), opt.TRUST),
    examples="""
        foresay distill head -m Qwen/Qwen2.5-0.5B-Instruct --outputs outputs.jsonl --minutes 60
        foresay distill block --kind block --outputs outputs.jsonl --minutes 60 --precision bf16
        foresay distill pruned --kind pruned -m Qwen/Qwen2.5-0.5B-Instruct --layers 8
        foresay distill draft --draft pruned --text corpus.txt
        foresay distill table.safetensors --kind ngram -m Qwen/Qwen2.5-0.5B-Instruct --text corpus.txt --order 3
        foresay distill ends --kind acceptance --drafter 'model(pruned)' --outputs outputs.jsonl""",
)

EXPORT = command(
    "export",
    """Write a draft in another engine's format.

    The layers that the draft shares with its target are included: the output layer, and a block drafter's embeddings. vLLM reads
    both formats of heads: speculators, and plain EAGLE-3, which counts layers from 1. Block drafters are written in the layout of
    DSpark, or of DFlash if they have no Markov head.

    --push uploads the configuration, the weights and a card made from the draft's note (foresay.json) and the results; it takes
    the hub's token from HF_TOKEN or `hf auth login`.""",
    argument("HEAD", "A draft head or block drafter: folder, hub id or alias."),
    argument("FOLDER", "The folder to write.", Path),
    opt.TARGET,
    option("--layout NAME", "File format of a head: speculators or plain.", "speculators"),
    option("--verifier MODEL", "Name of the target in the other engine.  [default: the model]"),
    option("--push NAME", "Then publish the folder on the hub as org/name, with a model card."),
    option("--results FILE", "Results of foresay bench that the card reports; needs --push."),
    option("--license ID", "Licence of the draft for the card, such as apache-2.0; needs --push."),
    opt.DTYPE,
    opt.TRUST,
    examples="""
        foresay export head exported -m Qwen/Qwen2.5-0.5B-Instruct
        foresay export head exported -m Qwen/Qwen2.5-0.5B-Instruct --push org/name --results results.jsonl""",
)

COMMANDS = (DISTILL, EXPORT)
