"""What a fine-tuning run is asked for: recipes and rows of data, checked before anything is loaded.

Nothing here imports PyTorch or transformers, so a mistake is answered at once.
"""
