"""How right a model's numbers are: against transformers, against itself, against another format."""
