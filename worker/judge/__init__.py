"""Judges the outcome of a run."""
