"""`python -m simulator.paper`."""

import sys

from .app import main

sys.exit(main(sys.argv[1:]))
