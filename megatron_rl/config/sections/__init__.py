"""The sections of a run, one a file: keys, defaults and docs."""
