"""How results are shown: tables for a terminal, plots, and HTML pages; one of each for all commands."""
