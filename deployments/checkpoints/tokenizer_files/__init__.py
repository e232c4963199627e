"""Conversion of the tokenizer files of published models that have no tokenizer.json."""
