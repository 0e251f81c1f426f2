"""`python -m tah2` is the `tah2` command."""

import sys

from tah2.cli import main

if __name__ == "__main__":
    sys.exit(main())
