"""A model as a whole: what can be streamed in it, turning it into a streamed one and back."""
