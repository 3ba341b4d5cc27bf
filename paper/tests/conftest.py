"""What tests share, with those of the library."""

pytest_plugins = ["fixtures", "faults.recording"]
