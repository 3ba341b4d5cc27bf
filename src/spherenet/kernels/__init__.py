"""Fast implementations of the plain formulas in `ops`, and the choice between them (`dispatch.py`)."""
