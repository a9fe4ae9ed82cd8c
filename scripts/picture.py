"""Write docs/trace.png with rsvg-convert: a real trace, each token coloured by its origin."""

import os
import subprocess

from rich.console import Console
from rich.text import Text

import foresay
from foresay.cli.colours import coloured, legend
from foresay.cli.demo import PROMPTS
from foresay.text.stream import Piece


def spaces_last(pieces: list[Piece]) -> list[Piece]:
    """The same text with each piece's leading spaces moved to the piece before: some renderers drop them."""
    texts = [piece.text for piece in pieces]
    for i in range(1, len(texts)):
        bare = texts[i].lstrip(" ")
        texts[i - 1] += texts[i][: len(texts[i]) - len(bare)]
        texts[i] = bare
    return [Piece(text, piece.origin) for text, piece in zip(texts, pieces, strict=True)]


def main() -> None:
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=100, color_system="standard", highlight=False, markup=False, file=nowhere)
        generator = foresay.load("smollm2-135m")
        console.print(legend(console))
        for prompt in (PROMPTS[0], PROMPTS[3]):
            request = [{"role": "user", "content": prompt}]
            fast = generator.generate(request, max_new_tokens=128)
            assert generator.plain().generate(request, max_new_tokens=128).token_ids == fast.token_ids
            console.print(Text(f"\n> {prompt}\n", style="dim"))
            console.print(coloured(spaces_last(fast.pieces(generator.tokenizer)), console))
            console.print(
                Text(f"\n{fast.stats.num_tokens} tokens in {fast.stats.num_passes} target passes", style="bold")
            )
        svg = console.export_svg(title="foresay demo")
    command = ["rsvg-convert", "-w", "1100", "-o", "docs/trace.png"]
    subprocess.run(command, input=svg.replace("Fira Code", "DejaVu Sans Mono").encode(), check=True)


if __name__ == "__main__":
    main()
