"""The demo, and programs to copy."""
