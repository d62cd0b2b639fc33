"""The step: visits of layers that are recorded once and replayed."""
