"""`python -m foresay.models.cpu FOLDER [NAME ...]`: compile the kernels for named instruction sets, for $FORESAY_KERNELS.

Without names, for all of this kind of machine. PyTorch is not needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

from foresay.models.cpu.build import BuildError, precompile

if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    try:
        for path in precompile(Path(sys.argv[1]), sys.argv[2:]):
            sys.stdout.write(f"{path}\n")
    except (BuildError, OSError) as error:
        sys.exit(str(error))
