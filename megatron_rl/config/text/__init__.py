"""From text to keys and back: YAML, overrides, schema, what is printed."""
