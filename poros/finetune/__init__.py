"""``poros finetune``: from a recipe and rows of data to an adapter, on TRL's trainers."""
