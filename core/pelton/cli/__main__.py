"""`python -m pelton.cli`: as `python -m pelton`."""

import pelton.__main__  # noqa: F401
