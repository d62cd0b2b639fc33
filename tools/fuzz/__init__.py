"""Fuzzing: training programs drawn at random, each run resident and prepared."""
