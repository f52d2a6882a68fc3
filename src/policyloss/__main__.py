"""`python -m policyloss` is the `policyloss` command."""

import sys

from policyloss.cli import main

if __name__ == "__main__":
    sys.exit(main())
