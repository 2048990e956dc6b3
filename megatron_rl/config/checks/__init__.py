"""What is refused before a run starts, grouped by what is looked at."""
