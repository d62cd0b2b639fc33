"""Small helpers that every package may use: devices, versions, formatting, profiler ranges."""
