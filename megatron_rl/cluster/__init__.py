"""Processes: placing workers, calling them, ending them."""
