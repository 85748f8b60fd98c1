"""`python -m pelton.cli`: the `pelton` program where its script is not on the path."""

import sys

from pelton.cli.main import main

sys.exit(main())
