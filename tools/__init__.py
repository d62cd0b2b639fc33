"""What the project itself is tested and measured with; not installed."""
