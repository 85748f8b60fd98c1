"""`python -m pelton`: the `pelton` program where its script is not on the path."""

from pelton.cli.main import main

raise SystemExit(main())
