"""One command from a data set to an adapter: recipes run on TRL's trainers."""
