"""Measuring: workloads, interleaved runs of several ways to decode them, one record for each, tables of records."""
