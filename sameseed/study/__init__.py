"""Measuring: a workload, several ways to decode it that take turns, a record of each, a table of records."""
