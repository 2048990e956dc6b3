"""Stages that build on each other's results, in one file: read, checked as a whole, run one after the other."""
