"""`python -m pelton.cli`: as `python -m pelton`."""

from pelton.cli.main import main

raise SystemExit(main())
