"""`python -m advisor` is the command."""

from __future__ import annotations

from advisor.cli import main

if __name__ == "__main__":
    main()
