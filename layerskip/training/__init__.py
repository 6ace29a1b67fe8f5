"""The training recipe: layer dropout, exit-loss weights and their curriculum."""
