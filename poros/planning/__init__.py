"""Plans a step from a configuration alone: device memory term by term, and time."""
