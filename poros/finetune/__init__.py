"""``poros finetune``: from a recipe and rows of data to an adapter."""
