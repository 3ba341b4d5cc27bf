"""Tables, claims and pages about experiments."""
