"""Runs: the verbs, the loops, and what a run keeps and writes."""
