"""`python -m freetoken` is `ft`."""

import sys

from freetoken.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
