"""What a run shows: logs, metrics, progress, curves."""
