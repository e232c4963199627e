"""The conversion of other tokenizer files to tokenizer.json, for published models that have
none."""
