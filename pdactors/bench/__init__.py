"""Measurements of a running cluster, each beside its reference."""
