"""``python -m penstock``: the command."""

import sys

from penstock.cli import main

sys.exit(main())
