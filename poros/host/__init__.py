"""The frozen base in host memory and on disk: slabs, and what the machine allows."""
