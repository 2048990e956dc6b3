"""From prompts to scored groups of rollouts."""
