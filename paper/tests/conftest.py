"""What tests share, with those of the library."""

pytest_plugins = ["common_fixtures", "faults.recording"]
