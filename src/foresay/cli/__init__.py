"""The command line: one file per command, thin over the library.

Exit codes: 0 done, 1 outputs differ under an exact rule, 2 wrong input (one line on stderr), 130 interrupted, 141 closed pipe.
"""

from foresay.cli.app import main

__all__ = ["main"]
