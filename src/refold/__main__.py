"""`python -m refold` is the `refold` command."""

import sys

from refold.cli import main

if __name__ == "__main__":
    sys.exit(main())
