"""Published studies, one per file, each a `STUDY` (_study.py): cells, tables and plots, published figures."""
