"""`python -m foresay.models.huggingface.native FOLDER`: compile the kernels for named instruction sets, for $FORESAY_KERNELS."""

from __future__ import annotations

import sys
from pathlib import Path

from foresay.models.huggingface.native.build import BuildError, prepare

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        for path in prepare(Path(sys.argv[1])):
            sys.stdout.write(f"{path}\n")
    except BuildError as error:
        sys.exit(str(error))
