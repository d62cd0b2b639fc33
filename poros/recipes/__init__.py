"""Recipes of ``poros finetune``: what is trained on what, read and checked without torch."""
