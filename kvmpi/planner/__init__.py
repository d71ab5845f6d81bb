"""Predicts what a data-parallel job will do before it runs: arithmetic on events, no I/O but in ``command``."""
