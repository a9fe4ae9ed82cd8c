"""`python -m foresay`."""

from foresay.cli import main

if __name__ == "__main__":
    main()
