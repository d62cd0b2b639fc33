"""What a step will need, from a configuration alone: device memory term by term, and time."""
