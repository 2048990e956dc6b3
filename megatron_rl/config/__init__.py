"""The config of a run: sections, checks, loading. Imports no torch."""
