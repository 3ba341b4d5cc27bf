"""Tables, plots and pages; they read run directories only."""
