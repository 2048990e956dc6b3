"""From scored groups to an update."""
