"""Tables, plots and HTML pages about run directories."""
