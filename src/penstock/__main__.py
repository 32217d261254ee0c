"""``python -m penstock``: the ``penstock`` command."""

import sys

from penstock.cli import main

sys.exit(main())
